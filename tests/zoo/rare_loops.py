"""Training loops of the zoo, as found in repositories of research: each beside the same in one process."""

from __future__ import annotations

import copy
import io
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader, TensorDataset

from .loop_nets import SGD, Adam, AdamW, Net, Seen, data, error, plain_steps
from .sides import Alone, Served, Wrapped, closing

# -- gradients and weights between backward and step


def centralized(side: Alone) -> Seen:
    """Gradient centralization: in place, for weights of more than one dimension."""
    optimizer = side.optimizer(SGD, lr=0.1, momentum=0.9)
    for number in range(4):
        optimizer.zero_grad()
        loss = error(side, number)
        loss.backward()
        for p in side.model.parameters():
            if p.dim() > 1:
                p.grad.add_(-p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))
        optimizer.step()
        yield loss.detach()


def clipped_by_unit(side: Alone) -> Seen:
    """Adaptive gradient clipping, as in NFNets."""
    optimizer = side.optimizer(SGD, lr=0.5)
    for number in range(4):
        optimizer.zero_grad()
        loss = error(side, number)
        loss.backward()
        for p in side.model.parameters():
            over = tuple(range(1, p.dim()))
            size = (p.detach().norm(2, over, True) if over else p.detach().abs()).clamp_(min=1e-3)
            slope = p.grad.detach().norm(2, over, True) if over else p.grad.detach().abs()
            small = p.grad.detach() * (size * 0.02 / slope.clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(slope < size * 0.02, p.grad.detach(), small))
        optimizer.step()
        yield loss.detach()


def surgery(side: Alone) -> Seen:
    """PCGrad: gradients of two tasks, each without what contradicts the other."""
    optimizer = side.optimizer(Adam, lr=0.01)
    for number in range(3):
        found = []
        for task in (0, 1):
            optimizer.zero_grad()
            x, y = data(number)
            out = side.model(x)
            loss = F.cross_entropy(out, y) if task else out.square().mean()
            loss.backward()
            found.append([p.grad.detach().clone() for p in side.model.parameters()])
            yield loss.detach()
        dot = sum((a * b).sum() for a, b in zip(*found))
        square = sum((b * b).sum() for b in found[1])
        for p, a, b in zip(side.model.parameters(), *found):
            p.grad = a - dot.clamp(max=0) / square * b + b
        optimizer.step()


def neurons_reset(side: Alone) -> Seen:
    """As ReDo does: rows of weights are drawn again."""
    optimizer = side.optimizer(Adam, lr=0.01)
    for number in range(4):
        yield from plain_steps(side, optimizer, 1, number)
        with torch.no_grad():
            for p in side.model.parameters():
                if p.dim() == 2:
                    p[number % p.shape[0]] = torch.full((p.shape[1],), 0.01)
                    p.data[0, 1] = 0.5
                    p[:, 0].mul_(0.9)


def gradients_set(side: Alone) -> Seen:
    """All the ways to have no gradient, or another."""
    optimizer = side.optimizer(SGD, lr=0.1, momentum=0.9)
    for number in range(6):
        if number % 3 == 0:
            side.model.zero_grad()
        for p in side.model.parameters():
            if number % 3 == 1:
                p.grad = None
            if number % 3 == 2 and p.grad is not None:
                p.grad.zero_()
        loss = error(side, number)
        loss.backward()
        if number == 3:
            for p in side.model.parameters():
                p.grad = torch.ones_like(p) * 0.01
        optimizer.step()
        yield loss.detach()


# -- optimizers of repositories


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: ``y`` is trained, ``x`` is evaluated."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    def _mode(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] == training:
                continue
            weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(end=self.state[p]["z"], weight=weight)
            group["training"] = training

    def train(self) -> None:
        self._mode(True)

    def eval(self) -> None:
        self._mode(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            mean = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.data.lerp_(end=z, weight=mean)
                p.data.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - mean) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def schedule_free(side: Alone) -> Seen:
    optimizer = ScheduleFree(side.model.parameters())
    for number in range(3):
        optimizer.train()
        yield from plain_steps(side, optimizer, 2, 2 * number)
        optimizer.eval()
        side.model.eval()
        with torch.no_grad():
            yield error(side, 50)
        side.model.train()


