"""Models of torch alone: the families that papers and tutorials have, a few layers of each."""

from __future__ import annotations

from typing import Any

import torch

from .entry import Entry, images, tokens, total, vectors
from .plain_nets import (
    Adaptive,
    AuxiliaryMoe,
    DiffusionUnet,
    Dlrm,
    Fno,
    Moe,
    Nerf,
    NeuralOde,
    NoisyVae,
    Packed,
    Siamese,
    SparseMoe,
    Tagger,
    TiedLm,
    Translator,
    Unet,
    Vae,
)
from .rare_nets import (
    Complex,
    Depths,
    Distances,
    EarlyExit,
    Equilibrium,
    FakeQuant,
    HookedLora,
    Kinds,
    Nested,
    Ragged,
    Sampling,
    SparseTables,
    Standardized,
    Stateful,
)
from .special_nets import (
    ActorCritic,
    Attending,
    Clip,
    Coupling,
    Dense,
    Graph,
    Hyper,
    LayerDrop,
    Mixture,
    OldNorms,
    Patches,
    Pixel,
    Quantized,
    Reporting,
    Spectral,
    StochasticDepth,
    Warmed,
)


def _graph(n: int) -> Any:
    return (torch.randn(10, 8), torch.randint(0, 10, (2, 30)), torch.tensor([0] * 6 + [1] * 4)), {}


def _words(*lengths: int) -> Any:
    return lambda n: (tuple(torch.randint(0, 40, (2, length)) for length in lengths), {})


ENTRIES: dict[str, Entry] = {
    "LSTM tagger": Entry(Tagger, tokens()),
    "GRU tagger": Entry(lambda: Tagger("GRU"), tokens()),
    "LSTM, packed sequences": Entry(
        Packed, lambda n: ((torch.randint(0, 40, (3, 7)), torch.tensor([7, 3, 5])), {}), places=("half", {"rnn": "worker1"})
    ),
    "nn.Transformer": Entry(Translator, _words(7, 6), places=("half", {"body": "worker1", "head": "worker2"})),
    "tied language model": Entry(
        TiedLm, tokens(), places=({"blocks.layers.1": "worker1"}, {"embed": "worker1", "blocks": "worker2"})
    ),
    "VAE": Entry(Vae, vectors(20, 4)),
    "VAE, noise of its own": Entry(NoisyVae, vectors(20)),
    "diffusion UNet": Entry(DiffusionUnet, lambda n: ((torch.randn(2, 3, 16, 16), torch.randint(0, 100, (2,))), {})),
    "UNet": Entry(Unet, images(3, 16)),
    "MoE, dense": Entry(Moe, tokens()),
    "MoE, by tokens": Entry(SparseMoe, tokens()),
    "MoE, loss in an attribute": Entry(AuxiliaryMoe, tokens()),
    "DLRM": Entry(Dlrm, lambda n: ((torch.randn(4, 6), torch.randint(0, 30, (4, 4, 2))), {})),
    "siamese": Entry(Siamese, vectors(20, 20)),
    "NeRF": Entry(Nerf, lambda n: ((torch.randn(4, 6, 3), torch.randn(4, 3)), {})),
    "FNO": Entry(Fno, lambda n: ((torch.randn(2, 16, 2),), {})),
    "neural ODE": Entry(NeuralOde, vectors(20)),
    "neural ODE, adaptive": Entry(Adaptive, vectors(20)),
    "layer drop": Entry(LayerDrop, vectors(20)),
    "stochastic depth": Entry(StochasticDepth, vectors(20)),
    "counter in an attribute": Entry(Warmed, vectors(20)),
    "VQ-VAE": Entry(Quantized, vectors(20)),
    "normalizing flow": Entry(Coupling, vectors(6)),
    "mixture density": Entry(Mixture, vectors(20, 1), loss=lambda out: -out.mean()),
    "actor and critic": Entry(
        ActorCritic, lambda n: ((torch.randn(4, 8), torch.randint(0, 3, (4,))), {}), loss=lambda out: total(list(out.values()))
    ),
    "hypernetwork": Entry(Hyper, vectors(20, 6)),
    "namedtuple": Entry(Reporting, vectors(20)),
    "spectral norm": Entry(Spectral, vectors(20)),
    "spectral norm, by hooks": Entry(OldNorms, vectors(20)),
    "graph convolution": Entry(Graph, _graph),
    "DenseNet, small": Entry(Dense, images(3, 8)),
    "ViT, small": Entry(Patches, images(3, 32)),
    "CLIP, small": Entry(Clip, lambda n: ((torch.randn(3, 3, 32, 32), torch.randint(0, 40, (3, 6))), {})),
    "attention decoder": Entry(Attending, _words(6, 5)),
    "PixelCNN": Entry(Pixel, images(3, 8)),
    "deep equilibrium": Entry(Equilibrium, vectors(20)),
    "complex numbers": Entry(Complex, vectors(20)),
    "sparse gradients": Entry(
        SparseTables,
        lambda n: ((torch.randint(0, 50, (4,)), torch.randint(0, 50, (4, 3))), {}),
        kind=torch.optim.SGD,
        served=False,
    ),
    "fake quantisation": Entry(FakeQuant, vectors(20)),
    "LoRA by hooks": Entry(
        HookedLora,
        vectors(20),
        places=({"base.2": "worker1", "up.1": "worker2"}, {"down": "worker1"}),
    ),
    "early exit": Entry(EarlyExit, vectors(20)),
    "ragged rows": Entry(Ragged, lambda n: (([torch.randn(2 + n, 6), torch.randn(5, 6)],), {})),
    "nested tensor": Entry(
        Nested,
        lambda n: (([torch.randn(2 + n, 6), torch.randn(5, 6)],), {}),
        places=({"two": "worker1"},),
    ),
    "actor that draws": Entry(Sampling, vectors(8), loss=lambda out: total(list(out.values()))),
    "recurrent state kept": Entry(Stateful, lambda n: ((torch.randn(2, 5, 6),), {}), places=("half", {"cell": "worker1"})),
    "weights computed": Entry(Standardized, vectors(20), places=("half", {"two": "worker1"})),
    "mixture of depths": Entry(Depths, tokens()),
    "kernel and solve": Entry(Distances, vectors(20)),
    "kinds that stay here": Entry(Kinds, vectors(20), served=False),
}
