"""transformers' ``model.generate`` through a wrapped model: the tokens of one process, with caches that cross to parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from group import results, run_group

import rdmarpc as rpc

from . import families

TOKENS = torch.tensor([[5, 9, 12, 7], [8, 3, 4, 30]])
CASES: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("GPT-2", {"transformer.h.1": "worker1"}, {"do_sample": True}),
    ("GPT-2, transformer as one part", {"transformer": "worker1"}, {"do_sample": False}),
    ("T5", {"encoder": "worker1", "decoder": "worker1"}, {"num_beams": 2, "do_sample": False}),
]


def generated(model: Any, more: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(7)
    with torch.no_grad():
        return model.eval().generate(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=3, **more)


def generate(rank: int) -> None:
    if rank == 0:
        shown = families.entries("transformers")
        for name, placement, more in CASES:
            torch.manual_seed(1)
            net = shown[name].make()
            twin = copy.deepcopy(net)
            model = rpc.wrap(net, placement)
            assert isinstance(model, type(twin)) and type(model.config) is type(twin.config), name
            wanted = generated(twin, more)
            assert torch.equal(generated(model, more).cpu(), wanted), name
            model.close()
    rpc.shutdown()


def test_tokens_are_those_of_one_process():
    pytest.importorskip("transformers")
    results(run_group(generate, 2, timeout=200))
