"""States of optimizers, loaded as they are and changed: each beside torch in one process, with what torch raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .loop_nets import SGD, Adam, AdamW, Seen, plain_steps
from .sides import Alone

State = dict[str, Any]


def _groups(side: Alone) -> list[dict[str, Any]]:
    parameters = list(side.model.parameters())
    return [{"params": parameters[:5], "lr": 0.02}, {"params": parameters[5:10], "lr": 0.01}, {"params": parameters[10:]}]


def loading(change: Callable[[State], Any], kind: Any = Adam, to: Any = None) -> Callable[[Alone], Seen]:
    """Steps, a copy of the state, a step, the copy changed and loaded into an optimizer of the class ``to``, steps."""

    def run(side: Alone) -> Seen:
        settings = {"lr": 0.01, **({"momentum": 0.9} if kind is SGD else {})}
        optimizer = side.optimizer(kind, _groups(side), **settings)
        yield from plain_steps(side, optimizer, 2)
        state = copy.deepcopy(optimizer.state_dict())
        yield from plain_steps(side, optimizer, 1, 2)
        if to is not None:
            optimizer = side.optimizer(to, _groups(side), lr=0.03)
        state = change(state) or state
        try:
            optimizer.load_state_dict(state)
        except (ValueError, KeyError, TypeError) as error:
            yield type(error).__name__, str(error)
        try:
            losses = list(plain_steps(side, optimizer, 2, 3))
        except (KeyError, RuntimeError) as error:
            side.close()
            side.model = _Ended()
            yield type(error).__name__
            return
        yield losses
        yield _copied(optimizer.state_dict())

    return run


def _copied(state: State) -> Any:
    """Its tensors are, in one process, those that the next step changes."""
    entries = sorted(state["state"].items(), key=lambda item: str(item[0]))
    return copy.deepcopy((dict(entries), state["param_groups"]))


class _Ended(nn.Module):
    """In the place of a model whose step has failed."""

    def close(self) -> None:
        """It was."""


def rates_turned(state: State) -> None:
    rates = [group["lr"] for group in state["param_groups"]]
    for group, rate in zip(state["param_groups"], rates[::-1]):
        group["lr"] = rate


def members_turned(state: State) -> None:
    """Entries go to other parameters of the same shapes: the biases of one block."""
    state["state"][5], state["state"][7] = state["state"][7], state["state"][5]


def renumbered(state: State) -> State:
    groups = [{**group, "params": [200 - at for at in group["params"]]} for group in state["param_groups"]]
    return {"state": {200 - at: entries for at, entries in state["state"].items()}, "param_groups": groups}


def group_missing(state: State) -> None:
    state["param_groups"].pop()


def group_too_much(state: State) -> None:
    state["param_groups"].append({**state["param_groups"][0], "params": [99]})


def other_sizes(state: State) -> None:
    state["param_groups"][0]["params"].append(state["param_groups"][1]["params"].pop(0))


def key_missing(state: State) -> None:
    del state["param_groups"][0]["lr"]


def key_added(state: State) -> None:
    for number, group in enumerate(state["param_groups"]):
        group["note"], group["number"], group["list"] = "a text", number, [1, 2]


def no_groups(state: State) -> None:
    del state["param_groups"]


def no_state(state: State) -> None:
    del state["state"]


def empty(state: State) -> None:
    state["state"] = {}


def partial(state: State) -> None:
    state["state"] = {at: entries for at, entries in state["state"].items() if at % 3}


def empty_entries(state: State) -> None:
    for at in (1, 4, 7, 11):
        state["state"][at] = {}


def entry_missing(state: State) -> None:
    for entries in state["state"].values():
        del entries["exp_avg_sq"]


def unknown_indices(state: State) -> None:
    state["state"][77] = {"step": torch.tensor(3.0)}
    state["state"]["note"] = "of the user"


def nested(state: State) -> None:
    """Tensors in dictionaries, lists and tuples of an entry get the parameter's dtype, as those beside them."""
    for at, entries in state["state"].items():
        wide = torch.full((2,), 1 / 3 + at, dtype=torch.float64)
        entries["more"] = {"deep": {"tensor": wide, "step": wide.clone()}, "list": [wide.clone(), 3]}
        entries["pair"] = (wide.clone(), wide.half(), torch.arange(3), True, None)


def other_dtypes(state: State) -> None:
    for at, entries in state["state"].items():
        entries["exp_avg"] = entries["exp_avg"].to(torch.float64 if at % 2 else torch.bfloat16)
        entries["exp_avg_sq"] = entries["exp_avg_sq"].double()
        entries["step"] = entries["step"].double()


def numbers_for_tensors(state: State) -> None:
    """As old checkpoints have them."""
    for entries in state["state"].values():
        entries["step"] = float(entries["step"])


def views(state: State) -> None:
    """Strided tensors, of which several are parts of one."""
    for entries in state["state"].values():
        if entries["exp_avg"].dim() == 2:
            entries["exp_avg"] = entries["exp_avg"].T.contiguous().T
        whole = torch.stack([entries["exp_avg_sq"]] * 2)
        entries["exp_avg_sq"] = whole[1]


def same(state: State) -> None:
    """Nothing is changed."""


