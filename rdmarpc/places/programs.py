"""A worker's programs: messages of a command stream that are run many times (``graphed.py``), as straight Python.

A program's messages are written out as the lines of one function: an operator's call has its operands looked up in the table of
tensors, and its constants bound. Where a line raises, or a result is not what it was before, the messages from there on are run
one by one as all others are, which finds the error again and says what it was about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import ring
from .geometry import view


class Program:
    """``words``: the messages. ``inside``: (position, number of a tensor that they make); ``given``: (position, which of a
    replay's values). ``run(values, base, given, handlers, runner)`` returns the position of the first message that is still to
    be run; -1: none is."""

    def __init__(self, told: list[int], signatures: dict[int, Any], metas: dict[int, Any]) -> None:
        inside, given, *rest = told
        pairs = list(zip(rest[: 2 * (inside + given) : 2], rest[1 : 2 * (inside + given) : 2]))
        self.inside, self.given, self.words = pairs[:inside], pairs[inside:], rest[2 * (inside + given) :]
        self._terms = {at: f"base + {number}" for at, number in self.inside}
        self._terms.update((at, f"given[{index}]") for at, index in self.given)
        self._signatures, self._metas = signatures, metas
        self._bound: dict[str, Any] = {"view": view}
        self.operations = 0
        lines = ["def run(values, base, given, handlers, runner):", "    try:"]
        at = 0
        self._grad: bool | None = None
        while at < len(self.words):
            lines += [f"        at = {at}", *(f"        {line}" for line in self._lines(at))]
            at += self.words[at] >> 8
        lines += ["    except Exception:", "        return at", "    return -1"]
        exec("\n".join(lines), self._bound)
        self.run: Callable[..., int] = self._bound["run"]

    def messages(self, base: int, given: list[int]) -> list[int]:
        """The messages of one run."""
        found = self.words.copy()
        for at, number in self.inside:
            found[at] = base + number
        for at, index in self.given:
            found[at] = given[index]
        return found

    def _term(self, at: int) -> str:
        return self._terms.get(at) or str(self.words[at])

    def _bind(self, value: Any) -> str:
        name = f"c{len(self._bound)}"
        self._bound[name] = value
        return name

    def _lines(self, at: int) -> list[str]:
        """A message as statements."""
        kind, end = self.words[at] & 255, at + (self.words[at] >> 8)
        if kind == ring.OPERATION:
            signature = self._signatures[self.words[at + 1]]
            if not signature.identity:
                return self._operation(at, signature)
        if kind == ring.FREE:
            return [f"values.pop({self._term(each)}, None)" for each in range(at + 1, end)]
        words = ", ".join(map(self._term, range(at + 1, end)))
        return [f"handlers[{kind}]([{self.words[at]}, {words}], 1)", f"at = {end}", "if runner.void is not None: return at"]

    def _operation(self, at: int, signature: Any) -> list[str]:
        self._at, self.operations = at + 3, self.operations + 1
        if not all(map(str.isidentifier, signature.keywords)):
            raise ValueError(f"{signature.name} has arguments that are no names")  # they come from another process
        keys = [""] * (len(signature.takes) - len(signature.keywords)) + [f"{key}=" for key in signature.keywords]
        arguments = [f"{key}{self._argument(argument)}" for key, argument in zip(keys, signature.takes)]
        lines = []
        if signature.grad is not self._grad:
            self._grad = signature.grad
            lines.append(f"{self._bind(torch._C._set_grad_enabled)}({signature.grad})")
        function = getattr(signature.func, "_op", signature.func)  # what an overload calls
        lines.append(f"r = {self._bind(function)}({', '.join(arguments)})")
        expected, first = signature.expected, self._term(at + 2)
        several = len(expected) != 1
        if not several:
            lines.append("if type(r) is list: r = r[0]")
        for index, told in enumerate(expected):
            if told is None:
                continue
            geometry, _, named = told
            result = f"r[{index}]" if several else "r"
            lies = f"{result}.shape != {self._bind(geometry.shape)} or {result}.stride() != {self._bind(geometry.strides)}"
            lines.append(f"if {lies}: raise ValueError")
            if named:
                lines.append(f"values[{first} + {index}] = {result}")
        return lines

    def _argument(self, told: tuple[str, Any]) -> str:
        """An argument as an expression."""
        kind, value = told
        if kind == "c":
            return self._bind(value)
        if kind == "l":
            return f"[{', '.join(map(self._argument, value))}]"
        at = self._at
        if kind == "w":
            self._at += 2
            tensor = f"values[{self._term(at)}]"
            if self.words[at + 1] == -1 and at + 1 not in self._terms:
                return tensor
            return f"view({tensor}, {self._bind(self._metas[value])}, {self._term(at + 1)})"
        self._at += 1
        return self._bind(ring.FLOAT.unpack(ring.INT.pack(self.words[at]))[0] if kind == "f" else self.words[at])
