"""The picture of docs/design.md: what crosses in a model with a skip connection and a tensor that three workers read.

    python -m experiments.transfer_graph docs/transfer_graph.png

Prints the tables, and needs no workers: what crosses is known before anything runs.
"""

import itertools
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

from rdmarpc.graph.plan.analyze import analyze
from rdmarpc.graph.plan.place import place
from rdmarpc.graph.show.describe import Transfers, describe
from rdmarpc.graph.trace.capture import TensorSpec, capture, skeleton
from rdmarpc.graph.trace.sites import name_inputs

PLACEMENT = {"stem": "worker1", "wide": "worker2", "deep": "worker3", "skip": "worker4", "head": "worker4"}


class Branches(nn.Module):
    """A stem, two branches and a skip connection, whose sum goes to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(inplace=True))
        self.wide = nn.Conv2d(32, 64, 5, padding=2)
        self.deep = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(64, 64, 3, padding=1))
        self.skip = nn.Conv2d(32, 64, 1)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        return self.head(self.skip(x) + self.wide(x) + self.deep(x))


def described() -> Transfers:
    """For a batch of 16 images of 32x32."""
    model = Branches()
    parameters: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameters[PLACEMENT[name.split(".")[0]]] += parameter.nbytes
    found = capture(skeleton(model), [TensorSpec((16, 3, 32, 32), torch.float32)], lambda image: ((image,), {}))
    found.sites = name_inputs(found.sites, ["image"])
    graph = analyze(found, lambda path: PLACEMENT.get(path.split(".")[0], "worker0"), "worker0")
    return describe(place(graph, 1, 2, itertools.count(1)), parameters)


def main(path: Path) -> None:
    transfers = described()
    print(transfers)
    transfers.draw(path)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "transfer_graph.png"))
