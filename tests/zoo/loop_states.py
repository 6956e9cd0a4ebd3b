"""Training loops of the zoo: averages and copies of models, their modes and settings, precision, data, several nets."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from .loop_nets import SGD, Adam, Net, Seen, data, error, grads_of, plain_steps
from .loop_steps import LR
from .sides import Alone, Wrapped

# -- averages, copies, states


def ema(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    average = swa_utils.AveragedModel(side.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    yield from plain_steps(side, optimizer, 3, after=lambda: average.update_parameters(side.model))
    yield {name: p.detach() for name, p in average.named_parameters()}
    yield average(data(0)[0]).detach()


def ema_by_hand(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    parameters = list(side.model.parameters())
    shadow = [p.detach().clone() for p in parameters]

    def follow() -> None:
        with torch.no_grad():
            for s, p in zip(shadow, parameters):
                s.lerp_(p.detach(), 0.1)

    yield from plain_steps(side, optimizer, 4, after=follow)
    yield shadow


def swa(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    average = swa_utils.AveragedModel(side.model)
    schedule = swa_utils.SWALR(optimizer, 0.05, anneal_epochs=2)
    for number in range(4):
        yield from plain_steps(side, optimizer, 1, number)
        average.update_parameters(side.model)
        schedule.step()
    swa_utils.update_bn([data(n)[0] for n in range(3)], average)
    yield {**average.state_dict()}


def target_network(side: Alone) -> Seen:
    """As in DQN: a copy that follows, by ``state_dict``."""
    optimizer, target = side.optimizer(Adam, lr=0.01), Net()
    target.load_state_dict(side.model.state_dict())
    for number in range(4):
        x, _ = data(number)
        with torch.no_grad():
            wanted = target(x).amax(1)
        loss = F.smooth_l1_loss(side.model(x).amax(1), wanted + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 2:
            target.load_state_dict(side.model.state_dict())
        yield loss.detach()


def deep_copied(side: Alone) -> Seen:
    optimizer = side.optimizer(Adam, lr=0.01)
    yield from plain_steps(side, optimizer, 2)
    twin = copy.deepcopy(side.model)
    yield from plain_steps(side, optimizer, 2, 2)
    yield twin(data(0)[0]).detach()


def states_there_and_back(side: Alone) -> Seen:
    optimizer = side.optimizer(Adam, lr=0.01)
    schedule = LR.StepLR(optimizer, 2, 0.5)
    yield from plain_steps(side, optimizer, 3, after=schedule.step)
    file = io.BytesIO()
    torch.save([side.model.state_dict(), optimizer.state_dict(), schedule.state_dict()], file)
    yield from plain_steps(side, optimizer, 2, 3, after=schedule.step)
    file.seek(0)
    saved = torch.load(file)
    for part, state in zip((side.model, optimizer, schedule), saved):
        part.load_state_dict(state)
    yield from plain_steps(side, optimizer, 3, 5, after=schedule.step)
    yield optimizer.state_dict()["state"]


def early_stopping(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=1.0)
    best, kept = float("inf"), {}
    for number in range(5):
        yield from plain_steps(side, optimizer, 1, number)
        side.model.eval()
        with torch.no_grad():
            value = error(side, 77).item()
        side.model.train()
        yield value
        if value < best:
            best, kept = value, copy.deepcopy(side.model.state_dict())
    side.model.load_state_dict(kept)


def initialised_anew(side: Alone) -> Seen:
    torch.manual_seed(3)
    for name, p in side.model.named_parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
        elif "bias" in name:
            nn.init.zeros_(p)
    yield from plain_steps(side, side.optimizer(SGD, lr=0.1))


# -- the model's modes and settings


def frozen_and_back(side: Alone) -> Seen:
    model, optimizer = side.model, side.optimizer(Adam, lr=0.01)
    for number in range(6):
        if number in (2, 4):
            for p in model.body[0].parameters():
                p.requires_grad_(number == 4)
            model.stem.requires_grad_(number == 4)
        yield from plain_steps(side, optimizer, 1, number)


def switched(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(4):
        side.model.train(number % 2 == 0)
        yield from plain_steps(side, optimizer, 1, number)
        side.model.stem.eval()
        yield from plain_steps(side, optimizer, 1, number)


def evaluations(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        yield from plain_steps(side, optimizer, 1, number)
        side.model.eval()
        with torch.no_grad():
            yield error(side, 50, 3)
        with torch.inference_mode():
            yield error(side, 51).item()
        side.model.train()
        with torch.no_grad():
            yield error(side, 52)


def sizes(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number, count in enumerate([8, 8, 5, 8, 3, 5, 2]):
        optimizer.zero_grad()
        loss = error(side, number, count)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def attribute_changed(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(4):
        side.model.scale = 1.0 + number / 4
        yield from plain_steps(side, optimizer, 1, number)


def head_replaced(side: Alone) -> Seen:
    yield from plain_steps(side, side.optimizer(SGD, lr=0.1), 2)
    torch.manual_seed(8)
    side.model.head = nn.Linear(16, 4)
    yield from plain_steps(side, side.optimizer(SGD, lr=0.1), 2)


def hooks(side: Alone) -> Seen:
    seen: list[Any] = []
    model = side.model
    handles = [
        model.stem.register_forward_hook(lambda m, a, out: seen.append(out.detach().sum())),
        model.body[0].register_forward_hook(lambda m, a, out: out * 1.5),
        model.head.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,)),
        model.register_forward_hook(lambda m, a, out: seen.append(out.detach().mean())),
    ]
    yield from plain_steps(side, side.optimizer(SGD, lr=0.1))
    for handle in handles:
        handle.remove()
    yield from plain_steps(side, side.optimizer(SGD, lr=0.1))
    yield seen


def hooks_of_parameters(side: Alone) -> Seen:
    for p in side.model.parameters():
        p.register_hook(lambda grad: grad * 0.5)
    yield from plain_steps(side, side.optimizer(SGD, lr=0.1))


def hooks_of_gradients(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        x, y = data(number)
        out = side.model(x)
        out.register_hook(lambda grad: grad * 2)
        F.cross_entropy(out, y).backward()
        optimizer.step()
    yield grads_of(side)


# -- precision, memory, compilation


def autocast(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        x, y = data(number)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(side.model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def scaler(side: Alone) -> Seen:
    optimizer, scale = side.optimizer(SGD, lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for number in range(4):
        x, y = data(number)
        loss = F.cross_entropy(side.model(x), y) * (float("inf") if number == 1 else 1.0)
        optimizer.zero_grad()
        scale.scale(loss).backward()
        scale.unscale_(optimizer)
        scale.step(optimizer)
        scale.update()
        yield loss.detach(), scale.get_scale()


def checkpointed(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        x, y = data(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(checkpoint(side.model, x, use_reentrant=False), y)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def plain(side: Alone) -> Seen:
    yield from plain_steps(side, side.optimizer(SGD, lr=0.1))


def compiled(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    model = torch.compile(side.model, backend="eager")
    for number in range(3):
        x, y = data(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def moved(side: Alone) -> Seen:
    yield from plain_steps(side, side.optimizer(SGD, lr=0.1), 1)
    model = side.model.to("cpu").to(torch.float32).float()
    yield model is side.model
    yield from plain_steps(side, side.optimizer(SGD, lr=0.1))


# -- data and chance


def loader(side: Alone) -> Seen:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(20, 10, generator=generator), torch.randint(0, 4, (20,), generator=generator)
    batches = DataLoader(TensorDataset(x, y), 6, shuffle=True, generator=generator)
    optimizer = side.optimizer(SGD, lr=0.1)
    for _ in range(2):
        for a, b in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(side.model(a), b)
            loss.backward()
            optimizer.step()
            yield loss.detach()


def seeded(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(4):
        torch.manual_seed(number), random.seed(number)
        x = torch.randn(8, 10) * random.random()
        optimizer.zero_grad()
        loss = side.model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        yield loss.detach(), torch.rand(2)


def micro_batches(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        x, y = data(number, 8)
        optimizer.zero_grad()
        if isinstance(side, Wrapped):
            total = side.model.forward_backward(F.cross_entropy, x, target=y, chunks=4)
        else:
            losses = [F.cross_entropy(side.model(a), b) * (2 / 8) for a, b in zip(x.chunk(4), y.chunk(4))]
            for loss in losses:
                loss.backward()
            total = losses[0].detach()
            for loss in losses[1:]:
                total = total + loss.detach()
        optimizer.step()
        yield total


# -- nets of their own


def gan(side: Alone) -> Seen:
    model = side.model
    one = side.optimizer(Adam, model.critic.parameters(), lr=0.01)
    two = side.optimizer(Adam, model.generator.parameters(), lr=0.01)
    torch.manual_seed(4)
    for number in range(3):
        fake, real = model(torch.randn(8, 6), data(number)[0])
        loss = F.softplus(fake).mean() + F.softplus(-real).mean()
        one.zero_grad()
        loss.backward()
        one.step()
        model.critic.requires_grad_(False)
        fooled = F.softplus(-model(torch.randn(8, 6))[0]).mean()
        two.zero_grad()
        fooled.backward()
        two.step()
        model.critic.requires_grad_(True)
        yield loss.detach(), fooled.detach()


def gan_by_parts(side: Alone) -> Seen:
    """Calls the parts of its model, not the model."""
    model = side.model
    generator, critic = model.generator, model.critic
    one = side.optimizer(Adam, critic.parameters(), lr=0.01)
    two = side.optimizer(Adam, generator.parameters(), lr=0.01)
    torch.manual_seed(4)
    for number in range(3):
        fake = generator(torch.randn(8, 6))
        loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(data(number)[0])).mean()
        one.zero_grad()
        loss.backward()
        one.step()
        fooled = F.softplus(-critic(fake)).mean()
        two.zero_grad()
        fooled.backward()
        two.step()
        yield loss.detach(), fooled.detach()


def distilled(side: Alone) -> Seen:
    torch.manual_seed(6)
    teacher, optimizer = Net().eval(), side.optimizer(SGD, lr=0.1)
    for number in range(3):
        x, _ = data(number)
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        optimizer.zero_grad()
        loss = F.kl_div(side.model(x).log_softmax(1), wanted, reduction="batchmean")
        loss.backward()
        optimizer.step()
        yield loss.detach()
