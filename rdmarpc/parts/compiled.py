"""Modules that ``torch.compile`` or ``torch.nn.utils.parametrize`` was applied to: how that was done, so that it is done again
at their owner.

``torch._dynamo`` takes seconds to import; nothing here does so for modules that are not compiled.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..graph.work.access import INTERNAL
from ..transport import NotSupported

_LOADING = "_load_state_dict_pre_hooks"


class Uncompiled(nn.Module):
    """What ``torch.compile(module)`` gives, without the compilation: the same names of parameters, the same attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._modules["_orig_mod"] = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        tables = vars(self)
        if name == "_orig_mod" or "_modules" not in tables:
            return super().__getattr__(name)
        return getattr(tables["_modules"]["_orig_mod"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in INTERNAL or name == "_is_full_backward_hook" or "_modules" not in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self._orig_mod, name, value)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` gave it."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def unwrapped(module: nn.Module) -> Uncompiled:
    """The same of what ``torch.compile`` gave."""
    inner: Any = module._modules["_orig_mod"]
    return Uncompiled(inner)


def uncompiled(module: nn.Module) -> nn.Module:
    """A module with all compiled ones in it (and itself) replaced in place."""
    for inner in list(module.modules()):
        for name, child in inner._modules.items():
            if child is not None and is_compiled(child):
                inner._modules[name] = unwrapped(child)
    return unwrapped(module) if is_compiled(module) else module


def reduced(module: nn.Module) -> Any:
    """How a compiled or parametrized module travels (see ``pickle.Pickler.reducer_override``); others: ``NotImplemented``."""
    if is_compiled(module):
        return _compile, (module._modules["_orig_mod"], _options(module.dynamo_ctx, module))
    call: Any = vars(module).get("_compiled_call_impl")
    if type(module).__module__ == parametrize.__name__ and parametrize.is_parametrized(module):
        if call is not None:
            raise NotSupported(f"a {type(module).__name__} is compiled and parametrized", hint="compile it after wrap()")
        plain: Any = type(module).__mro__[1]
        return parametrized, (plain,), {**vars(module), _LOADING: _lasting(module)}, None, None, _parametrize
    if call is None:
        return NotImplemented
    context = next((cell.cell_contents for cell in call.__closure__ or () if hasattr(cell.cell_contents, "callback")), None)
    how: Any = module.__reduce_ex__(5)
    make, args, state = how[:3]
    return make, args, (state, _options(context, module)), None, None, _compiled_in_place


def parametrized(kind: type[nn.Module]) -> nn.Module:
    """A module of this class, without any attribute, as ``parametrize`` makes it of another."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    return module


def _lasting(module: nn.Module) -> Any:
    """Hooks of ``load_state_dict``, without that by which ``weight_norm`` reads old states: nobody can pickle it."""
    hooks = vars(module)[_LOADING]
    names = {key: getattr(getattr(hook, "hook", hook), "__qualname__", "") for key, hook in hooks.items()}
    return type(hooks)((key, hook) for key, hook in hooks.items() if "_weight_norm_compat_hook" not in names[key])


def _parametrize(module: nn.Module, state: dict[str, Any]) -> None:
    vars(module).update(state)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)


def _options(context: Any, module: nn.Module) -> dict[str, Any]:
    """The arguments that ``torch.compile`` was given."""
    from torch._dynamo.eval_frame import innermost_backend

    backend: Any = None if context is None else innermost_backend(context.callback)
    given: dict[str, Any] = {
        "fullgraph": bool(getattr(context, "fullgraph", False)),
        "dynamic": getattr(backend, "dynamic", None),
    }
    name = getattr(backend, "compiler_name", "")
    if name == "inductor":
        return {**given, "options": dict(backend.config) or None}
    if not name:
        raise NotSupported(f"how a {type(module).__name__} was compiled cannot be seen", hint="compile it after wrap()")
    known = name in torch.compiler.list_backends(exclude_tags=())
    return {**given, "backend": name if known else backend.compiler_fn, **backend.kwargs}


def _compile(module: nn.Module, options: dict[str, Any]) -> Any:
    return torch.compile(module, **options)


def _compiled_in_place(module: nn.Module, state: Any) -> None:
    attributes, options = state
    module.__setstate__(attributes)
    module.compile(**options)
