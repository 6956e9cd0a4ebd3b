"""The worker of each part of a model: dotted paths of modules at any depth, each with the name of a worker, or of a device of
that worker."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ..graph.plan.replicas import Replica, replica_path
from ..graph.trace.devices import CPU
from ..graph.trace.devices import tensors_of as own_tensors
from ..ground.advice import warn
from ..transport import NotSupported
from ..transport.gpu.driver import kind
from .compiled import is_compiled

_RANGE = re.compile(r"(\d+)-(\d+)")
_RANK = re.compile(r"rank:(\d+)")


class Places:
    """A placement of one model. ``homes`` has an entry for every placed module, ranges taken apart; what lies below one
    belongs to it unless it is placed itself, and what lies below none belongs to ``caller``. ``devices`` has those whose entry
    says on which device they compute. A part with replicas is at home where the first is; each of them, the first too, has an
    entry of its own (``replica_path``)."""

    def __init__(self, homes: Mapping[str, str], caller: str, devices: Mapping[str, torch.device] | None = None) -> None:
        self.homes, self.caller, self.devices = dict(homes), caller, dict(devices or {})
        self.replicated = [path.removeprefix("@0.") for path in homes if path.startswith("@0.")]
        """The parts that have replicas."""
        self.replicas = max((int(path[1 : path.index(".")]) + 1 for path in homes if path.startswith("@")), default=1)
        """How many each of them has."""
        self.entry = functools.cache(self._entry)
        self.placed = functools.cache(self._placed)
        self.whole = functools.cache(self._whole)

    def _entry(self, path: str) -> str | None:
        while path:
            if path in self.homes:
                return path
            path = path.rpartition(".")[0]
        return None

    def _placed(self, path: str) -> str | None:
        entry = self.entry(path)
        return None if entry is None else self.homes[entry]

    def device(self, path: str) -> torch.device | None:
        """Where a module, parameter or buffer is to compute, if its entry says so."""
        return self.devices.get(self.entry(path) or "")

    def owner(self, path: str) -> str:
        """The worker of a module, parameter or buffer."""
        return self.placed(path) or self.caller

    def _whole(self, path: str) -> bool:
        home, device, below = self.owner(path), self.device(path), path + "."
        inside = [other for other in self.homes if other.startswith(below)]
        return all(self.homes[other] == home and self.devices.get(other) == device for other in inside)

    def scope(self, path: str) -> str | None:
        """Where the operations in a module's own forward run; ``None``: where their inputs are."""
        if not path:
            return None
        return self.placed(path) or (self.caller if self.whole(path) else None)


def resolve(
    net: nn.Module,
    placement: Mapping[str, str | Sequence[str]],
    caller: str,
    workers: Sequence[str],
    ranked: Callable[[int], str] | None = None,
) -> Places:
    """The places that a placement describes. ``a.0-5`` stands for the numbered children 0 to 5 of ``a``. Workers are named
    as ``RemoteModule`` has it: ``worker``, ``worker/cuda:1``, ``rank:1/cuda:1`` (``ranked`` gives the worker of a rank). With
    several names there is a replica at each.

    Raises ``ValueError`` for an unknown worker, a device that is none, a path or number that does not exist, an empty range, or
    two entries for one module; ``NotSupported`` for a tensor that would lie on several workers or devices, or that has no
    shape yet. A module that shares its tensor with another goes where that is placed (``_together``).
    """
    homes: dict[str, str] = {}
    devices: dict[str, torch.device] = {}
    source: dict[str, str] = {}
    replicas: dict[str, list[str]] = {}
    for key, value in placement.items():
        found = [_place(key, name, workers, ranked) for name in ([value] if isinstance(value, str) else value)]
        for path in _expand(net, key):
            if path in homes:
                raise ValueError(f"placement has two entries for {path!r}: {source[path]!r} and {key!r}")
            if not isinstance(value, str):
                replicas[path] = _checked_replicas(key, found, caller)
                found = [(worker, None) for worker in replicas[path]]
            (worker, device), source[path] = found[0], key
            homes[path] = worker
            if device is not None:
                devices[path] = device
    places = _together(net, Places(homes, caller, devices))
    _check_tensors(net, places)
    return _with_replicas(net, places, replicas) if replicas else places


def _place(
    key: str, value: str, workers: Sequence[str], ranked: Callable[[int], str] | None
) -> tuple[str, torch.device | None]:
    worker, device = (value, None) if value in workers else _split(key, value)
    rank = _RANK.fullmatch(worker)
    if worker not in workers and rank is not None and ranked is not None:
        worker = ranked(int(rank[1]))
    if worker not in workers:
        raise ValueError(
            f"placement puts {key!r} on worker {worker!r}, which is not in this group; its workers are " + _listed(workers)
        )
    return worker, device


