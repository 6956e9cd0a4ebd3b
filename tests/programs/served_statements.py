"""What users do with a model that trains, one function each: the statements of ``served_programs``.

What a function returns is compared with one process. ``trainer.seed`` and ``trainer.share`` (of [0, 1)) are what it draws from.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mixed_calls import Doing
from torch import nn

Statement = Callable[["Trainer"], Any]

STATEMENTS: dict[str, Statement] = {}


def statement(function: Statement) -> Statement:
    STATEMENTS[function.__name__] = function
    return function


class Trainer(Doing):
    """A model and its optimizer, served or not, and what their user keeps from one statement to another."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, keep: Callable[[str, Any], None]) -> None:
        super().__init__(keep)
        self.net, self.optimizer = net, optimizer
        self.hooks: list[Any] = []

    def ends(self) -> None:
        self.keep("optimizer", state_of(self.optimizer))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.net.parameters() if parameter.requires_grad]

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.net.parameters() if parameter.grad is not None]

    @property
    def one(self) -> nn.Parameter:
        """A parameter that the statement draws."""
        return self.parameters[int(self.share * len(self.parameters))]

    def random(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed)).to(dtype)

    def batch(self, number: int = 0) -> torch.Tensor:
        return torch.randn(4, 5, generator=self._generator(number)).to(self.parameters[0].dtype)

    def loss(self, number: int = 0) -> torch.Tensor:
        """Of a batch that the statement draws."""
        classes = torch.randint(0, 10, (4,), generator=self._generator(number + 1))
        return F.cross_entropy(self.net(self.batch(number)), classes)

    def evaluated(self) -> torch.Tensor:
        was_training = self.net.training
        self.net.eval()
        with torch.no_grad():
            out = self.net(self.batch())
        self.net.train(was_training)
        return out

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + number)


def one_trainer(net: nn.Module, kind: Any, options: dict[str, Any], keep: Callable[[str, Any], None]) -> Trainer:
    """The optimizer of a served model is the model's."""
    return Trainer(net, getattr(net, "optimizer", None) or kind(net.parameters(), **options), keep)


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """All of them in one, in double."""
    found = [tensor.detach().double().flatten() for tensor in tensors]
    return torch.cat(found) if found else None


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    """In the order of the parameters: that of the dictionary says which of them had a gradient first."""
    state = optimizer.state_dict()
    return sorted(state["state"].items()), state["param_groups"]


def entries(parameter: torch.Tensor) -> np.ndarray[Any, Any]:
    """As numpy shows them: what is written there is written to the parameter."""
    return parameter.detach().numpy().reshape(-1)


# Steps.


@statement
def trains(trainer: Trainer) -> Any:
    loss = trainer.loss()
    trainer.optimizer.zero_grad()
    loss.backward()
    trainer.optimizer.step()
    return loss.detach()


@statement
def trains_and_clears_late(trainer: Trainer) -> Any:
    loss = trainer.loss()
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=trainer.share < 0.5)
    return loss.detach()


@statement
def trains_twice(trainer: Trainer) -> Any:
    first = trains(trainer)
    trainer.seed += 5
    return first, trains(trainer)


@statement
def trains_with_a_closure(trainer: Trainer) -> Any:
    def closure() -> Any:
        trainer.optimizer.zero_grad()
        loss = trainer.loss()
        loss.backward()
        return loss

    loss: Any = trainer.optimizer.step(closure)
    return loss.detach()


@statement
def trains_in_bfloat16(trainer: Trainer) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        loss = trainer.loss()
    trainer.optimizer.zero_grad()
    loss.backward()
    trainer.optimizer.step()
    return loss.detach()


@statement
def trains_in_a_thread(trainer: Trainer) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(trains, trainer).result()


@statement
def trains_on_two_backward_passes(trainer: Trainer) -> None:
    loss = trainer.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


@statement
def trains_towards_small_gradients(trainer: Trainer) -> None:
    """The norm of the gradient is the loss."""
    if not trainer.trained:
        return
    found = torch.autograd.grad(trainer.loss(), trainer.trained, create_graph=True, allow_unused=True)
    penalty = torch.stack([gradient.square().sum() for gradient in found if gradient is not None]).sum()
    trainer.optimizer.zero_grad()
    penalty.backward()
    trainer.optimizer.step()


