"""The part of our memory that the peer of one TCP stream may touch."""

from __future__ import annotations

import secrets
import weakref

import torch

from ..channel import Channel
from ..device import Device
from ..memory.memory import NOWHERE, Registered
from ..region import LENT, RemoteRegion, local_bytes
from .wire import memory_at


class Access:
    """Looked up for every frame: nothing is announced, so nothing has to be taken back. Any thread lends."""

    def __init__(self, device: Device, channel: Channel) -> None:
        """``channel``: the channel, whose peer may touch its ``own_pool``. It is not kept alive."""
        self._device, self._channel = device, weakref.ref(channel)
        self.lent: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}
        """Memory lent to this peer for READs, by key: address, bytes, the storage. The entry goes when the storage dies."""

    def lend(self, tensor: torch.Tensor) -> RemoteRegion:
        """See ``Device.lend``. Good for this peer alone, and as long as the tensor's storage lives."""
        address, nbytes = local_bytes(tensor)
        key, lent = secrets.randbits(64), self.lent
        storage = weakref.ref(tensor.untyped_storage(), lambda _: lent.pop(key, None) and None)
        lent[key] = address, nbytes, storage
        return RemoteRegion(self._device.uid, self._device.epoch, LENT, key, 0, nbytes)

    def place(self, region: int) -> tuple[int, int, int]:
        """Key, address and bytes of a region that this peer may write to."""
        address, size, key, _ = self._device.regions.get(region, NOWHERE)
        return key, address, size

    def look_up(self, region: int, key: int, offset: int, nbytes: int, *, write: bool) -> memoryview | str:
        """Our memory that the peer names, or why it may not touch it."""
        if nbytes == 0:
            return memoryview(b"")
        if region == LENT:
            address, size, right_key, pool = self._loan(key)
        else:
            address, size, right_key, pool = self._device.regions.get(region, NOWHERE)
        if not size:
            return f"region {region} is not registered (any more)"
        if pool is not None:
            channel = self._channel()
            own = channel.own_pool if channel is not None else None
            if not pool.admits(own, write=write):
                return f"region {region} {'may only be read' if pool.admits(own, write=False) else 'is for another peer'}"
        if key != right_key:
            return f"wrong key for region {region}"
        if offset + nbytes > size:
            return f"bytes {offset}:{offset + nbytes} of a region of {size} bytes"
        return memory_at(address + offset, nbytes)

    def _loan(self, key: int) -> Registered:
        entry = self.lent.get(key)
        return Registered(entry[0], entry[1], key, self._device.arena.readable) if entry is not None else NOWHERE
