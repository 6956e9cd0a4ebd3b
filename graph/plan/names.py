"""What the values and operations of a capture are called: by what the user calls them in the model, and no two values alike."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..trace.capture import Capture
from ..trace.sites import INPUT, OF_INPUT, SHARD, called, label_of
from ..trace.values import After, paths


class Names:
    """Of a node ``names[node]``: the input, the attribute's path, the module's path, or the function behind the module in whose
    forward it runs; ``#2`` for the second of these."""

    def __init__(self, capture: Capture) -> None:
        self._values = capture.values
        self._count: dict[str, int] = {}
        self._taken: set[str] = set()
        self._of = {node: self.new(_label(capture, node)) for node in capture.graph.nodes}

    def __getitem__(self, node: fx.Node) -> str:
        return self._of[node]

    def new(self, text: str) -> str:
        """A name that no value has."""
        while True:
            number = self._count[text] = self._count.get(text, 0) + 1
            name = text if number == 1 else f"{text} #{number}"
            if name not in self._taken:
                self._taken.add(name)
                return name

    def leaves(self, node: fx.Node, made: Sequence[bool]) -> list[str | None]:
        """Of the leaves of a structured result: ``attn[0]``, ``out['loss']``; ``None`` for what is not ``made``."""
        value = self._values[node]
        found = [path.removeprefix(".result") if isinstance(value, After) else path for path, _ in paths(value)]
        if len(found) != len(made):
            found = [f"[{at}]" for at in range(len(made))]
        return [self.new(self[node] + path) if new else None for path, new in zip(found, made)]


def _label(capture: Capture, node: fx.Node) -> str:
    if OF_INPUT in node.meta:
        return f"{_label(capture, node.meta[OF_INPUT])} (replica {node.meta[SHARD]})"
    if node.op != "placeholder":
        return label_of(node)
    site = capture.sites.get((node, 0))
    return called(site.path if site is not None and site.kind == INPUT else node.name)
