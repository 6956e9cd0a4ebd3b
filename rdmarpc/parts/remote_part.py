"""The stand-in for a module that lies at another worker as a whole."""

from __future__ import annotations

import copy
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..graph.guards.kept import plain
from ..graph.trace.watch import GRADIENT_HOOKS, HOOKS
from ..graph.work.access import INTERNAL
from ..transport import NotSupported
from .buffer import changed
from .entries import Loading, entries_of, load_entries
from .parameter import Owners
from .tables import Table, has

_BEFORE_WRAP = "do that before wrap()"
_COPY = "do that before wrap(); torch.func.functional_call takes copy.deepcopy(model), which is all here"
_ABOUT_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
TABLES_OF_HOOKS = (*HOOKS, *GRADIENT_HOOKS, *_ABOUT_HOOKS)
_LEFT_OUT = {0.0, 1.0}
"""Chances at which modules of torch draw no number."""
_OURS = ("training", "_is_full_backward_hook")
"""Attributes of the stand-in itself."""


class Place:
    """Where the original of a stand-in is. ``top``: it is a part of its own, not inside of one; ``within``: it is inside of
    one, which may be so as well. ``hooked``: it came with hooks. ``prepended``: the hooks on the stand-in that come before
    those. ``came``: the tables of those that it came with, from which handles remove them. ``loads_itself``: something in its
    part takes part in ``load_state_dict``, which is under way while there is a ``loading``. ``fixed``: attributes that a class
    of torch never changes by itself; ``unread``: those of such a class that can be changed inside (the keys of a
    ``ParameterDict``), until one is read. They are compared before each step from then on."""

    def __init__(self, original: nn.Module, owners: Owners, worker: str, path: str, top: bool) -> None:
        self.owners, self.worker, self.path, self.top = owners, worker, path, top
        self.within, self.prepended, self.loads_itself = False, set[int](), False
        self.loading: Loading | None = None
        tables = {name: vars(original)[name] for name in TABLES_OF_HOOKS}
        self.hooked = any(tables.values())
        self.came = tables if self.hooked else {}
        self.kind = type(original)
        self.entries = entries_of(original)
        own = {name: value for name, value in vars(original).items() if name not in INTERNAL}
        hooked = any(table for name, table in vars(original).items() if name.endswith("_hooks"))
        known = self.kind.__module__.startswith("torch.nn.modules.") and not hooked
        self.fixed = {name: value for name, value in own.items() if known and plain(value)}
        shared = {name: v for name, v in own.items() if not plain(v) and not isinstance(v, torch.Tensor)}
        self.unread = shared if known else {}
        for name, value in {}.items() if known else shared.items():
            owners.settings.share((worker, path, name), value)

    def refusal(self, why: str, hint: str = _BEFORE_WRAP) -> NotSupported:
        return NotSupported(f"{self.path!r} lives on worker {self.worker!r}: {why}", peer=self.worker, hint=hint)


