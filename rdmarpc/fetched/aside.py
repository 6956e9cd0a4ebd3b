"""Out of sight of what follows the program's operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What happens inside is not the program's: no mode of torch's, transform or autocast applies, and there is no graph."""
    native: Any = torch._C
    modes = [native._pop_torch_function_stack() for _ in range(native._len_torch_function_stack())]
    try:
        with (
            _disable_current_modes(),
            temporarily_clear_interpreter_stack(),
            native._DisableAutocast(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            yield
    finally:
        for mode in reversed(modes):
            native._push_on_torch_function_stack(mode)
