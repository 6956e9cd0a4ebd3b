"""The values that a device's argument ``tls`` may have."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import NotSupported


@dataclass(frozen=True)
class TlsOptions:
    """How streams are encrypted (TLS 1.3).

    ``certificate`` (with its chain), ``key``, ``authority``: PEM files, all three or none. Without them the job secret proves
    both ends. With them each end shows its certificate, which must be signed by the other end's ``authority``. Names in
    certificates are not compared, so use an authority of the job's own. ``rdma_in_clear``: allow RDMA to carry payload, which
    is not encrypted; control messages are. Raises ``ValueError`` for some of the files without the others.
    """

    certificate: str = ""
    key: str = ""
    authority: str = ""
    rdma_in_clear: bool = False

    def __post_init__(self) -> None:
        files = (self.certificate, self.key, self.authority)
        if any(files) and not all(files):
            raise ValueError("certificate, key and authority belong together: give all three files, or none")


def check(tls: object) -> None:
    """Raise ``TypeError`` for a value that a device does not accept as ``tls``."""
    if not isinstance(tls, (bool, TlsOptions)):
        raise TypeError(f"tls is True, False or TlsOptions, got {tls!r}")


def permit_rdma(tls: bool | TlsOptions) -> None:
    """Raise ``NotSupported`` if RDMA would carry data in clear that has to be encrypted."""
    if tls and not (isinstance(tls, TlsOptions) and tls.rdma_in_clear):
        why = "tls is on, and what RDMA carries is not encrypted"
        hint = "tls=TlsOptions(rdma_in_clear=True) allows it, where the fabric is trusted"
        raise NotSupported(why, device="verbs", hint=hint)
