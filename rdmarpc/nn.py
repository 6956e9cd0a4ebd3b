"""``torch.distributed.nn``: a module that lives on another worker.

The module is the value of a reference. A *handle* to it travels by RPC and calls ``forward`` as any other function is called.
So arguments and results use landing places that are granted ahead of calls (``links/grants``), with a signature for each
module, and calls carry the autograd context. A call names its module by the number of the reference, and creates no fork of the
reference (``references/forks``); the caller keeps its own fork until the answer instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import _remote_device
from torch.utils import _pytree as pytree

from .base.futures import Awaitable, fail, mapped
from .base.here import Call
from .calls import agent as _agent
from .functions import async_execution
from .internal import taken_apart
from .message import permits, serialize
from .references.handle import RRef, ask, check, fork_of, over
from .transport import bare

__all__ = ["RemoteModule"]

_CPU = "cpu"
_NOT_PICKLED = "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"


class Target:
    """A module at its owner, as one handle calls it. Thread-safe. Travels by RPC."""

    def __init__(self, rref: RRef[nn.Module], device: str, mapped: bool) -> None:
        self._rref, self._device, self._mapped = rref, device, mapped
        self._made = False
        """Known to be there: before that a call would hold a thread of the owner, which may need it to make the module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """``module.forward(*args, **kwargs)`` on the owner. Raises what it raises, or what making the module raised."""
        self._wait()
        return self._start_forward(args, kwargs, future=False).result()

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """As ``forward``, but returns a future at once; the first one when the module is there (the call is issued by the
        thread that has the autograd context). Errors of pickling are raised here, all others by the future."""
        try:
            self._wait()
        except Exception as error:
            failed = Awaitable()
            fail(failed, bare(error))
            return failed
        future = self._start_forward(args, kwargs, future=True).future
        assert future is not None
        return future

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args, number of the reference)`` on the owner, once the module is there."""
        self._wait()
        return self._start(function, args).result()

    def _wait(self) -> None:
        """Until the module is there. Raises what making it raised, ``ValueError`` if it is no module, and ``PeerLost``."""
        check(self._rref, "call the module")
        if not self._made:
            self._start(_made).result()
            self._made = True

    def _start_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, future: bool) -> Call:
        if self._device == _CPU:
            return self._start(_remote_forward, args, kwargs, future=future)
        return self._start(_remote_forward_on, (*args, self._mapped, self._device), kwargs, future=future)

    def _start(
        self, function: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *, future: bool = False
    ) -> Call:
        # The number comes last: what pickling says of ``args[0]`` is then about the user's.
        call = taken_apart(function, (*args, fork_of(self._rref).rref), kwargs)
        return ask(self._rref, *call, future=future)


class RemoteModule(nn.Module):
    """Makes ``module_cls(*args, **kwargs)`` on ``remote_device`` (``"worker1"``, ``"worker1/cpu"``, ``"rank:1/cuda:0"``), in
    the background: the first use raises the error of the constructor. Call the handle as you would the module;
    ``forward_async`` returns a future.

    The module lives while a handle does. Handles travel by RPC only; attributes that users add to a handle stay behind. For a
    module on a GPU, arguments are moved to that GPU on its worker. If all of them came from the CPU, and there is no device
    map, the result returns to the CPU. Methods of ``nn.Module`` that need the parameters here raise ``ValueError``.

    Attributes: ``on`` (name or rank of the worker), ``device`` (text), ``is_device_map_set``, ``is_scriptable`` (``False``:
    there is no scripted variant), ``module_rref``. Raises ``AssertionError`` without RPC, ``ValueError`` and ``RuntimeError``
    for a ``remote_device`` that cannot be parsed or names a worker outside the group.
    """

    on: str | int
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    module_rref: RRef[nn.Module]
    forward: Callable[..., Any]
    forward_async: Callable[..., torch.futures.Future[Any]]
    generated_methods = (Target.forward_async, Target.forward)
    """The methods that each handle gets as attributes, bound to its remote module."""

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        on, device, mapped = _parse(remote_device)
        agent = _agent.current()
        call = taken_apart(_make, (module_cls, _agent.positional(args), dict(kwargs or {}), device), None)
        self._point(on, device, mapped, over(agent, agent.create(agent.resolve(on), *call, -1.0)))

    @staticmethod
    def init_from_module_rref(remote_device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
        """Another handle on the module of ``module_rref``. ``remote_device`` gives the module's device. Calls go to the
        reference's owner."""
        return _receive(*_parse(remote_device), module_rref)

    def _point(self, on: str | int, device: str, mapped: bool, module_rref: RRef[nn.Module]) -> None:
        target = Target(module_rref, device, mapped)
        self.__dict__.update(
            on=on,
            device=device,
            is_device_map_set=mapped,
            is_scriptable=False,
            module_rref=module_rref,
            # Bound to the target, not to this handle: a handle that held itself would keep the module until Python collects.
            **{method.__name__: getattr(target, method.__name__) for method in self.generated_methods},
        )

    def __getattr__(self, name: str) -> Any:
        if "_parameters" in self.__dict__:
            return super().__getattr__(name)
        # A handle that came by RPC brings nothing of ``nn.Module`` along, and seldom needs it.
        brought = dict(self.__dict__)
        nn.Module.__init__(self)
        self.__dict__.update(brought)
        return getattr(self, name)

    def get_module_rref(self) -> RRef[nn.Module]:
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the module's parameters, as a ``DistributedOptimizer`` takes them. ``recurse``: those of submodules
        too."""
        return self._target.ask(_parameters, recurse)

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the mode of the remote module. The handle's own ``training`` is the mode that was last set by this handle."""
        self._target.ask(_train, mode)
        self.__dict__["training"] = mode
        return self

    @property
    def _target(self) -> Target:
        return self.forward.__self__  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"RemoteModule(on={self.on!r}, device={self.device!r})"

    def __reduce__(self) -> Any:
        raise RuntimeError(_NOT_PICKLED)


