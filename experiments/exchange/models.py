"""The models of "Fast Distributed Deep Learning over RDMA" (Xue et al., EuroSys 2019, table 2), and a transformer.

Layouts are those that give the printed sizes and numbers of tensors: tf-slim's AlexNet v2, Inception v3 (batch normalisation
without a scale) and VGG-16 with 10 classes, recurrent nets with one matrix a gate and 1000 classes. ``MODELS`` has for each how
it is made, what the paper prints, and an input; parameters are drawn by torch's defaults.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, SYMBOLS, WIDTH = 10, 1000, 1024
"""Classes of the convolutional nets; classes of the recurrent nets; inputs and units of the recurrent nets."""


def alexnet() -> nn.Module:
    """Images (n, 3, 224, 224), or as small as 195, to logits (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(6400, 4096), nn.ReLU(), nn.Dropout(),
        nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(),
        nn.Linear(4096, CLASSES),
    )  # fmt: skip


def vgg16() -> nn.Module:
    """Images (n, 3, 224, 224) to logits (n, 10)."""
    layers: list[nn.Module] = []
    channels = 3
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, CLASSES))


def fcn5() -> nn.Module:
    """Images (n, 784) to logits (n, 10)."""
    widths = [784, 4096, 4096, 4096, 4096]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(4096, CLASSES))


class Convolution(nn.Module):
    """Convolution, batch normalisation that shifts and does not scale, ReLU."""

    mean: Tensor
    variance: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, same: bool = True) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if same else 0
        self.weights = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
        self.beta = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("mean", torch.zeros(outputs))
        self.register_buffer("variance", torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = self.weights(x)
        return F.relu(F.batch_norm(x, self.mean, self.variance, None, self.beta, self.training, 0.0003, 0.001))


class Branches(nn.Module):
    """Several ways side by side, concatenated by channels."""

    def __init__(self, *ways: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleList(ways)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in self.ways], 1)


def chain(inputs: int, *layers: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    """Convolutions one after the other, of (outputs, kernel) each."""
    made = []
    for outputs, kernel in layers:
        made.append(Convolution(inputs, outputs, kernel))
        inputs = outputs
    return nn.Sequential(*made)


def pooled(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), Convolution(inputs, outputs, 1))


def block35(inputs: int, last: int) -> nn.Module:
    ways = chain(inputs, (64, 1)), chain(inputs, (48, 1), (64, 5)), chain(inputs, (64, 1), (96, 3), (96, 3))
    return Branches(*ways, pooled(inputs, last))


def block17(width: int) -> nn.Module:
    twice = (width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7))
    ways = chain(768, (192, 1)), chain(768, (width, 1), (width, (1, 7)), (192, (7, 1))), chain(768, *twice)
    return Branches(*ways, pooled(768, 192))


def block8(inputs: int) -> nn.Module:
    def fork(width: int) -> nn.Module:
        return Branches(Convolution(width, 384, (1, 3)), Convolution(width, 384, (3, 1)))

    ways = chain(inputs, (320, 1)), nn.Sequential(*chain(inputs, (384, 1)), fork(384))
    return Branches(*ways, nn.Sequential(*chain(inputs, (448, 1), (384, 3)), fork(384)), pooled(inputs, 192))


