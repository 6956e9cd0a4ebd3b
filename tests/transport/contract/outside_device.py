"""A device of another package, which brings it by an entry point: ``shm`` under a name of its own."""

from __future__ import annotations

from rdmarpc.transport import Channel, Device, DeviceOptions
from rdmarpc.transport.memory.arena import Pool
from rdmarpc.transport.shm.device import ShmDevice


class OutsideDevice(ShmDevice):
    kind = "outside"

    def __init__(self, place: str, options: DeviceOptions, shout: bool = False) -> None:
        """``shout``: an option of this kind alone."""
        self.place, self.shout = place, shout
        super().__init__(options)

    @property
    def address(self) -> bytes:
        return super().address.replace(b"shm:", b"outside:", 1)

    def explain(self) -> str:
        return super().explain().replace("shm:", "outside: as shm,", 1)

    def why_not(self, peer: bytes) -> str:
        kind, _, rest = peer.partition(b":")
        return super().why_not(b"shm:" + rest) if kind in (b"outside", b"shm") else "that is no address of outside"

    def connect(self, peer: bytes, *, hello: bytes = b"", timeout: float = 5.0, pool: Pool | None = None) -> Channel:
        return super().connect(peer.replace(b"outside:", b"shm:", 1), hello=hello, timeout=timeout, pool=pool)


def open_outside(place: str, options: DeviceOptions, **own: bool) -> Device:
    return OutsideDevice(place, options, **own)
