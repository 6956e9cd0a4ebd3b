"""Device maps: to which device of the callee a tensor on each device of the caller goes. The rules are those of torch.

A worker publishes its plan (its maps, its devices, how many GPUs it has) with its record, and checks those of all workers, so
that all fail alike. A map of ``cpu`` to ``cpu`` says what happens anyway. Where no map says anything, a tensor goes to the
device of the same index (``Targets``), which torch refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import torch

from ..transport import cuda_driver as driver

NO_WAY = (
    "this tensor cannot travel: it is on {device}, and {why}. Move it to the CPU, or say where it goes with "
    "`set_device_map` on `TensorPipeRpcBackendOptions`"
)

DeviceLike = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]


def _gpu_type() -> str:
    return driver.kind() or "cuda"


def _device(given: DeviceLike) -> torch.device:
    """A number is the index of a GPU, on a host without GPUs too."""
    return torch.device(_gpu_type(), given) if isinstance(given, int) else torch.device(given)


def to_map(given: Mapping[DeviceLike, DeviceLike]) -> DeviceMap:
    """Raises ``ValueError`` where two sources go to one target."""
    found: DeviceMap = {}
    taken: DeviceMap = {}
    for source, target in ((_device(key), _device(value)) for key, value in given.items()):
        if target in taken:
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping, trying to map {source} and {taken[target]} to {target}"
            )
        found[source], taken[target] = target, source
    return found


def merge(known: DeviceMap, more: DeviceMap) -> DeviceMap:
    """Both maps in one. Raises ``ValueError`` if a source would go to two targets."""
    for source, target in more.items():
        if known.get(source, target) != target:
            raise ValueError(
                f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target} and {known[source]}"
            )
    return {**known, **more}


def to_devices(given: Iterable[DeviceLike]) -> list[torch.device]:
    found = [_device(device) for device in given]
    for device in found:
        if device.type != _gpu_type():
            raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {device.type}.")
    return found


class Plan(NamedTuple):
    """The device maps, devices and number of GPUs of one worker, as it published them."""

    maps: dict[str, list[tuple[torch.device, torch.device]]]
    devices: list[torch.device]
    gpus: int

    @staticmethod
    def load(text: str) -> Plan:
        if not text:
            return Plan({}, [], 0)
        maps, devices, gpus = json.loads(text)
        pairs = {to: [(torch.device(source), torch.device(target)) for source, target in pairs] for to, pairs in maps.items()}
        return Plan(pairs, [torch.device(device) for device in devices], gpus)


def dump(maps: Mapping[str, DeviceMap], devices: list[torch.device]) -> str:
    """This worker's plan as text; empty for one that has neither maps nor GPUs."""
    gpus = driver.count()
    if not maps and not devices and not gpus:
        return ""
    texts = {to: [(str(source), str(target)) for source, target in pairs.items()] for to, pairs in maps.items()}
    return json.dumps([texts, [str(device) for device in devices], gpus])


def check(plans: Mapping[str, str]) -> None:
    """Check the plans of all workers against each other. ``plans``: the ``dump`` of each worker by name, in rank order. Raises
    ``ValueError`` for the first problem."""
    loaded = {name: Plan.load(text) for name, text in plans.items()}
    for name, plan in loaded.items():
        for problem in _problems(plan, loaded):
            raise ValueError(f"Node {name} has {problem}")


def _problems(plan: Plan, plans: Mapping[str, Plan]) -> Iterator[str]:
    if len(set(plan.devices)) != len(plan.devices):
        yield f"duplicated devices\ndevices = {plan.devices}"
    if not _exist(plan.devices, plan.gpus):
        yield f"devices with invalid indices\ndevices = {plan.devices}\ndevice count = {plan.gpus}"
    if not plan.maps.keys() <= plans.keys():
        yield f"invalid target node names in its device maps\ndevice maps = {plan.maps}\nnode names = {sorted(plans)}"
    for to, pairs in plan.maps.items():
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        where = f"in its device map for {to}\ndevice map = {pairs}"
        if len(set(targets)) != len(targets):
            yield f"duplicated target devices {where}"
        for kind, devices, owner in (("source", sources, plan), ("target", targets, plans[to])):
            if not _exist(devices, owner.gpus):
                yield f"{kind} devices with invalid indices {where}\ndevice count = {owner.gpus}"
            if owner.devices and not {device for device in devices if device.type == _gpu_type()} <= set(owner.devices):
                yield f"unexpected {kind} devices {where}\ndevices = {owner.devices}"


def _exist(devices: Iterable[torch.device], gpus: int) -> bool:
    return all(device.type != _gpu_type() or (device.index or 0) < gpus for device in devices)


class Targets:
    """The devices at other workers to which our tensors go. ``maps``: our own device maps, by worker name.
    ``find_plan(worker)``: name and plan of a worker by its number."""

    def __init__(self, me: str, maps: Mapping[str, DeviceMap], find_plan: Callable[[int], tuple[str, str]]) -> None:
        self._me, self._maps, self._find_plan = me, maps, find_plan
        self.find: Callable[[int, torch.device, bool], torch.device] = cache(self._find)
        """``_find``, which is asked once: the plan of a worker does not change."""

    def _find(self, worker: int, device: torch.device, reply: bool) -> torch.device:
        """The device at ``worker`` for a tensor on ``device`` of a request or (``reply``) an answer. An answer uses the
        worker's own map for us in the other direction, and so does a gradient, if we have no map for the worker.
        ``RuntimeError`` if there is no such device."""
        name, text = self._find_plan(worker)
        plan = Plan.load(text)
        mine = self._maps.get(name, {})
        theirs = {target: source for source, target in plan.maps.get(self._me, ())}
        for known in (theirs, mine) if reply else (mine, theirs):
            if device in known:
                return known[device]
        if _exist([device], plan.gpus):
            return device
        why = f"worker {name} has " + (f"only {plan.gpus} GPUs" if plan.gpus else "no GPU")
        raise RuntimeError(NO_WAY.format(device=device, why=why))