@statement
def trains_away_from_sharp_minima(trainer: Trainer) -> None:
    """A step of SAM: gradients of weights that were moved, a step of the weights of before."""
    trainer.loss().backward()
    before = [parameter.detach().clone() for parameter in trainer.parameters]
    with torch.no_grad():
        for parameter in trainer.parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=0.05)
    trainer.optimizer.zero_grad()
    trainer.loss().backward()
    with torch.no_grad():
        for parameter, value in zip(trainer.parameters, before):
            parameter.copy_(value)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


@statement
def accumulates(trainer: Trainer) -> None:
    for number in range(2):
        (trainer.loss(number) / 2).backward()


@statement
def steps(trainer: Trainer) -> None:
    trainer.optimizer.step()


@statement
def keeps_a_graph(trainer: Trainer) -> None:
    trainer.kept["loss"] = trainer.loss()


@statement
def goes_back_through_the_kept_graph(trainer: Trainer) -> None:
    if "loss" in trainer.kept:
        trainer.kept.pop("loss").backward()


@statement
def fails_going_back(trainer: Trainer) -> None:
    def fails(gradient: torch.Tensor) -> None:
        raise KeyError("a hook")

    loss = trainer.loss() * 1
    loss.register_hook(fails)
    try:
        loss.backward()
    except KeyError:
        pass


@statement
def fails_going_forward(trainer: Trainer) -> None:
    hook = trainer.net.register_forward_hook(lambda *_: 1 / 0)
    try:
        trainer.net(trainer.batch())
    except ZeroDivisionError:
        pass
    hook.remove()


# Gradients.


@statement
def clears_gradients(trainer: Trainer) -> None:
    trainer.optimizer.zero_grad(set_to_none=trainer.share < 0.5)


@statement
def clears_gradients_of_the_model(trainer: Trainer) -> None:
    trainer.net.zero_grad(set_to_none=trainer.share < 0.5)


@statement
def clips_the_norm(trainer: Trainer) -> Any:
    return nn.utils.clip_grad_norm_(trainer.net.parameters(), 0.1 + trainer.share)


@statement
def clips_values(trainer: Trainer) -> None:
    nn.utils.clip_grad_value_(trainer.net.parameters(), 0.01 + 0.1 * trainer.share)


@statement
def scales_a_gradient(trainer: Trainer) -> None:
    if trainer.one.grad is not None:
        trainer.one.grad.mul_(0.5)


@statement
def drops_a_gradient(trainer: Trainer) -> None:
    trainer.one.grad = None


@statement
def sets_a_gradient(trainer: Trainer) -> None:
    trainer.one.grad = trainer.random(trainer.one.shape, trainer.one.dtype)


@statement
def reads_gradients(trainer: Trainer) -> Any:
    return flat(trainer.gradients)


@statement
def reads_norms_of_gradients(trainer: Trainer) -> Any:
    return [gradient.norm() for gradient in trainer.gradients]


@statement
def keeps_gradients_over_a_step(trainer: Trainer) -> Any:
    trainer.optimizer.zero_grad()
    trainer.loss().backward()
    found = trainer.gradients
    trainer.optimizer.step()
    return flat(found)


@statement
def asks_for_gradients(trainer: Trainer) -> Any:
    if not trainer.trained:
        return None
    found = torch.autograd.grad(trainer.loss(), trainer.trained, allow_unused=True)
    return flat(gradient for gradient in found if gradient is not None)


@statement
def freezes_a_parameter(trainer: Trainer) -> None:
    trainer.one.requires_grad_(False)


@statement
def trains_all_again(trainer: Trainer) -> None:
    trainer.net.requires_grad_(True)


@statement
def hooks_a_gradient(trainer: Trainer) -> None:
    if trainer.one.requires_grad:
        trainer.hooks.append(trainer.one.register_hook(lambda gradient: gradient * 2))


@statement
def hooks_an_accumulated_gradient(trainer: Trainer) -> None:
    def halves(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)

    if trainer.one.requires_grad:
        trainer.hooks.append(trainer.one.register_post_accumulate_grad_hook(halves))


@statement
def removes_hooks(trainer: Trainer) -> None:
    while trainer.hooks:
        trainer.hooks.pop().remove()


# The model is called, copied or saved.


@statement
def evaluates(trainer: Trainer) -> Any:
    return trainer.evaluated()


