"""Training loops: what people do between a forward and the next step, each beside the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rdmarpc.transport import NotSupported

from . import around_loops, rare_loops, state_loops
from . import loop_states as states
from . import loop_steps as steps
from .compare import BROKEN, CRASH, EQUAL, REFUSED, WRONG, Row, said
from .loop_nets import Gan, Net, Seen, plain_steps
from .sides import Alone, Served, Wrapped, closing, difference

PLACES = {"body.0": "worker1", "head": "worker2"}


# -- the harness


@dataclass(frozen=True)
class Loop:
    """``refused``, ``unserved``: part of the text by which ``wrap`` or ``serve`` refuses it, if it does."""

    run: Callable[[Alone], Seen]
    make: Callable[[], nn.Module] = Net
    places: Any = None
    refused: str = ""
    unserved: str = ""

    def rows(self, family: str, name: str) -> list[Row]:
        try:
            alone = self._seen(Alone(self._net()))
        except Exception as error:
            return [Row(family, name, "", BROKEN, said(error), expected=False)]
        places = PLACES if self.places is None else self.places
        return [
            self._row(Row(family, name, "wrap", EQUAL), lambda: Wrapped(self._net(), places), alone, self.refused),
            self._row(Row(family, name, "serve", EQUAL), lambda: Served(self._net()), alone, self.unserved),
        ]

    def _net(self) -> nn.Module:
        torch.manual_seed(1)
        return self.make()

    def _seen(self, side: Alone) -> list[Any]:
        torch.manual_seed(2)
        return [*self.run(side), {**side.model.state_dict()}]

    def _row(self, row: Row, make: Callable[[], Alone], alone: list[Any], wanted: str) -> Row:
        try:
            with closing(make()) as side:
                row.detail = difference(self._seen(side), alone, "seen")
            row.outcome = WRONG if row.detail else EQUAL
        except Exception as error:
            named = isinstance(error, NotSupported) or (wanted and wanted in str(error))
            row.outcome, row.detail = REFUSED if named else CRASH, said(error)
        row.expected = row.outcome == (REFUSED if wanted else EQUAL) and wanted in row.detail
        return row


def _optimizer_loop(kind: Any, settings: dict[str, Any]) -> Callable[[Alone], Seen]:
    return lambda side: plain_steps(side, side.optimizer(kind, **settings), 4)


def _schedule_loop(make: Callable[[Any], Any]) -> Callable[[Alone], Seen]:
    return lambda side: steps._scheduled(side, make)


GAN: dict[str, Any] = {"make": Gan, "places": {"critic": "worker1", "generator.2": "worker2"}}

ENTRIES: dict[str, Loop] = {
    "gradient accumulation": Loop(steps.accumulation),
    "clip_grad_norm_": Loop(steps.clip_norm),
    "clip_grad_norm_, inf": Loop(steps.clip_norm_inf),
    "clip_grad_value_": Loop(steps.clip_value),
    "clipping by hand": Loop(steps.clip_by_hand),
    "zero_grad(set_to_none=False)": Loop(steps.zeros_kept),
    "retain_graph": Loop(steps.retained),
    "several losses": Loop(steps.several_losses),
    "two forwards, one backward": Loop(steps.two_forwards),
    "gradient penalty": Loop(steps.gradient_penalty),
    "adversarial inputs": Loop(steps.adversarial),
    "autograd.grad of parameters": Loop(steps.gradients_by_name),
    "norms logged": Loop(steps.norms_logged),
    "noise on gradients": Loop(steps.noise_on_gradients),
    "detect_anomaly": Loop(steps.anomaly),
    **{name: Loop(_schedule_loop(make)) for name, make in steps.SCHEDULES.items()},
    "ReduceLROnPlateau": Loop(steps.plateau),
    "learning rates by layer": Loop(steps.layers_rates),
    "two optimizers": Loop(steps.two_optimizers),
    "add_param_group": Loop(steps.group_added),
    "step(closure)": Loop(steps.closure),
    "LBFGS": Loop(steps.lbfgs, unserved="LBFGS"),
    "learning rate in a tensor": Loop(steps.tensor_rate),
    **{name: Loop(_optimizer_loop(*made)) for name, made in steps.OPTIMIZERS.items()},
    "an optimizer with a global norm": Loop(steps.global_norm, unserved="may combine parameters in one step"),
    "SAM": Loop(steps.sam),
    "steps by hand": Loop(steps.by_hand),
    "weights clamped by .data": Loop(steps.weights_clamped),
    "weights clamped in place": Loop(steps.weights_clamped_in_place),
    "weight decay by .data =": Loop(steps.decay_by_hand),
    "learned loss weights": Loop(steps.outer_weights),
    "EMA by AveragedModel": Loop(states.ema),
    "EMA by hand": Loop(states.ema_by_hand),
    "SWA with update_bn": Loop(states.swa),
    "target network": Loop(states.target_network),
    "deepcopy": Loop(states.deep_copied),
    "states there and back": Loop(states.states_there_and_back),
    "early stopping": Loop(states.early_stopping),
    "initialised anew": Loop(states.initialised_anew),
    "frozen and back": Loop(states.frozen_and_back),
    "train and eval in turns": Loop(states.switched),
    "no_grad and inference_mode": Loop(states.evaluations),
    "batches of several sizes": Loop(states.sizes),
    "an attribute changed": Loop(states.attribute_changed),
    "head replaced": Loop(
        states.head_replaced,
        unserved="can only have parameters of that model",
    ),
    "hooks of modules": Loop(states.hooks),
    "hooks of parameters": Loop(states.hooks_of_parameters),
    "hooks of results": Loop(states.hooks_of_gradients),
    "autocast": Loop(states.autocast),
    "GradScaler": Loop(states.scaler),
    "checkpoint around the model": Loop(states.checkpointed),
    "checkpoint in a part": Loop(states.plain, make=lambda: Net(again=True)),
    "torch.compile": Loop(states.compiled),
    "a part compiled": Loop(states.plain, make=lambda: _compiled_part()),
    "no-op .to()": Loop(states.moved),
    "DataLoader": Loop(states.loader),
    "seeded anew in every step": Loop(states.seeded),
    "micro-batches": Loop(states.micro_batches),
    "GAN": Loop(states.gan, **GAN),
    "GAN, called by parts": Loop(states.gan_by_parts, **GAN),
    "distillation": Loop(states.distilled),
    **{name: Loop(**loop) for name, loop in {**rare_loops.LOOPS, **state_loops.LOOPS, **around_loops.LOOPS}.items()},
}


def _compiled_part() -> nn.Module:
    net = Net()
    net.body[0].compile(backend="eager")
    return net
