"""Names and meanings of what libibverbs reports."""

from __future__ import annotations

import errno
import importlib
import resource
from types import ModuleType

import pytest

from rdmarpc.transport import NotSupported, PeerLost, RdmaError, RegistrationError, RemoteAccessError
from rdmarpc.transport.nic import libibverbs, packages
from rdmarpc.transport.nic.libibverbs import DeviceAttr
from rdmarpc.transport.words import layout

LIMITS = DeviceAttr("1.0", 500, 1 << 30, 10, 10, 10, 16, 16)


@pytest.fixture(scope="module")
def enums() -> ModuleType:
    """The numbers as rdma-core publishes them to Python."""
    try:
        packages.Pyverbs()
    except NotSupported as error:
        pytest.skip(str(error))
    try:
        return importlib.import_module("pyverbs.libibverbs_enums")
    except ImportError:
        return importlib.import_module("pyverbs.enums")


def test_every_number_has_its_name(enums: ModuleType) -> None:
    for number, meaning in libibverbs.MEANINGS.items():
        assert getattr(enums, f"IBV_WC_{meaning.name}") == number
    for number, name in enumerate(libibverbs.EVENTS):
        assert getattr(enums, f"IBV_EVENT_{name}") == number
    assert set(libibverbs.LOSES_ALL) < set(libibverbs.EVENTS)
    named = [name for name in vars(layout) if name.startswith(("WC_", "WR_", "SEND_", "QPS_", "QPT_", "ACCESS_"))]
    compared = [name for name in named if hasattr(enums, f"IBV_{name}")]
    assert len(compared) >= 19
    assert {name: getattr(enums, f"IBV_{name}") for name in compared} == {name: getattr(layout, name) for name in compared}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("REM_ACCESS_ERR", RemoteAccessError),
        ("REM_INV_REQ_ERR", RemoteAccessError),
        ("RETRY_EXC_ERR", PeerLost),
        ("RNR_RETRY_EXC_ERR", PeerLost),
        ("WR_FLUSH_ERR", PeerLost),
        ("LOC_PROT_ERR", RegistrationError),
        ("LOC_LEN_ERR", RdmaError),
    ],
)
def test_a_completion_that_failed_is_an_error_of_ours(name: str, kind: type[RdmaError]) -> None:
    (number,) = (number for number, meaning in libibverbs.MEANINGS.items() if meaning.name == name)
    error = libibverbs.error_of(number, peer="b:1", vendor_err=0x77)
    assert type(error) is kind
    assert (error.status, error.peer, error.device) == (name, "b:1", "verbs")
    assert error.hint and "0x77" in str(error)


def test_a_number_of_a_later_version_is_an_error_as_well() -> None:
    assert libibverbs.error_of(99, peer="b").status == "STATUS_99"
    assert libibverbs.event_name(99) == "EVENT_99" and libibverbs.event_name(-1) == "EVENT_-1"


def test_a_verb_that_failed() -> None:
    error = libibverbs.failure("mlx5_0", "ibv_create_cq", errno.ENOMEM)
    assert (type(error), error.status, error.device) == (RdmaError, "ENOMEM", "mlx5_0") and "memlock" in error.hint
    assert type(libibverbs.failure("mlx5_0", "ibv_create_srq", errno.EOPNOTSUPP)) is NotSupported
    assert libibverbs.failure("mlx5_0", "ibv_create_cq", 9999).status == "9999"


@pytest.mark.parametrize(
    ("nbytes", "status", "locked", "mapped", "said"),
    [
        (1 << 20, "ENOMEM", 65536, True, "may lock 65536 bytes of memory (memlock)"),
        (1 << 31, "EINVAL", resource.RLIM_INFINITY, True, "at most 1073741824 bytes at once (max_mr_size)"),
        (1 << 20, "ENOMEM", resource.RLIM_INFINITY, True, "all 500 registrations of the adapter are in use (max_mr)"),
        (1 << 20, "EFAULT", 65536, False, "there is no memory at its address"),
        (1 << 20, "EFAULT", resource.RLIM_INFINITY, True, "of a kind that cannot be pinned"),
        (1 << 20, "EINVAL", resource.RLIM_INFINITY, True, "could not be registered"),
    ],
)
def test_which_limit_a_registration_met(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, status: str, locked: int, mapped: bool, said: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (locked, locked))
    error = libibverbs.registration_failure("mlx5_0", nbytes, status, LIMITS, mapped=mapped)
    assert isinstance(error, RegistrationError) and said in str(error) and str(nbytes) in str(error)
    assert (error.device, error.status) == ("mlx5_0", status)
