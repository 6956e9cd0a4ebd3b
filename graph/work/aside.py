"""Gradients of parameters, set aside while a part of their sum is computed."""

from __future__ import annotations

import torch

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Aside:
    """While a segment goes backward that is not the last to read these parameters: their ``.grad`` is what it gives, and their
    hooks do not run."""

    def __init__(self) -> None:
        self._taken: list[tuple[str, torch.Tensor, torch.Tensor | None, list[tuple[dict, dict]]]] = []

    def take(self, path: str, parameter: torch.Tensor) -> None:
        tables = [table for table in (getattr(parameter, name, None) for name in _HOOKS) if table]
        hooks = [(table, dict(table)) for table in tables]
        for table in tables:
            table.clear()
        self._taken.append((path, parameter, parameter.grad, hooks))
        parameter.grad = None

    def put_back(self) -> dict[str, torch.Tensor]:
        """What the segment has given, by path. The parameters have what they had."""
        given = {}
        for path, parameter, own, hooks in self._taken:
            if parameter.grad is not None:
                given[path] = parameter.grad
            parameter.grad = own
            for table, kept in hooks:
                table.update(kept)
        return given
