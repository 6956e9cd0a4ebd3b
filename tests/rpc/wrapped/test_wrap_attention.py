"""Modules of attention that are cut, in eval: one process takes torch's fast path, we take the general one and say so."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from test_wrap import drive
from torch import nn

import rdmarpc as rpc

METHODS = ("auto", "eager", "here")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(32, 5)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=ids == 0))


def tokens() -> torch.Tensor:
    ids = torch.randint(1, 50, (4, 10), generator=torch.Generator().manual_seed(1))
    ids[1, 6:] = ids[3, 3:] = 0
    return ids


def of_encoder(net: Net) -> None:
    net.encoder.use_nested_tensor = False


def of_layer(net: Net) -> None:
    of_encoder(net)
    net.encoder.layers[1].activation_relu_or_gelu = 0  # another way to have the general path of this layer


CUTS: dict[str, tuple[str, Callable[[Net], None], list[str]]] = {
    "first layer": ("encoder.layers.0", of_encoder, ["encoder"]),
    "second layer": ("encoder.layers.1", of_encoder, ["encoder"]),
    "linear": ("encoder.layers.1.linear1", of_layer, ["encoder", "encoder.layers.1"]),
}


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("rdmarpc")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def cut() -> None:
    ids = tokens()
    for name, (path, general, left) in CUTS.items():
        net = Net().eval()
        general(net)
        with torch.no_grad():
            expected = net(ids)
        for method in METHODS:
            model = rpc.wrap(Net(), {path: "worker1"}, capture=method).eval()
            with said() as lines:
                model(ids)  # needs gradients: the general path in one process, too
                assert not lines and not model.counters()["fast_paths_left"], (name, method)
                with torch.no_grad():
                    results = [model(ids) for _ in range(3)]
            assert all(torch.equal(result, expected) for result in results), (name, method)
            assert model.counters()["fast_paths_left"] == len(left), (name, method)
            assert len(lines) == 1 and lines[0].startswith(", ".join(left)), lines
            model.close()


def test_modules_that_are_cut_take_the_general_path_and_say_so():
    drive(cut)


def whole() -> None:
    ids = tokens()
    net = Net().eval()
    with torch.no_grad():
        expected = net(ids)
    for path in ("encoder", "head"):
        for method in METHODS:
            model = rpc.wrap(Net(), {path: "worker1"}, capture=method).eval()
            with torch.no_grad():
                assert torch.equal(model(ids), expected), (path, method)
            assert model.counters()["fast_paths_left"] == 0
            model.close()
        model = rpc.wrap(Net(), {path: "worker1"}, capture="export").eval()
        with torch.no_grad(), pytest.raises(rpc.NotSupported, match="takes the general one in an export"):
            model(ids)
        model.close()


def test_modules_that_are_whole_take_theirs():
    drive(whole)


def frozen_and_unmasked() -> None:
    """What is frozen has a fast path under grad, too; an encoder has none where no mask is given."""
    ids = tokens()
    model = rpc.wrap(Net().requires_grad_(False).eval(), {"encoder.layers.1": "worker1"})
    model(ids.clamp(min=1))
    assert model.counters()["fast_paths_left"] == 1
    model.close()
    net = Net().eval()
    encoder = rpc.wrap(net.encoder, {"layers.1": "worker1"}).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        assert torch.equal(encoder(x), Net().eval().encoder(x))
    assert encoder.counters()["fast_paths_left"] == 0
    encoder.close()


def test_frozen_modules_and_those_without_a_mask():
    drive(frozen_and_unmasked)
