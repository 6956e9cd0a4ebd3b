"""What stands around a call of a model: modes, contexts and transforms of torch, each beside the same in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .loop_nets import SGD, Block, Seen, data
from .sides import Alone


class Making(nn.Module):
    """Tensors that are made in the forward, here and in parts, have the dtype and device that torch chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.part, self.block, self.head = nn.Linear(10, 16), MakingPart(), Block(16), nn.Linear(16, 4)

    def forward(self, x):
        x = torch.tanh(self.stem(x)) + torch.full((16,), 1 / 3).to(x.dtype)
        return self.head(self.block(self.part(x)))


class MakingPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        made = torch.tensor([1 / 3]) * torch.arange(16.0) + torch.linspace(0, 1, 16)
        return (x.to(made.dtype) * self.weight.to(made.dtype) + made.sin() / 7).to(x.dtype)


PLACES = {"part": "worker1", "block": "worker2"}


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.0625 if func is torch.ops.aten.tanh.default else out


class Calling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.0625 if func is torch.tanh else out


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Any:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def module_hook() -> Any:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 1.5 if isinstance(module, nn.Linear) else None
    )
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def rounded_matmul() -> Any:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


AROUND: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "enable_grad": torch.enable_grad,
    "set_grad_enabled(True)": lambda: torch.set_grad_enabled(True),
    "autocast bf16": bf16,
    "autocast fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast, no cache": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "autocast(enabled=False)": lambda: torch.autocast("cpu", enabled=False),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1.0, lambda t: t),
    "detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "TorchDispatchMode": Seeing,
    "TorchFunctionMode": Calling,
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device cpu": lambda: default_device("cpu"),
    "torch.device('cpu')": lambda: torch.device("cpu"),
    "default device meta": lambda: default_device("meta"),
    "torch.device('meta')": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "matmul precision": rounded_matmul,
    "mkldnn off": lambda: torch.backends.mkldnn.flags(enabled=False),
    "one kernel of attention": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "a hook for all modules": module_hook,
    "profiler": lambda: torch.autograd.profiler.profile(),
    "multithreading off": lambda: torch.autograd.set_multithreading_enabled(False),
    "reparametrize cache": nn.utils.parametrize.cached,
}


def around(make: Callable[[], Any], backward_too: bool) -> Callable[[Alone], Seen]:
    """Steps without, steps within, steps without."""

    def run(side: Alone) -> Seen:
        optimizer = side.optimizer(SGD, lr=0.1, momentum=0.9)
        for number in range(6):
            x, y = data(number)
            optimizer.zero_grad()
            try:
                with make() if number in (2, 3) else contextlib.nullcontext():
                    out = side.model(x)
                    loss = F.cross_entropy(out.float(), y)
                    if backward_too:
                        loss.backward()
                if not backward_too:
                    loss.backward()
            except (RuntimeError, TypeError, ValueError) as error:
                if type(error).__name__ == "NotSupported":
                    raise
                yield type(error).__name__
                continue
            optimizer.step()
            yield out.detach(), loss.detach()

    return run


def without_grad(make: Callable[[], Any]) -> Callable[[Alone], Seen]:
    def run(side: Alone) -> Seen:
        optimizer = side.optimizer(SGD, lr=0.1)
        for number in range(4):
            x, y = data(number)
            with make():
                seen = side.model(x)
            yield type(seen).__name__, seen.requires_grad, seen.is_inference(), seen.detach().clone()
            optimizer.zero_grad()
            loss = F.cross_entropy(side.model(x), y)
            loss.backward()
            optimizer.step()
            yield loss.detach()

    return run


@contextlib.contextmanager
def grad_inside() -> Any:
    with torch.no_grad(), torch.set_grad_enabled(True), torch.no_grad():
        yield


