"""``wrap`` with parts on GPUs of workers: the bits of a model that trains alone on such a device. By way of host memory
(``tcp``), and from GPU to GPU (``cuda``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu
import pytest
import torch
import torch.nn.functional as F
from beside import assert_same, batches, close_all, home, sgd, wrap
from group import results, run_group
from nets import NETS, data
from torch import nn

import rdmarpc as rpc
from rdmarpc import places

pytestmark = [pytest.mark.gpu]


def on_driver(body: Callable[[], Any], rank: int) -> Any:
    try:
        return body() if rank == 0 else None
    finally:
        if rank == 0:
            close_all()
            places.close_streams()
        rpc.shutdown()


def on_gpu(net: nn.Module) -> nn.Module:
    """``net.to``, which gives tied parameters one memory on CUDA only."""
    moved = {id(p): nn.Parameter(p.detach().to(gpu.device())) for p in net.parameters()}
    for module in net.modules():
        module._parameters.update({name: moved[id(p)] for name, p in module._parameters.items() if p is not None})
    return net.to(gpu.device())


def pair(name: str, placement: dict[str, str]) -> tuple[Any, nn.Module]:
    """A wrapped model, and its twin that is all on a GPU of this process."""
    nets = []
    for _ in range(2):
        torch.manual_seed(1)
        nets.append(NETS[name].make())
    return wrap(nets[0], placement), on_gpu(nets[1])


def placed(name: str) -> list[dict[str, str]]:
    """All at one worker's GPU; at two workers'; one of the parts on the CPU of a worker is for models that compute alike."""
    children = [child for child, module in NETS[name].make().named_children() if [*module.parameters()]]
    homes = (f"worker1/{gpu.device()}", f"worker2/{gpu.device(gpu.other())}")
    return [{child: homes[at % count] for at, child in enumerate(children)} for count in (1, 2)]


def trained() -> None:
    # The CPU's kernel of attention, which is chosen for remote tensors, adds up gradients in another order (``chosen``).
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        _trained()


def _trained() -> None:
    for name in ("perceptron", "convolutions", "skips", "language"):
        for placement in placed(name):
            model, twin = pair(name, placement)
            optimizers = [sgd(each) for each in (model, twin)]
            for x, y in data(name, (6, 6, 3)):
                losses = []
                for each, optimizer, at in zip((model, twin), optimizers, ("cpu", gpu.device())):
                    optimizer.zero_grad()
                    out = each(x.to(at))
                    losses.append(F.cross_entropy(out, y.to(at)))
                    losses[-1].backward()
                    optimizer.step()
                assert_same(*losses, f"{name}, {placement}")
            assert_same(home(model.state_dict()), home(twin.state_dict()))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(20, 10), nn.LSTM(10, 12, 2, bidirectional=True)
        self.bare, self.head = nn.LSTM(24, 8, bias=False, batch_first=True), nn.Linear(8, 20)

    def forward(self, ids):
        return self.head(self.bare(self.lstm(self.words(ids))[0])[1][0][0])


def chosen() -> None:
    """What PyTorch has chosen for the CPU runs as what it chooses on the GPU: attention, LSTMs. It does so by the caller's
    flags."""
    for make in (NETS["language"].make, Tagger):
        torch.manual_seed(1)
        net = make()
        twin = on_gpu(copy.deepcopy(net))
        model = wrap(net, {"": f"worker1/{gpu.device()}"})
        for x, y in data("language", (6, 3)):
            for each, at in zip((model, twin), ("cpu", gpu.device())):
                F.cross_entropy(each(x.to(at)), y.to(at)).backward()
        for one, other in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(home(one.grad), home(other.grad))
    torch.backends.cuda.enable_math_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with torch.backends.cudnn.flags(benchmark=True, deterministic=True, allow_tf32=False):
        model(x).sum().item()
        assert rpc.rpc_sync("worker1", flags_of_gpus) == flags_of_gpus()


def flags_of_gpus() -> list[Any]:
    """What kernels of GPUs ask for besides their operands."""
    backends = torch.backends
    cudnn, matmul, attention = backends.cudnn, backends.cuda.matmul, backends.cuda.math_sdp_enabled()
    return [
        *(cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision),
        *(matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction, attention),
    ]


def micro_batches() -> None:
    model, twin = pair("perceptron", placed("perceptron")[1])
    for x, y in data("perceptron", (8, 10)):
        loss = model.forward_backward(F.cross_entropy, x, target=y, chunks=4)
        total: Any = 0.0
        for part, target in zip(x.to(gpu.device()).chunk(4), y.to(gpu.device()).chunk(4)):
            some = F.cross_entropy(twin(part.clone()), target) * (len(part) / len(x))
            some.backward()
            total = total + some.detach()
        assert_same(loss, total)
    assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def saved() -> None:
    """A state that comes from GPUs is read by a process without one; calls with tensors on GPUs go on beside a model."""
    model, twin = pair("perceptron", placed("perceptron")[0])
    plain = NETS["perceptron"].make()
    plain.load_state_dict(home(model.state_dict()))
    assert all(p.device.type == "cpu" for p in plain.parameters())
    for x, _ in batches(3, 8, 20):
        assert_same(model(x), twin(x.to(gpu.device())))
        ones = torch.ones(3 << 18, device=gpu.device())
        assert rpc.rpc_sync("worker1", torch.sum, (ones,)).item() == ones.numel()


def wrong() -> None:
    net = NETS["perceptron"].make()
    for where in (f"{gpu.TYPE}:99", "meta"):
        with pytest.raises(rpc.NotSupported, match=f"worker1 has no device {where}"):
            places.wrap(net, {"0": f"worker1/{where}"})
    for where in ("worker1/nonsense", "worker1/"):
        with pytest.raises(ValueError, match="placement puts '0' on"):
            places.wrap(net, {"0": where})


@pytest.mark.parametrize("transport", ["tcp", "cuda"])
@pytest.mark.parametrize("body", [trained, chosen, micro_batches, saved, wrong])
def test_on_gpus(body, transport):
    results(run_group(partial(on_driver, body), 3, gpu=True, transport=transport))