class Centralizing(torch.optim.AdamW):
    """A class below one of torch's, which does something before."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad -= p.grad.mean(1, keepdim=True)
        return super().step(closure)


def derived_optimizer(side: Alone) -> Seen:
    yield from plain_steps(side, Centralizing(side.model.parameters(), lr=0.01), 4)


def decayed_by_layer(side: Alone) -> Seen:
    """Learning rates by depth; no decay for norms and biases; groups by name."""
    groups: dict[Any, Any] = {}
    for name, p in side.model.named_parameters():
        depth = {"stem": 0, "body": 1, "head": 2}[name.split(".")[0]]
        decay = 0.0 if p.dim() == 1 else 0.1
        found = groups.setdefault((depth, decay), {"params": [], "lr": 0.01 * 0.5**depth, "weight_decay": decay, "name": depth})
        found["params"].append(p)
    optimizer = side.optimizer(AdamW, list(groups.values()))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n, at=at: 1 / (1 + n * at) for at in range(len(groups))])
    yield from plain_steps(side, optimizer, 4, after=schedule.step)
    yield [{**group, "params": len(group["params"])} for group in optimizer.param_groups]


def thawed(side: Alone) -> Seen:
    """Fine-tuning: the head alone, then more, each with a new optimizer over what learns."""
    side.model.requires_grad_(False)
    for number, part in enumerate(("head", "body", "stem")):
        getattr(side.model, part).requires_grad_(True)
        optimizer = side.optimizer(Adam, [p for p in side.model.parameters() if p.requires_grad], lr=0.01)
        yield from plain_steps(side, optimizer, 2, 2 * number)


def thawed_by_group(side: Alone) -> Seen:
    """The same with one optimizer that gets groups."""
    side.model.requires_grad_(False)
    side.model.head.requires_grad_(True)
    optimizer = side.optimizer(SGD, side.model.head.parameters(), lr=0.1, momentum=0.9)
    yield from plain_steps(side, optimizer, 2)
    side.model.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(side.model.body.parameters()), "lr": 0.01})
    yield from plain_steps(side, optimizer, 2, 2)
    side.model.head.requires_grad_(False)
    yield from plain_steps(side, optimizer, 2, 4)


# -- losses


def mixed_up(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(4):
        x, y = data(number)
        share = torch.distributions.Beta(0.4, 0.4).sample()
        order = torch.randperm(len(x))
        out = side.model(share * x + (1 - share) * x[order])
        loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def taught(side: Alone) -> Seen:
    """Mean teacher: a copy that follows, and gives targets without gradient."""
    optimizer, teacher = side.optimizer(SGD, lr=0.1), copy.deepcopy(side.model)
    teacher.requires_grad_(False)
    for number in range(4):
        x, y = data(number)
        out = side.model(x + 0.1 * torch.randn_like(x))
        loss = F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), teacher(x).softmax(1).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), side.model.parameters()):
                old.mul_(0.9).add_(new.detach(), alpha=0.1)
            for old, new in zip(teacher.buffers(), side.model.buffers()):
                old.copy_(new)
        yield loss.detach()
    yield {**teacher.state_dict()}


def reinforced(side: Alone) -> Seen:
    """REINFORCE: actions are drawn from what the model says; a baseline; returns; entropy."""
    optimizer, baseline = side.optimizer(Adam, lr=0.01), 0.0
    for number in range(4):
        states, rewards = data(number)[0], []
        logs, entropies = [], []
        for state in states.split(2):
            policy = Categorical(logits=side.model(state))
            action = policy.sample()
            logs.append(policy.log_prob(action))
            entropies.append(policy.entropy())
            rewards.append((action == 1).float() - 0.1 * action)
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        loss = -(torch.stack(logs) * (returns - baseline)).mean() - 0.01 * torch.stack(entropies).mean()
        baseline = 0.9 * baseline + 0.1 * float(returns.mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


class MoCo(nn.Module):
    """Two encoders, of which one follows the other in the forward, and a queue in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6)) for _ in range(2))
        for q, k in zip(self.query.parameters(), self.key.parameters()):
            k.data.copy_(q.data)
            k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, 24), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        for q, k in zip(self.query.parameters(), self.key.parameters()):
            k.data = k.data * 0.9 + q.data * 0.1

    @torch.no_grad()
    def keep(self, keys: torch.Tensor) -> None:
        at = int(self.at)
        self.queue[:, at : at + len(keys)] = keys.T
        self.at[0] = (at + len(keys)) % self.queue.shape[1]

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            self.follow()
            k = F.normalize(self.key(other), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.2
        self.keep(k)
        return logits


class MoCoOutside(MoCo):
    """The loop lets the encoder follow."""

    def follow(self) -> None:
        """Nothing."""


def contrasted_outside(side: Alone) -> Seen:
    yield from contrasted(side, MoCo.follow)


def contrasted(side: Alone, follow: Callable[[Any], Any] = lambda model: None) -> Seen:
    optimizer = side.optimizer(SGD, [p for p in side.model.parameters() if p.requires_grad], lr=0.1)
    for number in range(5):
        x, _ = data(number)
        follow(side.model)
        logits = side.model(x, x + 0.1 * torch.randn_like(x))
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def remembered(side: Alone) -> Seen:
    """Elastic weight consolidation: a loss over the parameters themselves."""
    optimizer = side.optimizer(SGD, lr=0.1)
    error(side, 0).backward()
    fisher = [p.grad.detach().clone() ** 2 for p in side.model.parameters()]
    old = [p.detach().clone() for p in side.model.parameters()]
    for number in range(1, 4):
        optimizer.zero_grad()
        loss = error(side, number)
        loss = loss + sum((f * (p - o) ** 2).sum() for f, p, o in zip(fisher, side.model.parameters(), old))
        loss.backward()
        optimizer.step()
        yield loss.detach()


# -- meta learning


def maml(side: Alone) -> Seen:
    """One inner step with a graph of its own, then the outer one."""
    optimizer = side.optimizer(SGD, lr=0.1)
    for number in range(3):
        (x, y), (u, v) = data(number), data(number + 10)
        names, params = zip(*side.model.named_parameters())
        inner = F.cross_entropy(side.model(x), y)
        grads = torch.autograd.grad(inner, params, create_graph=True)
        fast = {n: p - 0.1 * g for n, p, g in zip(names, params, grads)}
        loss = F.cross_entropy(torch.func.functional_call(side.model, fast, (u,)), v)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield inner.detach(), loss.detach()


def reptile(side: Alone) -> Seen:
    for task in range(3):
        before = copy.deepcopy(side.model.state_dict())
        yield from plain_steps(side, side.optimizer(SGD, lr=0.1), 2, 2 * task)
        after = side.model.state_dict()
        step = {k: b + (after[k] - b) * 0.5 if b.is_floating_point() else b for k, b in before.items()}
        side.model.load_state_dict(step)


# -- changes of the model


def tied_later(side: Alone) -> Seen:
    side.model.body[1].one.weight = side.model.body[0].one.weight
    yield from plain_steps(side, side.optimizer(SGD, lr=0.1))


def pruned_later(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)
    yield from plain_steps(side, optimizer, 2)
    prune.l1_unstructured(side.model.body[0].one, "weight", 0.3)
    yield from plain_steps(side, side.optimizer(SGD, lr=0.1), 2, 2)


def pruned_net() -> nn.Module:
    net = Net()
    for linear in (net.stem[0], net.body[0].one, net.head):
        prune.l1_unstructured(linear, "weight", 0.3)
    return net


def masks_by_hand(side: Alone) -> Seen:
    """Lottery tickets: weights of small size become nothing after every step."""
    optimizer, masks = side.optimizer(SGD, lr=0.1, momentum=0.9), {}
    for name, p in side.model.named_parameters():
        if p.dim() > 1:
            masks[name] = (p.detach().abs() > p.detach().abs().flatten().kthvalue(p.numel() // 3).values).float()

    def mask() -> None:
        for name, p in side.model.named_parameters():
            if name in masks:
                p.data.mul_(masks[name])
                p.grad.mul_(masks[name])

    yield from plain_steps(side, optimizer, 4, after=mask)


def parametrized_later(side: Alone) -> Seen:
    parametrizations.weight_norm(side.model.head)
    yield from plain_steps(side, side.optimizer(SGD, lr=0.1))


# -- what is around


def compiled_loss(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1)

    @torch.compile(backend="aot_eager")
    def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y, label_smoothing=0.1) + 0.01 * out.square().mean()

    for number in range(3):
        x, y = data(number)
        optimizer.zero_grad()
        loss = loss_of(side.model(x), y)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def loaded_by_processes(side: Alone) -> Seen:
    """Processes that load data are forked beside the model."""
    multiprocessing.current_process().daemon = False  # daemons may not have children
    optimizer = side.optimizer(SGD, lr=0.1)
    loader = DataLoader(TensorDataset(*data(0, 32)), 8, shuffle=True, num_workers=2, timeout=60)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(side.model(x), y)
            loss.backward()
            optimizer.step()
            yield loss.detach()


def another(side: Alone, net: nn.Module, places: Any) -> Alone:
    """A second model, of the same kind of side."""
    if isinstance(side, Wrapped):
        return Wrapped(net, places)
    return Served(net) if isinstance(side, Served) else Alone(net)


def two_models(side: Alone) -> Seen:
    """A GAN of two models, each with its own workers; the critic is frozen in the generator's steps."""
    generator = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    with closing(another(side, generator, {"0": "worker2", "3": "worker1"})) as made:
        critics, makers = side.optimizer(Adam, lr=0.01), made.optimizer(Adam, lr=0.01)
        for number in range(4):
            real, _ = data(number)
            noise = torch.randn(8, 6)
            side.model.requires_grad_(True)
            fake = made.model(noise)
            critics.zero_grad()
            wrong = F.softplus(-side.model(real)).mean() + F.softplus(side.model(fake.detach())).mean()
            wrong.backward()
            critics.step()
            side.model.requires_grad_(False)
            makers.zero_grad()
            caught = F.softplus(-side.model(made.model(noise))).mean()
            caught.backward()
            makers.step()
            yield wrong.detach(), caught.detach()
        yield {**made.model.state_dict()}


def resumed(side: Alone) -> Seen:
    """A checkpoint of this model and its optimizer goes on in a new one; and in one process; and what that leaves goes on."""
    optimizer = side.optimizer(AdamW, lr=0.01)
    yield from plain_steps(side, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": side.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for kind in (lambda: another(side, Net(), {"body": "worker2", "stem.0": "worker1"}), lambda: Alone(Net())):
        with closing(kind()) as new:
            yield from _goes_on(new, file)
    with closing(another(side, Net(), {"head": "worker1"})) as new:
        yield from _goes_on(new, file)


def _goes_on(side: Alone, file: io.BytesIO) -> Iterator[Any]:
    file.seek(0)
    saved = torch.load(file)
    optimizer = side.optimizer(AdamW, lr=0.3)
    side.model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    yield from plain_steps(side, optimizer, 2, 3)
    found = optimizer.state_dict()
    yield found["state"], found["param_groups"]
    file.seek(0)
    file.truncate()
    torch.save({"model": side.model.state_dict(), "optimizer": found}, file)


def optimizer_copied(side: Alone) -> Seen:
    """With the model in one copy, as for a restart from memory."""
    optimizer = side.optimizer(Adam, lr=0.01)
    yield from plain_steps(side, optimizer, 2)
    copy.deepcopy(optimizer)
    yield from plain_steps(side, optimizer, 2, 2)


MOCO = {"make": MoCo, "run": contrasted}
ELSEWHERE = {"query": "worker1", "key": "worker2"}
CRITIC: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(10, 16), nn.LeakyReLU(), nn.Linear(16, 1))  # noqa: E731

LOOPS: dict[str, dict[str, Any]] = {
    "gradient centralization": {"run": centralized},
    "adaptive gradient clipping": {"run": clipped_by_unit},
    "PCGrad": {"run": surgery},
    "neurons reset": {"run": neurons_reset},
    "gradients set": {"run": gradients_set},
    "schedule-free SGD": {"run": schedule_free},
    "an optimizer below AdamW": {"run": derived_optimizer},
    "decay by layer": {"run": decayed_by_layer},
    "thawed": {"run": thawed},
    "thawed by group": {"run": thawed_by_group},
    "mixup": {"run": mixed_up},
    "mean teacher": {"run": taught},
    "REINFORCE": {"run": reinforced},
    "MoCo": {**MOCO, "places": {"query": "worker1"}},
    "MoCo, the loop lets it follow": {"run": contrasted_outside, "make": MoCoOutside, "places": ELSEWHERE},
    "MoCo, both elsewhere": {**MOCO, "places": ELSEWHERE},
    "elastic weight consolidation": {"run": remembered},
    "MAML": {"run": maml},
    "Reptile": {"run": reptile},
    "tied later": {"run": tied_later},
    "pruned later": {"run": pruned_later},
    "pruned before": {"run": lambda side: plain_steps(side, side.optimizer(SGD, lr=0.1)), "make": pruned_net},
    "masks by hand": {"run": masks_by_hand},
    "parametrized later": {
        "run": parametrized_later,
        "unserved": "Creating a Parameter from an instance of type ServedParameter",
    },
    "compiled loss": {"run": compiled_loss},
    "DataLoader with processes": {"run": loaded_by_processes},
    "GAN of two models": {"run": two_models, "make": CRITIC, "places": {"0": "worker1", "2": "worker2"}},
    "resumed elsewhere": {"run": resumed},
    "optimizer copied": {"run": optimizer_copied},
}