@statement
def infers(trainer: Trainer) -> Any:
    with torch.inference_mode():
        return trainer.net(trainer.batch()).clone()


@statement
def calls_with_other_parameters(trainer: Trainer) -> Any:
    halved = {name: parameter * 0.5 for name, parameter in trainer.net.named_parameters()}
    return torch.func.functional_call(trainer.net, halved, (trainer.batch(),)).detach()


@statement
def calls_a_copy(trainer: Trainer) -> Any:
    return copy.deepcopy(trainer.net).eval()(trainer.batch()).detach()


@statement
def calls_a_saved_model(trainer: Trainer) -> Any:
    file = io.BytesIO()
    torch.save(trainer.net, file)
    file.seek(0)
    return torch.load(file, weights_only=False).eval()(trainer.batch()).detach()


@statement
def reads_the_state(trainer: Trainer) -> Any:
    return flat(trainer.net.state_dict().values())


@statement
def keeps_the_state(trainer: Trainer) -> None:
    trainer.kept["state"] = copy.deepcopy(trainer.net.state_dict())


@statement
def loads_the_kept_state(trainer: Trainer) -> None:
    if "state" in trainer.kept:
        trainer.net.load_state_dict(trainer.kept["state"])


@statement
def keeps_the_living_state(trainer: Trainer) -> None:
    trainer.kept["living"] = trainer.net.state_dict()


@statement
def reads_the_living_state(trainer: Trainer) -> Any:
    return flat(trainer.kept.get("living", {}).values())


@statement
def reads_a_saved_state(trainer: Trainer) -> Any:
    file = io.BytesIO()
    torch.save(trainer.net.state_dict(), file)
    file.seek(0)
    return flat(torch.load(file).values())


@statement
def names_parameters(trainer: Trainer) -> Any:
    return {name: tuple(parameter.shape) for name, parameter in trainer.net.named_parameters()}


# Parameters are read.


@statement
def reads_a_sum(trainer: Trainer) -> Any:
    return trainer.one.sum().detach()


@statement
def reads_the_largest_entry(trainer: Trainer) -> Any:
    return trainer.one.data.abs().max()


@statement
def copies_a_parameter(trainer: Trainer) -> Any:
    return trainer.one.detach().clone()


@statement
def copies_data(trainer: Trainer) -> Any:
    return trainer.one.data.clone()


@statement
def reads_by_numpy(trainer: Trainer) -> Any:
    return torch.from_numpy(trainer.one.detach().numpy().copy())


@statement
def copies_by_numpy(trainer: Trainer) -> Any:
    return torch.from_numpy(np.array(trainer.one.detach()))


@statement
def reads_a_list(trainer: Trainer) -> Any:
    return torch.tensor(trainer.one.tolist())


@statement
def reads_an_entry(trainer: Trainer) -> Any:
    return trainer.one.flatten()[0].item()


@statement
def reads_the_first_row(trainer: Trainer) -> Any:
    return trainer.one[0].detach().clone()


@statement
def reads_row_by_row(trainer: Trainer) -> Any:
    return [row.detach().sum() for row in trainer.one] if trainer.one.dim() else None


@statement
def counts_rows(trainer: Trainer) -> Any:
    return len(trainer.one) if trainer.one.dim() else None


@statement
def counts_entries(trainer: Trainer) -> Any:
    return [parameter.numel() for parameter in trainer.parameters]


@statement
def compares_with_zero(trainer: Trainer) -> Any:
    return bool((trainer.one > 0).any())


@statement
def compares_over_a_step(trainer: Trainer) -> Any:
    before = trainer.one.detach().clone()
    trains(trainer)
    return torch.equal(before, trainer.one), bool((trainer.one != before).any())


@statement
def adds_a_number(trainer: Trainer) -> Any:
    return (trainer.one + 1).detach()


@statement
def takes_from_a_number(trainer: Trainer) -> Any:
    return (1 - trainer.one).detach()


@statement
def writes_a_result(trainer: Trainer) -> Any:
    """``out=``"""
    parameter = trainer.one.detach()
    return torch.mul(parameter, 2, out=torch.empty_like(parameter))


@statement
def moves_to_the_cpu(trainer: Trainer) -> Any:
    return trainer.one.cpu().detach().mean()