def _checked_replicas(key: str, places: Sequence[tuple[str, torch.device | None]], caller: str) -> list[str]:
    """Their workers, the caller last: what it has of a part is a copy, and the part is at the first of them."""
    names = [worker for worker, _ in places]
    if len(names) < 2 or len({*names}) < len(names):
        raise ValueError(
            f"placement gives {key!r} replicas at {_listed(names) or 'no worker'}: name two workers or more, each once"
        )
    if any(device is not None for _, device in places):
        raise NotSupported(f"placement gives {key!r} replicas on devices: replicas compute on the CPU")
    return sorted(names, key=lambda name: name == caller)


def _with_replicas(net: nn.Module, places: Places, replicas: Mapping[str, Sequence[str]]) -> Places:
    """The same with an entry for each replica. Raises ``ValueError`` where parts have different numbers of them,
    ``NotSupported`` for parts that are no operation of their own."""
    counts = {path: len(workers) for path, workers in replicas.items()}
    if len({*counts.values()}) > 1:
        raise ValueError(f"all parts with replicas must have the same number of them, got {counts}")
    for path in replicas:
        module = net.get_submodule(path)
        inside = [other for other in places.homes if other.startswith(path + ".") or path.startswith(other + ".")]
        if inside or type(module) in (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict) or is_compiled(module):
            why = f"{inside[0]!r} is placed too" if inside else f"it is a {type(module).__name__}"
            raise NotSupported(f"{path!r} cannot have replicas: {why}", hint="give replicas to modules that the forward calls")
        if not all(tensor.is_cpu for tensor in (*module.parameters(), *module.buffers())):
            raise NotSupported(f"{path!r} cannot have replicas: it has tensors on an accelerator")
    for shared in _shared(net):
        owners = {next((path for path in replicas if name.startswith(path + ".")), "") for name in shared}
        if len(owners) > 1:
            raise NotSupported(f"{' and '.join(map(repr, shared))} are one tensor: a part that has replicas must have it alone")
    homes = dict(places.homes)
    for path, workers in replicas.items():
        homes.update({replica_path(at, path): worker for at, worker in enumerate(workers)})
    return Places(homes, places.caller, places.devices)


def _together(net: nn.Module, places: Places) -> Places:
    """With entries that bring modules of one tensor (tied weights) together, where only one of them has an entry of its own, or
    is below one: the deepest entry decides, then the first. A module with children stays where it is."""
    homes, devices = dict(places.homes), dict(places.devices)
    moved: list[str] = []
    for shared in _shared(net):
        paths = [name.rpartition(".")[0] for name in shared]
        entries = [entry for path in paths if (entry := places.entry(path)) is not None]
        if len({home_of(places, name) for name in shared}) == 1 or not entries:
            continue
        exact = [entry for entry in entries if entry in paths]
        chosen = (exact or entries)[0]
        for path in paths:
            same = home_of(places, path) == home_of(places, chosen)
            if not same and path and path not in places.homes and not any(net.get_submodule(path).children()):
                homes[path] = places.homes[chosen]
                if chosen in places.devices:
                    devices[path] = places.devices[chosen]
                else:
                    devices.pop(path, None)
                moved.append(f"{path!r} goes to {home_of(places, chosen)!r} with {chosen!r}")
    if not moved:
        return places
    warn(f"tied weights: {', '.join(dict.fromkeys(moved))}; to choose, place both modules")
    return Places(homes, places.caller, devices)


