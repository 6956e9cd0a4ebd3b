"""torch's operator database over remote tensors, in a quick form, and what the tables say of operators beside what they do.

``python -m tests.rpc.places.operators`` runs all of it.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import operators
import pytest
import tables
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rdmarpc.places import operators as told
from rdmarpc.places.geometry import geometry
from rdmarpc.places.worker import form_with_out, raw

VIEWS = (
    "t transpose permute view reshape expand narrow select unfold diagonal split chunk unbind squeeze unsqueeze real imag "
    "as_strided"
)
IN_PLACE = (
    "add mul div clamp nn_functional_relu copysign masked_fill index_add index_put scatter scatter_add fill zero_ lerp addcmul"
)
LISTS = "_foreach_add _foreach_mul _foreach_addcdiv _foreach_norm _foreach_sqrt _foreach_lerp _foreach_zero _foreach_max"
INDEXED = "index_select gather take masked_select nonzero where sort topk unique argmax cumsum searchsorted cummax"
PRODUCTS = "mm bmm matmul addmm linalg_cholesky linalg_qr linalg_solve linalg_svdvals linalg_norm einsum"
SPARSE = "to_sparse sparse_mm_reduce"
NETS = (
    "batch_norm layer_norm group_norm instance_norm cross_entropy nll_loss mse_loss ctc_loss conv1d conv2d conv_transpose2d "
    "max_pool2d avg_pool2d adaptive_avg_pool2d embedding embedding_bag interpolate_bilinear softplus gelu silu mish "
    "scaled_dot_product_attention multi_head_attention_forward linear pad_reflect unfold grid_sample"
)
OTHERS = "cat stack norm std_mean logsumexp softmax conj polar view_as_real fft_fft stft cdist histc"
QUICK = [
    *f"{VIEWS} {IN_PLACE} {LISTS} {INDEXED} {PRODUCTS} {SPARSE} {OTHERS}".split(),
    *(f"nn_functional_{name}" for name in NETS.split()),
]
DRAWS = [
    *["cauchy", "exponential", "geometric", "log_normal", "normal_in_place", "uniform", "bernoulli", "multinomial"],
    *["normal", "normal_number_mean"],
    *["randn", "randn_like", "rand_like", "randint", "randint_like", "svd_lowrank", "pca_lowrank"],
    *["nn_functional_fractional_max_pool2d", "nn_functional_fractional_max_pool3d", "nn_functional_rrelu"],
    *["nn_functional_scaled_dot_product_attention", "nn_functional_dropout", "nn_functional_dropout2d"],
    *["nn_functional_dropout3d", "nn_functional_alpha_dropout", "nn_functional_feature_alpha_dropout_with_train"],
]
"""All operators of the database that draw random numbers."""


def named(names: list[str]) -> list[str]:
    """Those of the database, of which some have variants: ``where`` and all that begin so."""
    every = operators.operators()
    return [each for name in names for each in every if each == name or (each.startswith(f"{name}_") and name not in every)]


def test_operators_are_those_of_one_process() -> None:
    names = named(QUICK)
    assert len(names) > 80
    rows = operators.run(operators.jobs_of(names, [torch.float32], ["remote", "mixed"]), 1)
    wrong = [row for row in rows if row.verdict != "equal"]
    assert not wrong, "\n".join(map(str, wrong))


def test_random_operators_draw_as_one_process() -> None:
    """Their bits, and the random state afterwards (``operators.outcome``)."""
    jobs = [(name, torch.float32, mode) for name in DRAWS for mode in ("remote", "mixed")]
    wrong = [row for row in operators.run(jobs, 2) if row.verdict != "equal"]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_state_that_is_compared() -> None:
    """An operator of the database that draws changes the random state: the database hides that by itself."""
    op = operators.operators()["nn_functional_dropout"]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    op.op(torch.ones(9), p=0.5)
    assert not torch.equal(before, torch.get_rng_state())


def test_tables_say_what_operators_do() -> None:
    names = [*named(QUICK), *DRAWS, "native_batch_norm", "_native_batch_norm_legit"]
    seen = tables.watch(names, [torch.float32], 1)
    assert not seen.found and seen.calls > 2000, list(seen.found)


def test_what_no_table_says_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "_HIDDEN_WRITES", {})
    monkeypatch.setattr(told, "_VALUE_SIZED", ())
    monkeypatch.setattr(told, "known_operators", {})
    found = tables.watch(["native_batch_norm", "nn_functional_batch_norm"], [torch.float32], 4).found
    assert any("native_batch_norm writes its operand" in text for text in found), list(found)


class _WrittenElsewhere(TorchDispatchMode):
    """Runs the form with ``out=`` of each operator that has one, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.compared: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        found = form_with_out(func) if type(made) is torch.Tensor and made.layout is torch.strided else None
        tags = torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape
        if found is None or made.is_conj() or made.is_neg() or 0 in made.stride() or any(tag in func.tags for tag in tags):
            return made
        shape = geometry(made)
        memory = torch.empty(shape.span, dtype=made.dtype).as_strided(shape.shape, shape.strides)
        written, out = found
        written(*args, **(kwargs or {}), **{out: memory})
        self.compared.add(func.name())
        if geometry(memory) != shape or raw(memory) != raw(made):
            self.wrong.append(f"{func.name()}: {shape}")
        return made


def test_forms_with_out_give_the_same_bits() -> None:
    """What crosses over an adapter is made by these."""
    mode, database = _WrittenElsewhere(), operators.operators()
    for name in named(QUICK):
        op = database[name]
        if name in DRAWS or name.startswith("_foreach") or torch.float32 not in op.dtypes:
            continue
        for sample in operators.samples(op, torch.float32, True, 1):
            with contextlib.suppress(Exception), mode, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = op(sample.input, *sample.args, **sample.kwargs)
                made = made[0] if isinstance(made, tuple | list) else made
                if made.requires_grad:
                    made.backward(torch.ones_like(made))
    assert not mode.wrong and len(mode.compared) > 60, (mode.wrong, len(mode.compared))