@statement
def reads_in_double(trainer: Trainer) -> Any:
    return trainer.one.to(torch.float64).detach().mean()


@statement
def reads_norms(trainer: Trainer) -> Any:
    return [parameter.norm().detach() for parameter in trainer.parameters]


@statement
def reads_norms_at_once(trainer: Trainer) -> Any:
    return torch._foreach_norm([parameter.detach() for parameter in trainer.parameters])


@statement
def reads_a_vector(trainer: Trainer) -> Any:
    return nn.utils.parameters_to_vector(trainer.net.parameters()).detach()


@statement
def prints_a_parameter(trainer: Trainer) -> Any:
    return repr(trainer.one)


@statement
def prints_data(trainer: Trainer) -> Any:
    return str(trainer.one.data)


@statement
def keeps_a_view_over_a_step(trainer: Trainer) -> Any:
    view = trainer.one.detach()
    trains(trainer)
    return view.clone()


@statement
def keeps_an_array_over_a_step(trainer: Trainer) -> Any:
    array = trainer.one.detach().numpy()
    trains(trainer)
    trainer.one.sum()
    return torch.from_numpy(array.copy())


@statement
def keeps_data(trainer: Trainer) -> None:
    trainer.kept["data"] = trainer.one.data


@statement
def reads_the_kept_data(trainer: Trainer) -> Any:
    return trainer.kept["data"].clone() if "data" in trainer.kept else None


# Parameters are written.