def group_added(side: Alone) -> Seen:
    """A group comes after a state was loaded, and the new state is loaded into an optimizer that has all groups."""
    *some, last = _groups(side)
    optimizer = side.optimizer(AdamW, some, lr=0.01)
    yield from plain_steps(side, optimizer, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.add_param_group({**last, "lr": 0.05, "weight_decay": 0.5})
    yield from plain_steps(side, optimizer, 2, 2)
    state = optimizer.state_dict()
    yield _copied(state)
    other = side.optimizer(AdamW, _groups(side), lr=0.3)
    other.load_state_dict(copy.deepcopy(state))
    yield from plain_steps(side, other, 2, 4)
    state["param_groups"].pop()
    try:
        other.load_state_dict(state)
    except ValueError as error:
        yield str(error)
    yield from plain_steps(side, other, 1, 6)


def before_a_step(side: Alone) -> Seen:
    """Optimizers load what others had, before they have made a step."""
    first = side.optimizer(AdamW, lr=0.01)
    yield from plain_steps(side, first, 2)
    state = copy.deepcopy(first.state_dict())
    second = side.optimizer(AdamW, lr=0.3)
    second.load_state_dict(state)
    yield _copied(second.state_dict())
    yield from plain_steps(side, second, 2, 2)
    third = side.optimizer(AdamW, lr=0.3)
    yield third.state_dict()
    third.load_state_dict(copy.deepcopy(third.state_dict()))
    yield from plain_steps(side, third, 2, 4)


def with_hooks(side: Alone) -> Seen:
    """The user's hooks see states, and change them."""
    optimizer = side.optimizer(Adam, lr=0.01)
    seen: list[Any] = []

    def halved(_: Any, state: State) -> State:
        found = {at: {**entries, "exp_avg": entries["exp_avg"] / 2} for at, entries in state["state"].items()}
        return {**state, "state": found}

    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(len(state["state"])))
    optimizer.register_load_state_dict_pre_hook(halved)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    yield from plain_steps(side, optimizer, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    yield from plain_steps(side, optimizer, 2, 2)
    yield seen
    optimizer.register_state_dict_post_hook(halved)
    yield copy.deepcopy(optimizer.state_dict()["state"])


def hooks_first(side: Alone) -> Seen:
    """Hooks that are set before the first step come first, and see what was saved."""
    state = None
    for _ in range(2):
        optimizer = side.optimizer(Adam, lr=0.01)
        seen: list[Any] = []
        optimizer.register_state_dict_post_hook(lambda _, state: seen.append(sorted(state["state"])))  # noqa: B023
        optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(sorted(state["state"])))  # noqa: B023
        if state is not None:
            optimizer.load_state_dict(state)
        yield from plain_steps(side, optimizer, 2)
        state = copy.deepcopy(optimizer.state_dict())
        yield seen


def entries_reset(side: Alone) -> Seen:
    """Momentum of single parameters is dropped by hand."""
    optimizer = side.optimizer(SGD, lr=0.1, momentum=0.9)
    yield from plain_steps(side, optimizer, 2)
    for p in side.model.body.parameters():
        optimizer.state[p] = {}
    yield from plain_steps(side, optimizer, 2, 2)


def entries_changed(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1, momentum=0.9)
    yield from plain_steps(side, optimizer, 2)
    for p in side.model.parameters():
        optimizer.state[p]["momentum_buffer"].mul_(0.5)
    yield from plain_steps(side, optimizer, 2, 2)


def entries_deleted(side: Alone) -> Seen:
    optimizer = side.optimizer(SGD, lr=0.1, momentum=0.9)
    yield from plain_steps(side, optimizer, 2)
    for p in side.model.parameters():
        optimizer.state.pop(p, None)
    yield from plain_steps(side, optimizer, 2, 2)


CHANGES: dict[str, Callable[[State], Any]] = {
    "as it is": same,
    "rates in turn": rates_turned,
    "entries in turn": members_turned,
    "other numbers": renumbered,
    "a group missing": group_missing,
    "a group too much": group_too_much,
    "groups of other sizes": other_sizes,
    "a key missing": key_missing,
    "keys added": key_added,
    "no groups": no_groups,
    "no state": no_state,
    "empty": empty,
    "some parameters": partial,
    "empty entries": empty_entries,
    "an entry missing": entry_missing,
    "unknown indices": unknown_indices,
    "nested": nested,
    "other dtypes": other_dtypes,
    "numbers for tensors": numbers_for_tensors,
    "views": views,
}

SAID = "state of a parameter lies at the worker that updates it"

LOOPS: dict[str, dict[str, Any]] = {
    **{f"state, {name}": {"run": loading(change)} for name, change in CHANGES.items()},
    "state of AdamW to Adam": {"run": loading(same, AdamW, Adam)},
    "state of SGD to Adam": {"run": loading(same, SGD, Adam)},
    "state of Adam to Adamax": {"run": loading(same, Adam, torch.optim.Adamax)},
    "state of Adam to SGD": {"run": loading(same, Adam, SGD)},
    "state of Adam to RMSprop": {"run": loading(same, Adam, torch.optim.RMSprop)},
    "state, group added": {"run": group_added},
    "state, before a step": {"run": before_a_step},
    "state, hooks": {"run": with_hooks},
    "state, hooks first": {"run": hooks_first},
    "state, entries reset": {"run": entries_reset},
    "state, entries changed": {"run": entries_changed, "unserved": SAID},
    "state, entries deleted": {"run": entries_deleted},
}