def on_fakes(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        x, y = data(number)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            out = side.model(mode.from_tensor(x))
            yield type(out).__name__, tuple(out.shape), out.dtype
        loss = F.cross_entropy(side.model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def functional(transform: Callable[[Any, dict[str, Any], torch.Tensor, torch.Tensor], Any]) -> Callable[[Alone], Seen]:
    def run(side: Alone) -> Seen:
        optimizer = side.optimizer(SGD, lr=0.1)
        for number in range(3):
            x, y = data(number)
            named = {name: p.detach().clone() for name, p in side.model.named_parameters()}
            yield transform(side.model, named, x, y)
            loss = F.cross_entropy(side.model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.detach()

    return run


def called(model: Any, named: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.func.functional_call(model, {name: p * 2 for name, p in named.items()}, (x,)).detach()


def _loss(model: Any, y: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda named, x: F.cross_entropy(torch.func.functional_call(model, named, (x,)), y)


def grad_of_parameters(model: Any, named: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.func.grad(_loss(model, y))(named, x)


def grad_of_inputs(model: Any, named: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.func.grad(lambda given: F.cross_entropy(model(given), y))(x)


def jacobian(model: Any, named: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.func.jacrev(model)(x[:2]), torch.func.jacfwd(model)(x[:2]), torch.func.hessian(lambda g: model(g).sum())(x[:1])


def ensemble(model: Any, named: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    stacked = {name: torch.stack([p, p * 1.5]) for name, p in named.items()}
    return torch.func.vmap(lambda n, g: torch.func.functional_call(model, n, (g,)), (0, None))(stacked, x)


def per_sample(model: Any, named: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    one = lambda n, g, t: F.cross_entropy(torch.func.functional_call(model, n, (g[None],)), t[None])  # noqa: E731
    return torch.func.vmap(torch.func.grad(one), (None, 0, 0))(named, x, y)


def old_jacobian(model: Any, named: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.autograd.functional.jacobian(lambda g: model(g).sum(0), x)


def scaled_cast(side: Alone) -> Seen:
    """Mixed precision with accumulation, an overflow, clipping, and an evaluation in full precision."""
    optimizer = side.optimizer(SGD, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    for number in range(6):
        x, y = data(number)
        with bf16():
            out = side.model(x)
            with torch.autocast("cpu", enabled=False):
                loss = F.cross_entropy(out.float(), y)
        scaler.scale(loss if number != 3 else loss * float("inf")).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            yield nn.utils.clip_grad_norm_(side.model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        with torch.no_grad():
            yield loss.detach(), side.model(x), scaler.get_scale()


class Full(nn.Module):
    """A part that computes in full precision, whatever is around."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(10, 10), nn.Linear(10, 4)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.two(torch.tanh(self.one(x.float())))


def inner_casts() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10), Full())


AT = {"make": Making, "places": PLACES}
WITHIN = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad inside": grad_inside}
TRANSFORMS = (grad_of_inputs, jacobian)
OF_PARAMETERS = (called, grad_of_parameters, ensemble, per_sample)

LOOPS: dict[str, dict[str, Any]] = {
    **{
        f"around: {name}{', backward too' if both else ''}": {
            "run": around(make, both),
            **AT,
        }
        for name, make in AROUND.items()
        for both in (False, True)
    },
    "around: allow_mutation_on_saved_tensors": {
        "run": around(torch.autograd.graph.allow_mutation_on_saved_tensors, True),
        **AT,
    },
    "around: torch.device('meta'), nothing is made": {
        "run": around(AROUND["torch.device('meta')"], True),
        "make": inner_casts,
        "places": {"2": "worker1", "3": "worker2"},
    },
    **{f"around: {name}": {"run": without_grad(make), **AT} for name, make in WITHIN.items()},
    "around: FakeTensorMode": {"run": on_fakes, "refused": "has its own dispatch", **AT},
    **{f"torch.func: {run.__name__}": {"run": functional(run), **AT} for run in TRANSFORMS},
    **{f"torch.func: {run.__name__}": {"run": functional(run), **AT} for run in OF_PARAMETERS},
    "autograd.functional.jacobian": {"run": functional(old_jacobian), **AT},
    "autocast and GradScaler": {"run": scaled_cast, **AT},
    "autocast, full precision inside": {"run": scaled_cast, "make": inner_casts, "places": {"2": "worker1", "3": "worker2"}},
}