class RemotePart(nn.Module):
    """Mirrors one module (and has a mirror for each of its children), with a ``RemoteParameter`` for each parameter, and a
    ``RemoteBuffer`` for each buffer. It is an instance of the module's class as well (``part_class``).

    ``train``, ``eval`` and ``requires_grad_`` work as ever and travel with the next step. Attributes are read and set at the
    owner. A call runs the part there; hooks on it run here, around the call. A part with hooks on modules inside of it runs
    here (``fetched``). What cannot be done from here raises ``NotSupported``.
    """

    _place: Place

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place = self._place
        running = place.owners.eager
        return (running or place.owners.outside).call(place.path, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What a class of its own would do is done at the owner.
        return nn.Module.__call__(self, *args, **kwargs) if hooks_around(self) else self.forward(*args, **kwargs)

    # -- attributes

    def __getattr__(self, name: str) -> Any:
        tables = vars(self)
        if name == "parametrizations" and _parametrizes(sys._getframe(1)):
            raise tables["_place"].refusal("it cannot be parametrized from here", _PARAMETRIZE)
        for table in ("_parameters", "_buffers", "_modules"):
            if name in tables.get(table, ()):
                return tables[table][name]
        if name.startswith("__") or "_place" not in tables:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        place: Place = tables["_place"]
        if name in place.fixed:
            return place.fixed[name]
        where = place.worker, place.path, name
        if name in place.unread:
            place.owners.settings.share(where, place.unread.pop(name))
        return place.owners.settings.read(where)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OURS or isinstance(_static(type(self), name), property):
            object.__setattr__(self, name, value)
            return
        if has(self, name, value):
            return
        self._refuse_change(name)
        if isinstance(value, (nn.Module, nn.Parameter)):
            raise self._place.refusal(f"{name!r} cannot become a {type(value).__name__} from here")
        place = self._place
        if name in self._buffers and not isinstance(value, torch.Tensor):
            raise place.refusal(f"its buffer {name!r} cannot be replaced by a {type(value).__name__}")
        before = place.fixed.pop(name, None)
        place.unread.pop(name, None)
        # Of a class of torch: its operations stay as they are, but for those that it leaves out.
        gentle = type(before) is float and type(value) is float and not {before, value} & _LEFT_OUT
        place.owners.settings.write((place.worker, place.path, name), value, gentle)
        if gentle:
            place.fixed[name] = value
        if name in self._buffers:
            changed(self._buffers[name], value)
            place.entries = {key: tuple(value.shape) if key == name else shape for key, shape in place.entries.items()}
        _see(type(self), name)

    def __delattr__(self, name: str) -> None:
        self._refuse_change(name)
        if name in self._buffers:
            raise self._place.refusal(f"{name!r} cannot be deleted from here")
        place = self._place
        place.owners.settings.delete((place.worker, place.path, name))
        place.fixed.pop(name, None)
        place.unread.pop(name, None)

    def _refuse_change(self, name: str) -> None:
        if name in self._parameters or name in self._modules or name in INTERNAL or name in ("forward", "__class__"):
            raise self._place.refusal(f"{name!r} cannot be replaced or deleted from here")

    # -- state

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The owner's values, as of all the steps before, on the CPU: copies (``StateCopies``). ``keep_vars``: what stands here
        for parameters and buffers."""
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        place = self._place
        if place.owners.apart is not None:
            place.owners.apart.append((place.worker, (place.path, prefix, None)))
            return destination
        own = dict((*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)))
        copies = {}
        for name, value in place.owners.ask_owner(place.worker, "state", place.path, keep_vars).items():
            if value is None and name in own:
                destination[prefix + name] = own[name]
            else:
                destination[prefix + name] = copies[prefix + name] = value
        place.owners.state_copies.add(place.worker, copies)
        if hasattr(destination, "_metadata"):
            for name, module in self.named_modules(remove_duplicate=False):
                destination._metadata[(prefix + name).rstrip(".")] = {"version": module._version}
        return destination

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any) -> None:
        place = self._place
        if not place.loads_itself:
            load_entries(place, self._modules, state_dict, prefix, local_metadata, strict, *lists)
            return
        if local_metadata.get("assign_to_params_buffers"):
            raise place.refusal("load_state_dict(..., assign=True) cannot put other tensors there")
        loading = place.loading
        if loading is None or prefix not in loading.left:
            loading = Loading(self, place.path, prefix, state_dict)
            self._set_loading(loading)
        if loading.called(prefix, local_metadata):
            loading.part._set_loading(None)
            given = loading.path, loading.prefix, loading.state, loading.metadata
            place.owners.state_copies.settle(loading.state.keys())
            for found, answer in zip(lists, place.owners.ask_owner(place.worker, "load_all", *given)):
                found += answer

    def _set_loading(self, loading: Loading | None) -> None:
        for module in self.modules():
            module._place.loading = loading  # type: ignore[union-attr]

    def apply(self, fn: Callable[[nn.Module], Any]) -> RemotePart:
        """``module.apply(fn)`` at the owner; ``fn`` must be picklable."""
        self._place.owners.ask_owner(self._place.worker, "call", self._place.path, "apply", (fn,))
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """``module.compile(...)`` at the owner."""
        self._place.owners.ask_owner(self._place.worker, "compile", self._place.path, args, kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for tensor in (*self.parameters(recurse), *self.buffers(recurse)):
            check_kept(fn, tensor, self._place.refusal)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A module of the original's class here, with the owner's values."""
        if id(self) not in memo:
            self._place.owners.fetch_parts(memo, True)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return given, (copy.deepcopy(self),)

    # -- hooks

    def register_forward_pre_hook(self, hook: Any, *, prepend: bool = False, **options: Any) -> Any:
        return self._placed(super().register_forward_pre_hook(hook, prepend=prepend, **options), prepend)

    def register_forward_hook(self, hook: Any, *, prepend: bool = False, **options: Any) -> Any:
        return self._placed(super().register_forward_hook(hook, prepend=prepend, **options), prepend)

    def register_full_backward_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self._placed(super().register_full_backward_pre_hook(hook, prepend), prepend)

    def register_full_backward_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self._placed(super().register_full_backward_hook(hook, prepend), prepend)

    def _placed(self, handle: Any, prepend: bool) -> Any:
        if prepend:
            self._place.prepended.add(handle.id)
        return handle

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._place.refusal("a hook of this kind would not run")

    register_state_dict_pre_hook = register_state_dict_post_hook = _register_state_dict_hook = _refuse_hook
    register_load_state_dict_pre_hook = _register_load_state_dict_pre_hook = _refuse_hook
    register_load_state_dict_post_hook = _refuse_hook

    def _get_name(self) -> str:
        return f"Remote{self._place.kind.__name__}"

    def extra_repr(self) -> str:
        return f"on {self._place.worker!r}"


_PARAMETRIZE = "register or remove parametrizations (weight_norm, spectral_norm, orthogonal and the like) before wrap()"
_PARAMETRIZING = frozenset(
    function.__code__ for function in (parametrize.register_parametrization, parametrize.remove_parametrizations)
)


def _parametrizes(frame: types.FrameType | None) -> bool:
    """Whether torch asks because it is to change the parametrizations of a module, and not to read them."""
    while frame is not None and frame.f_globals.get("__name__") == parametrize.__name__:
        if frame.f_code in _PARAMETRIZING:
            return True
        frame = frame.f_back
    return False


def hooks_around(part: RemotePart) -> bool:
    """Whether hooks on a stand-in run here, around a call of the original. Else they have a place among those of the original,
    which runs here then."""
    place = part._place
    # Hooks of the old kind ask for the operation by which the original made its result.
    return place.top and not place.within and not place.hooked and part._is_full_backward_hook is not False


def copy_hooks(part: RemotePart, copied: nn.Module, memo: dict[int, Any]) -> None:
    """Give the copy of a module copies of the hooks on its stand-in, in the order that they have in one module."""
    first = part._place.prepended
    for name in TABLES_OF_HOOKS:
        there, own = copy.deepcopy(dict(added(vars(part)[name])), memo), vars(copied)[name]
        if there.keys() & own.keys():
            raise part._place.refusal("its hooks have the numbers of hooks here, so they cannot be copied together")
        before = {key: hook for key, hook in there.items() if key in first}
        vars(copied)[name] = type(own)({**before, **own, **there})
    copied._is_full_backward_hook = part._is_full_backward_hook


def tables_inside(part: RemotePart) -> list[Any]:
    """The tables of hooks on stand-ins inside of one."""
    return [vars(module)[name] for module in part.modules() if module is not part for name in (*HOOKS, *GRADIENT_HOOKS)]


class AddedHooks(OrderedDict[int, Any]):
    """Hooks that were set on a stand-in whose original came with some: those are not here, so a list would lack them.
    ``nn.Module`` sets and removes hooks; what looks for one (``remove_weight_norm``, ``prune.is_pruned``) lists them."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def _refuse(self) -> NoReturn:
        raise self._place.refusal(
            "it came with hooks, which are not here to be listed",
            "list or remove them (remove_weight_norm, prune.remove) before wrap(); handle.remove() works here, too",
        )

    def __iter__(self) -> Iterator[int]:
        self._refuse()

    def __reversed__(self) -> Iterator[int]:
        self._refuse()

    def keys(self) -> Any:
        self._refuse()

    def values(self) -> Any:
        self._refuse()

    def items(self) -> Any:
        self._refuse()

    def clear(self) -> None:
        self._refuse()


def added(table: dict[int, Any]) -> Any:
    """The items of a table of hooks of a stand-in."""
    return OrderedDict.items(table)  # type: ignore[arg-type]


def has_hooks(part: RemotePart) -> bool:
    return any(vars(part)[name] for name in (*HOOKS, *GRADIENT_HOOKS))


def given(module: nn.Module) -> nn.Module:
    """In a pickle of a stand-in: what it became."""
    return module


def check_kept(
    fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor, refusal: Callable[[str], NotSupported]
) -> None:
    """Refuse what would change a tensor that lies elsewhere: ``fn`` must leave one of that kind as it is."""
    with torch._C.DisableTorchFunctionSubclass():
        trial = torch.zeros((2,) * tensor.dim(), dtype=tensor.dtype)
    if fn(trial) is not trial or trial._version:
        raise refusal("it cannot be converted or moved from here")


_classes: dict[type, type] = {}


def part_class(kind: type[nn.Module]) -> type[RemotePart]:
    """``RemotePart`` that is a ``kind`` as well, so that ``isinstance`` says so and its methods and properties are there. They
    run here, over the stand-ins."""
    if kind not in _classes:
        try:
            if isinstance(_static(kind, "training"), property):
                raise TypeError  # it hands everything on to another module

            names = {
                "__module__": kind.__module__,
                "__qualname__": kind.__qualname__,
                "__new__": lambda cls, *a, **k: kind(*a, **k),
            }
            _classes[kind] = type(kind.__name__, (RemotePart, kind), names)
        except TypeError:  # of a class that cannot have such children
            _classes[kind] = RemotePart
    return _classes[kind]


def new_part(original: nn.Module, owners: Owners, worker: str, path: str, top: bool) -> RemotePart:
    """The stand-in for one module, without its parameters, buffers and children."""
    kind = part_class(type(original))
    part: RemotePart = object.__new__(kind)
    nn.Module.__init__(part)
    place = Place(original, owners, worker, path, top)

    def refuse(name: str, value: Any) -> None:
        raise place.refusal(f"{name!r} cannot be added, replaced or deleted from here", _COPY)

    own = {name: Table({}, refuse) for name in ("_parameters", "_buffers", "_modules")}
    vars(part).update(own, training=original.training, _place=place, _version=original._version)
    vars(part).update({name: AddedHooks(place) for name in place.came})
    vars(part)["_is_full_backward_hook"] = original._is_full_backward_hook
    vars(part)["_non_persistent_buffers_set"] = set(original._non_persistent_buffers_set)
    for name in vars(original):
        _see(kind, name)
    return part


class _Attribute:
    """An attribute that instances have, and their class too: what instances of the stand-in's class have is at their owner."""

    def __init__(self, name: str, default: Any) -> None:
        self._name, self._default = name, default

    def __get__(self, part: RemotePart | None, kind: type) -> Any:
        return self._default if part is None else part.__getattr__(self._name)

    def __set__(self, part: RemotePart, value: Any) -> None:
        part.__setattr__(self._name, value)

    def __delete__(self, part: RemotePart) -> None:
        part.__delattr__(self._name)


def _see(kind: type, name: str) -> None:
    """Let no attribute of the class hide one of an instance."""
    default = _static(kind, name)
    if kind is RemotePart or default is _NONE or name in INTERNAL or name == "forward" or hasattr(RemotePart, name):
        return
    if not isinstance(default, (property, _Attribute)):
        setattr(kind, name, _Attribute(name, default))


_NONE = object()


def _static(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _NONE)