@statement
def scales_a_parameter(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.one.mul_(0.9)


@statement
def scales_layers(trainer: Trainer) -> None:
    def scales(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(0.99)

    trainer.net.apply(scales)


@statement
def clamps_parameters(trainer: Trainer) -> None:
    with torch.no_grad():
        for parameter in trainer.parameters:
            parameter.clamp_(-0.5, 0.5)


@statement
def scales_data(trainer: Trainer) -> None:
    trainer.one.data.mul_(1.1)


@statement
def copies_into_data(trainer: Trainer) -> None:
    trainer.one.data.copy_(trainer.random(trainer.one.shape, torch.float32))


@statement
def writes_an_entry(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.one.view(-1)[0] = 0.25


@statement
def writes_a_view(trainer: Trainer) -> None:
    trainer.one.detach().add_(0.01)


@statement
def writes_a_vector(trainer: Trainer) -> None:
    vector = nn.utils.parameters_to_vector(trainer.net.parameters())
    nn.utils.vector_to_parameters(vector * 0.95, trainer.net.parameters())


@statement
def draws_a_parameter_anew(trainer: Trainer) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(trainer.seed)
        nn.init.normal_(trainer.one, std=0.2)


@statement
def writes_by_numpy(trainer: Trainer) -> None:
    entries(trainer.one)[0] = 0.5


@statement
def writes_data_by_numpy(trainer: Trainer) -> None:
    trainer.one.data.numpy()[...] *= 0.97


@statement
def writes_the_state_by_numpy(trainer: Trainer) -> None:
    for value in trainer.net.state_dict().values():
        if value.dtype.is_floating_point:
            value.numpy()[...] *= 0.99


@statement
def writes_by_numpy_while_frozen(trainer: Trainer) -> None:
    was_trained = trainer.one.requires_grad
    trainer.one.requires_grad_(False).numpy().reshape(-1)[-1] = 0.125
    trainer.one.requires_grad_(was_trained)


@statement
def writes_by_numpy_in_inference_mode(trainer: Trainer) -> None:
    with torch.inference_mode():
        entries(trainer.one)[0] = 0.75


@statement
def shuffles_by_numpy(trainer: Trainer) -> None:
    np.random.default_rng(trainer.seed).shuffle(entries(trainer.one))


@statement
def writes_by_dlpack(trainer: Trainer) -> None:
    torch.from_dlpack(trainer.one.detach()).mul_(0.98)


# Data is exchanged.


@statement
def sets_data(trainer: Trainer) -> None:
    trainer.one.data = trainer.random(trainer.one.shape, trainer.one.dtype)


@statement
def transposes_data(trainer: Trainer) -> None:
    if trainer.one.dim() == 2:
        trainer.one.data = trainer.one.data.t().contiguous().t()


@statement
def exchanges_two(trainer: Trainer) -> None:
    """The first two of one shape and dtype."""
    for number, first in enumerate(trainer.parameters):
        for second in trainer.parameters[number + 1 :]:
            if first.shape == second.shape and first.dtype is second.dtype:
                first.data, second.data = second.data, first.data
                return


@statement
def exchanges_data_and_back(trainer: Trainer) -> Any:
    weights = [parameter.data for parameter in trainer.parameters]
    for parameter in trainer.parameters:
        parameter.data = parameter.detach() * 0.9
    out = trainer.evaluated()
    for parameter, weight in zip(trainer.parameters, weights):
        parameter.data = weight
    return out


@statement
def evaluates_with_exchanged_averages(trainer: Trainer) -> Any:
    """As the EMA class of many repositories does. Sometimes the weights do not come back."""
    named = dict(trainer.net.named_parameters())
    averages = trainer.kept.setdefault("exchanged", {name: parameter.data.clone() for name, parameter in named.items()})
    for name, parameter in named.items():
        averages[name] = (0.7 * averages[name] + 0.3 * parameter.data).clone()
    weights = {name: parameter.data for name, parameter in named.items()}
    for name, parameter in named.items():
        parameter.data = averages[name]
    out = trainer.evaluated()
    if trainer.share < 0.9:
        for name, parameter in named.items():
            parameter.data = weights[name]
    return out


# Averages.


def averages_of(trainer: Trainer) -> list[torch.Tensor]:
    return trainer.kept.setdefault("averages", [parameter.detach().clone() for parameter in trainer.parameters])


@statement
def averages(trainer: Trainer) -> Any:
    for average, parameter in zip(averages_of(trainer), trainer.parameters):
        average.lerp_(parameter.detach(), 0.3)
    return flat(averages_of(trainer))


@statement
def averages_at_once(trainer: Trainer) -> Any:
    torch._foreach_lerp_(averages_of(trainer), [parameter.data for parameter in trainer.parameters], 0.3)
    return flat(averages_of(trainer))


@statement
def evaluates_with_copied_averages(trainer: Trainer) -> Any:
    if "averages" not in trainer.kept:
        return None
    weights = [parameter.detach().clone() for parameter in trainer.parameters]
    for parameter, average in zip(trainer.parameters, averages_of(trainer)):
        parameter.data.copy_(average)
    out = trainer.evaluated()
    for parameter, weight in zip(trainer.parameters, weights):
        parameter.data.copy_(weight)
    return out


@statement
def averages_a_model(trainer: Trainer) -> Any:
    if "averaged" not in trainer.kept:
        trainer.kept["averaged"] = torch.optim.swa_utils.AveragedModel(trainer.net)
    averaged = trainer.kept["averaged"]
    averaged.update_parameters(trainer.net)
    return averaged.eval()(trainer.batch()).detach()


# The optimizer.


@statement
def lowers_the_rate(trainer: Trainer) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.7


@statement
def sets_the_decay(trainer: Trainer) -> None:
    for group in trainer.optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.02 * trainer.share


@statement
def schedules(trainer: Trainer) -> Any:
    if "schedule" not in trainer.kept:
        trainer.kept["schedule"] = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, 7)
    trainer.kept["schedule"].step()
    return trainer.kept["schedule"].get_last_lr()


@statement
def keeps_the_optimizer(trainer: Trainer) -> None:
    trainer.kept["optimizer"] = copy.deepcopy(trainer.optimizer.state_dict())


@statement
def loads_the_kept_optimizer(trainer: Trainer) -> None:
    if "optimizer" in trainer.kept:
        trainer.optimizer.load_state_dict(copy.deepcopy(trainer.kept["optimizer"]))  # torch goes on with what it is given


@statement
def reads_the_optimizer(trainer: Trainer) -> Any:
    return state_of(trainer.optimizer)


@statement
def hooks_the_end_of_steps(trainer: Trainer) -> None:
    trainer.hooks.append(trainer.optimizer.register_step_post_hook(lambda *_: trainer.keep("a step ended", None)))


@statement
def hooks_the_begin_of_steps(trainer: Trainer) -> None:
    trainer.hooks.append(trainer.optimizer.register_step_pre_hook(lambda *_: lowers_the_rate(trainer)))


COMMON = ["trains", "trains", "trains_and_clears_late", "trains_twice", "evaluates"]
"""Half of what a program does, so that the rest has something to change."""