def _parse(remote_device: str) -> tuple[str | int, str, bool]:
    """Worker, device, and whether this worker has a device map to it."""
    agent = _agent.found()
    if agent is None:
        raise AssertionError("RemoteModule only works in RPC.")
    parsed = _remote_device(remote_device)
    on = parsed.worker_name() or parsed.rank()
    if on is None:
        raise ValueError(
            f"Could not parse remote_device: {remote_device}. The valid format is '<workername>/<device>' or "
            "'rank:<rank>/<device>': a module of this worker is named as those of others are"
        )
    to = agent.resolve(on).name
    return on, str(parsed.device()), bool(agent.options.device_maps.get(to))


_NOT_SUPPORTED = (
    *("register_buffer", "register_parameter", "add_module", "apply", "cuda", "ipu", "xpu", "cpu", "type", "float", "double"),
    *("half", "bfloat16", "to", "register_backward_hook", "register_forward_pre_hook", "register_forward_hook", "state_dict"),
    *("load_state_dict", "parameters", "named_parameters", "buffers", "named_buffers", "children", "named_children", "modules"),
    *("named_modules", "requires_grad_", "zero_grad", "share_memory", "extra_repr"),
)


def _refusal(name: str) -> Callable[..., Any]:
    instead = ". Please use ``remote_parameters`` instead." if name == "parameters" else ""

    def refuse(self: RemoteModule, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule{instead}")

    refuse.__name__ = name
    return refuse


for _name in _NOT_SUPPORTED:
    setattr(RemoteModule, _name, _refusal(_name))


def _reduce(handle: RemoteModule, message: serialize.Message) -> Any:
    if message.to is None:
        raise RuntimeError(_NOT_PICKLED)
    return _receive, (handle.on, handle.device, handle.is_device_map_set, handle.module_rref)


def _receive(on: str | int, device: str, mapped: bool, module_rref: RRef[nn.Module]) -> RemoteModule:
    handle = RemoteModule.__new__(RemoteModule)
    handle._point(on, device, mapped, module_rref)
    return handle


serialize.register_reducer(RemoteModule, _reduce)


# What other workers call here. The last argument is the number of the module's reference.


def _make(module_cls: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> nn.Module:
    module = module_cls(*args, **kwargs)
    _check(module)
    return module.to(device)


def _check(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )


@async_execution
def _made(rref: int) -> torch.futures.Future[None]:
    return mapped(_agent.current().rrefs.future(rref), _check)


def _module(rref: int) -> nn.Module:
    return _agent.current().rrefs.future(rref).value()


def _remote_forward(*args: Any, **kwargs: Any) -> Any:
    return permits.method(_module(args[-1]), "forward")(*args[:-1], **kwargs)


def _remote_forward_on(*args: Any, **kwargs: Any) -> Any:
    *inputs, mapped, device, rref = args
    from_cpu = True

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal from_cpu
        from_cpu = from_cpu and tensor.is_cpu
        return tensor.to(device)

    inputs, kwargs = pytree.tree_map_only(torch.Tensor, moved, (inputs, kwargs))
    result = permits.method(_module(rref), "forward")(*inputs, **kwargs)
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, result) if from_cpu and not mapped else result


# Each module has landing places for its results.
_remote_forward._names_callee = _remote_forward_on._names_callee = -1  # type: ignore[attr-defined]


def _parameters(recurse: bool, rref: int) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in permits.method(_module(rref), "parameters")(recurse)]


def _train(mode: bool, rref: int) -> None:
    permits.method(_module(rref), "train")(mode)