class InceptionV3(nn.Module):
    """Images (n >= 2, 3, 299, 299) to logits (n, 10), and while training those of the auxiliary head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Convolution(3, 32, 3, 2, same=False), Convolution(32, 32, 3, same=False), Convolution(32, 64, 3),
            nn.MaxPool2d(3, 2),
            Convolution(64, 80, 1), Convolution(80, 192, 3, same=False), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        to17 = nn.Sequential(*chain(288, (64, 1), (96, 3)), Convolution(96, 96, 3, 2, same=False))
        self.first = nn.Sequential(
            block35(192, 32), block35(256, 64), block35(288, 64),
            Branches(Convolution(288, 384, 3, 2, same=False), to17, nn.MaxPool2d(3, 2)),
            block17(128), block17(160), block17(160), block17(192),
        )  # fmt: skip
        to8 = nn.Sequential(*chain(768, (192, 1), (192, (1, 7)), (192, (7, 1))), Convolution(192, 192, 3, 2, same=False))
        shorter = nn.Sequential(Convolution(768, 192, 1), Convolution(192, 320, 3, 2, same=False))
        self.second = nn.Sequential(Branches(shorter, to8, nn.MaxPool2d(3, 2)), block8(1280), block8(2048))
        self.logits = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Dropout(0.2), nn.Conv2d(2048, CLASSES, 1), nn.Flatten())
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, 3), Convolution(768, 128, 1), Convolution(128, 768, 5, same=False), nn.Conv2d(768, CLASSES, 1),
            nn.Flatten(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.first(self.stem(x))
        logits = self.logits(self.second(x))
        return (logits, self.auxiliary(x)) if self.training else logits


class Gate(nn.Module):
    """One gate's matrices for the input and for the state, and its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.state = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.input).addmm(state, self.state)


class Recurrent(nn.Module):
    """Sequences (n, length, 1024) to the logits (n, 1000) of what comes next."""

    gates: int

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.ModuleList(Gate() for _ in range(self.gates))
        self.output = nn.Linear(WIDTH, SYMBOLS)


class LSTM(Recurrent):
    gates = 4

    def forward(self, x: Tensor) -> Tensor:
        state = cell = x.new_zeros(len(x), WIDTH)
        for now in x.unbind(1):
            take, keep, give, new = (gate(now, state) for gate in self.gate)
            cell = keep.sigmoid() * cell + take.sigmoid() * new.tanh()
            state = give.sigmoid() * cell.tanh()
        return self.output(state)


class GRU(Recurrent):
    gates = 3

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), WIDTH)
        for now in x.unbind(1):
            reset, update = self.gate[0](now, state).sigmoid(), self.gate[1](now, state).sigmoid()
            state = update * state + (1 - update) * self.gate[2](now, reset * state).tanh()
        return self.output(state)


class Transformer(nn.Module):
    """Text (n, at most 256) to logits (n, length, 8192) of what comes next: many tensors, most of them small."""

    def __init__(self, symbols: int = 8192, width: int = 256, blocks: int = 12) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(symbols, width), nn.Embedding(256, width)
        for table in (self.symbol, self.place):
            nn.init.normal_(table.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, nn.LayerNorm(width), enable_nested_tensor=False)
        self.output = nn.Linear(width, symbols, bias=False)
        self.output.weight = self.symbol.weight

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.symbol(text) + self.place.weight[:length]
        return self.output(self.blocks(x, mask, is_causal=True))


@dataclass(frozen=True)
class Model:
    """``parameters`` (numbers), ``tensors``: of the parameters. ``sample(n)``: inputs and targets of a mini-batch of n."""

    make: Callable[[], nn.Module]
    parameters: int
    tensors: int
    sample: Callable[[int], tuple[Tensor, Tensor]]

    @property
    def mib(self) -> float:
        return self.parameters * 4 / 2**20


def _images(size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, 3, size, size), torch.randint(0, CLASSES, (n,)))


def _sequences(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 10, WIDTH), torch.randint(0, SYMBOLS, (n,))


def _text(n: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 8192, (n, 65))
    return text[:, :-1], text[:, 1:]


MODELS = OrderedDict(
    AlexNet=Model(alexnet, 46_247_882, 16, _images(224)),
    InceptionV3=Model(InceptionV3, 24_353_332, 196, _images(299)),
    VGG16=Model(vgg16, 134_301_514, 32, _images(224)),
    LSTM=Model(LSTM, 9_417_704, 14, _sequences),
    GRU=Model(GRU, 7_319_528, 11, _sequences),
    FCN5=Model(fcn5, 53_600_266, 10, lambda n: (torch.randn(n, 784), torch.randint(0, CLASSES, (n,)))),
    Transformer=Model(Transformer, 11_640_320, 148, _text),
)


def loss_of(output: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Cross entropy; an auxiliary head counts 0.4, as in tf-slim."""
    if isinstance(output, tuple):
        return F.cross_entropy(output[0], target) + 0.4 * F.cross_entropy(output[1], target)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())
