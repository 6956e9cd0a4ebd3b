"""The fast paths of torch's attention, which its modules take in eval where nothing needs a gradient.

Such a module hands the weights of those inside to one operation, or a nested tensor from one to the next. Where they are at
other workers it cannot, nor in a trace: by torch's own rules (``has_torch_function``, ``is_compiling``) it takes its general
path there without a word. That one rounds otherwise, and gives other rows where the input is padding. So modules that are cut
take it always, as after ``torch.backends.mha.set_fastpath_enabled(False)``, and it is said which would not have.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from ...transport import NotSupported

KINDS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class FastPaths:
    """``cut`` has the paths of the modules of these kinds whose forward runs between parts, by identity. ``general`` are those
    that took the general path where one process may take the other; the value is False where that holds only under
    ``no_grad``, in a capture that is made for both."""

    def __init__(self, cut: Mapping[int, str]) -> None:
        self._cut = cut
        self._whole = ""
        self.general: dict[str, bool] = {}

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """While this lasts, and in this thread, modules that are cut take the general path."""
        before = getattr(_current, "paths", None)
        _current.paths = self
        with _watching():
            try:
                yield
            finally:
                _current.paths = before

    def check_export(self) -> None:
        """Raise ``NotSupported`` where an export is not what one process computes: it goes through whole parts, too."""
        for name in (*self.general, *filter(None, [self._whole])):
            raise NotSupported(f"{name!r} may take its fast path in one process, and takes the general one in an export")

    def enabled(self, frame: FrameType) -> bool:
        """The answer to the module whose forward this is."""
        module = frame.f_locals.get("self")
        if not isinstance(module, KINDS) or not _may_be_fast(module, frame.f_locals):
            return True
        path = self._cut.get(id(module))
        if path is None:
            self._whole = type(module).__name__
            return True
        name = path or type(module).__name__
        frozen = not any(parameter.requires_grad for parameter in module.parameters())
        self.general[name] = self.general.get(name, False) or frozen or not torch.is_grad_enabled()
        return False


def cut_attention(model: nn.Module, whole: Callable[[str], bool]) -> dict[int, str]:
    """See ``FastPaths``; ``whole(path)``: whether that is one part, or inside of one."""
    return {id(m): path for path, m in model.named_modules() if isinstance(m, KINDS) and not (path and whole(path))}


def _may_be_fast(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """As far as the arguments tell, before the question of gradients."""
    if all(inner.training for inner in module.modules()):
        return False
    if isinstance(module, nn.TransformerEncoder):
        return bool(module.use_nested_tensor) and given.get("src_key_padding_mask") is not None and given.get("mask") is None
    attention: Any = module.self_attn if isinstance(module, nn.TransformerEncoderLayer) else module
    return bool(attention.batch_first)


_current = threading.local()
_lock = threading.Lock()
_watchers = 0
_enabled = torch.backends.mha.get_fastpath_enabled


def _answer() -> bool:
    paths: FastPaths | None = getattr(_current, "paths", None)
    return _enabled() and (paths is None or paths.enabled(sys._getframe(1)))


@contextlib.contextmanager
def _watching() -> Iterator[None]:
    """Only while somebody needs it: to ``torch.compile`` the function is torch's own."""
    global _watchers
    with _lock:
        _watchers += 1
        torch.backends.mha.get_fastpath_enabled = _answer
    try:
        yield
    finally:
        with _lock:
            _watchers -= 1
            if not _watchers:
                torch.backends.mha.get_fastpath_enabled = _enabled
