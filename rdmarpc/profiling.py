"""An option for programs that profile calls. ``calls/profiled`` describes what ``torch.profiler`` shows of them."""

from __future__ import annotations

from typing import Any

import torch


def all_threads() -> Any:
    """A configuration for ``torch.profiler.profile(experimental_config=all_threads())``, which then also records the threads
    that run functions for other workers."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