def _shared(net: nn.Module) -> list[list[str]]:
    """The names of every tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in (*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def _split(key: str, value: str) -> tuple[str, torch.device | None]:
    worker, slash, name = value.rpartition("/")
    if not slash:
        return value, None
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"placement puts {key!r} on {value!r}: {name!r} is no device ({str(error).splitlines()[0]})") from None
    if device.type == "cpu":
        return worker, CPU
    if device.type != (kind() or "cuda"):
        raise ValueError(f"placement puts {key!r} on {value!r}: parts compute on the CPU or on {kind() or 'cuda'}")
    return worker, torch.device(device.type, device.index or 0)


def _expand(net: nn.Module, key: str) -> list[str]:
    found = [("", net)]
    for step in key.split("."):
        found = [(join(path, name), child) for path, module in found for name, child in _children(net, key, path, module, step)]
    return [path for path, _ in found]


def _children(net: nn.Module, key: str, path: str, module: nn.Module, step: str) -> Iterator[tuple[str, nn.Module]]:
    known = {name: child for name, child in module._modules.items() if child is not None}
    if is_compiled(module) and step != "_orig_mod":
        yield from _children(net, key, join(path, "_orig_mod"), known["_orig_mod"], step)
        return
    match = _RANGE.fullmatch(step)
    if step in known or match is None:
        wanted = [step]
    else:
        first, last = int(match[1]), int(match[2])
        if first > last:
            raise ValueError(f"placement names {key!r}: the range {step!r} is empty, its first number is the larger one")
        wanted = [str(number) for number in range(first, last + 1)]
    for name in wanted:
        if name not in known:
            where = f"{path!r}" if path else type(net).__name__
            parts = "top-level parts" if not path else "parts"
            raise ValueError(
                f"placement names part {key!r}, which {type(net).__name__} does not have: there is no {name!r} in {where}; its "
                f"{parts} are {_listed(known) or '(none)'}"
            )
        yield name, known[name]


def _check_tensors(net: nn.Module, places: Places) -> None:
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise NotSupported(f"{name!r} has no shape yet", hint="run the model once before wrap()")
    for shared in _shared(net):
        homes = [home_of(places, name) for name in shared]
        if len(set(homes)) > 1:
            raise NotSupported(
                f"{' and '.join(map(repr, shared))} are one tensor, but their parts go to {' and '.join(map(repr, homes))}",
                hint="place parts that share tensors on the same worker and device, or the modules inside of them that do not",
            )


def home_of(places: Places, path: str) -> str:
    """Worker and device, as a placement names them."""
    device = places.device(path)
    return places.owner(path) if device is None else f"{places.owner(path)}/{device}"


def divide(net: nn.Module, places: Places) -> dict[str, dict[str, nn.Module | torch.Tensor]]:
    """What each worker but the caller gets, by path, in the order of ``named_modules``: modules that stay whole, and the
    parameters, buffers and plain tensors that lie in a module which does not; then ``Replica`` of parts that have such."""
    parts: dict[str, dict[str, nn.Module | torch.Tensor]] = {}

    def walk(module: nn.Module, path: str) -> None:
        home = places.owner(path)
        if path and places.whole(path):
            if home != places.caller:
                parts.setdefault(home, {})[path] = module
            return
        if home != places.caller:
            own = parts.setdefault(home, {})
            own.update({join(path, name): tensor for name, tensor in own_tensors(module).items()})
        for name, child in module._modules.items():
            if child is not None:
                walk(child, join(path, name))

    walk(net, "")
    for path in places.replicated:
        for at in range(places.replicas):
            # Behind all others: parameters are counted in this order.
            key = replica_path(at, path)
            if places.homes[key] != places.caller:
                parts.setdefault(places.homes[key], {})[key] = Replica(net.get_submodule(path))
    return {worker: own for worker, own in parts.items() if own}


def replicas_here(net: nn.Module, places: Places) -> dict[str, Replica]:
    """Those that the caller runs, by path: of copies."""
    keys = {replica_path(places.replicas - 1, path): path for path in places.replicated}
    return {key: Replica(copy.deepcopy(net.get_submodule(keys[key]))) for key in keys if places.homes[key] == places.caller}


def place_here(net: nn.Module, places: Places) -> None:
    """Move what stays at the caller to the devices that its entries say."""
    for path, module in net.named_modules():
        device = places.device(path)
        if device is None or places.owner(path) != places.caller:
            continue
        if places.whole(path):
            module.to(device)
        else:
            module._apply(lambda tensor, device=device: tensor.to(device), recurse=False)


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _listed(names: object) -> str:
    return ", ".join(map(repr, names))  # type: ignore[call-overload]


def check_hooked(net: nn.Module, places: Places) -> None:
    """``NotSupported`` for a parameter that is to move and has hooks, which copies lose; its gradient is summed elsewhere."""
    for name, parameter in net.named_parameters(remove_duplicate=False):
        moves = places.owner(name) != places.caller or any(name.startswith(f"{path}.") for path in places.replicated)
        if moves and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            raise NotSupported(
                f"parameter {name!r} is to move to worker {places.owner(name)!r}, where the hooks on it would not run",
                hint="change its gradient after backward() (p.grad.mul_(mask)), use hooks of modules, or leave it here",
            )


def check_copied(net: nn.Module) -> None:
    """``NotSupported`` for a module with attributes that a copy of it would not have, and for a wrapped or served model."""
    for name, parameter in net.named_parameters():
        if hasattr(type(parameter), "_watch"):  # a ``served.parameter.ServedParameter``
            raise NotSupported(
                f"{name!r} is a parameter of a served model", hint="wrap a model, or serve it; its copy.deepcopy is all here"
            )
    for path, module in net.named_modules():
        if "_rdmarpc" in getattr(type(module), "__slots__", ()):
            raise NotSupported(
                f"{path or 'the model'!r} is a wrapped model already",
                hint="wrap the whole model once, by a placement that names the parts in it; its copy.deepcopy is all here",
            )
        if "_place" in vars(module) or "_away" in vars(module):
            raise NotSupported(
                f"{path or 'the model'!r} is a part of a wrapped model already", hint="copy.deepcopy of that model is all here"
            )
        for cls in type(module).__mro__:
            slots = vars(cls).get("__slots__", ())
            names = {slots} if isinstance(slots, str) else set(slots)
            if lost := sorted(names - {"__dict__", "__weakref__"}):
                raise NotSupported(
                    f"{path or 'the model'!r}, a {cls.__name__}, keeps {lost[0]!r} in __slots__, which copies of modules lose",
                    hint="keep it as an attribute: leave it out of __slots__",
                )
