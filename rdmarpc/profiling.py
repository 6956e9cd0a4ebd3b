"""What programs that profile calls need (``calls/profiled`` has what ``torch.profiler`` shows of them)."""

from __future__ import annotations

from typing import Any

import torch


def all_threads() -> Any:
    """``torch.profiler.profile(experimental_config=all_threads())`` records the threads that run functions for others too."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
