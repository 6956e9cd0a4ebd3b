"""Classes of modules, made and called by the names of their arguments alone."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .entry import Batch
from .tried import LARGE, Proposal, Tried, numel

_VALUES: dict[Any, str] = {
    64: "num_tokens vocab_size seq_length n_fft",
    32: "image_size img_size resolution sample_size sample_height sample_width input_shape_hw time_embed_dim",
    16: "mlp_dim intermediate_size ffn_dim ff_dim d_ffn hidden_dim_ff max_seq_len seq_len dim_feedforward"
    " num_nodes context_length",
    8: "dim channels in_channels out_channels hidden_channels hidden_size hidden_dim embed_dim embedding_dim"
    " d_model in_features out_features input_size output_size input_dim output_dim dim_in dim_out in_dim"
    " out_dim features query_dim width model_dim num_features temb_channels num_channels inner_dim planes"
    " inplanes in_planes prev_output_channel cross_attention_dim latent_channels zq_channels d_hidden"
    " block_channels attention_dim emb_dim context_dim time_dim channel num_filters in_size out_size n_neurons"
    " model_channels int_emb_size basis_emb_size out_emb_channels hidden_node_channels hidden_edge_channels"
    " raw_msg_dim memory_dim in_channel out_channel num_radial num_input_features num_output_features in_chns"
    " out_chns chin chout nf units joint_attention_dim caption_channels pooled_projection_dim text_embed_dim"
    " axes_dims_rope n_mels label_nc encoder_hid_dim text_dim freq_dim",
    4: "patch_size dim_head head_dim attention_head_dim edge_dim num_types bn_size prediction_length frames"
    " growth_rate k num_rbf groups norm_num_groups hidden_head num_classes window_size dim_latent cond_dim"
    " image_patch_size",
    3: "num_relations kernel_size num_spherical spatial_size",
    2: "heads num_heads n_heads nhead num_attention_heads depth layers num_layers n_layers spatial_dims ndim K"
    " num_blocks stride num_bilinear walk_length num_res_blocks layers_per_block num_single_layers"
    " num_key_value_heads enc_depth dec_depth frame_patch_size expansion num_residual_streams"
    " num_refiner_layers num_before_skip",
    1: "padding num_after_skip kv_heads dilation",
    0.1: "dropout dropout_prob dropout_rate alpha theta p drop negative_slope",
    1e-05: "eps norm_eps",
    5.0: "cutoff",
    (8, 16): "block_out_channels",
    (4, 4): "n_modes",
}
NUMBERS = {name: value for value, names in _VALUES.items() for name in names.split()}
"""Arguments of constructors by name."""
MADE: dict[str, Callable[[], Any]] = {
    "nn": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
    "fn": lambda: nn.Linear(8, 8),
    "net": lambda: nn.Linear(8, 8),
    "act": nn.ReLU,
    "activation": nn.ReLU,
    "deg": lambda: torch.tensor([1, 4, 4, 2]),
    "img_size": lambda: (32, 32),
    "strides": lambda: (2, 2),
    "irreps": lambda: "4x0e + 2x1o",
    "irreps_in": lambda: "4x0e + 2x1o",
    "irreps_in1": lambda: "4x0e + 2x1o",
    "irreps_in2": lambda: "0e + 1o",
    "irreps_out": lambda: "4x0e + 2x1o",
    "input_shape": lambda: (2, 8, 8),
    "loss": nn.MSELoss,
}
LISTS: dict[str, Any] = {
    "channels": (8, 16, 16),
    "layers": (1, 1, 1, 1),
    "depth": (1, 1),
    "num_heads": (2, 2),
    "in_shape": (8, 32, 32),
}
"""Instead, where a single number does not do."""

_GRAPH: dict[str, Callable[[], Any]] = {
    "edge_index": lambda: torch.randint(0, 12, (2, 40)),
    "adj": lambda: (torch.rand(2, 8, 8) > 0.5).float(),
    "edge_type": lambda: torch.randint(0, 3, (40,)),
    "edge_weight": lambda: torch.rand(40),
    "edge_attr": lambda: torch.randn(40, 4),
    "batch": lambda: torch.tensor([0] * 5 + [1] * 7),
    "index": lambda: torch.tensor([0] * 5 + [1] * 7),
    "pos": lambda: torch.randn(12, 3),
    "type_vec": lambda: torch.randint(0, 4, (12,)),
    "z": lambda: torch.randint(1, 9, (12,)),
    "dim_size": lambda: 2,
    "head_index": lambda: torch.randint(0, 8, (5,)),
    "rel_type": lambda: torch.randint(0, 3, (5,)),
    "tail_index": lambda: torch.randint(0, 8, (5,)),
}
_OTHERS: dict[str, Callable[[], Any]] = {
    "timestep": lambda: torch.tensor([3, 7]),
    "timesteps": lambda: torch.tensor([3, 7]),
    "time": lambda: torch.tensor([3.0, 7.0]),
    "temb": lambda: torch.randn(2, 8),
    "time_embed": lambda: torch.randn(2, 8),
    "encoder_hidden_states": lambda: torch.randn(2, 5, 8),
    "context": lambda: torch.randn(2, 5, 8),
    "pooled_projections": lambda: torch.randn(2, 8),
    "input_ids": lambda: torch.randint(0, 60, (2, 8)),
    "tokens": lambda: torch.randint(0, 60, (2, 8)),
    "lengths": lambda: torch.tensor([8, 8]),
    "img": lambda: torch.rand(2, 3, 32, 32),
    "images": lambda: torch.rand(2, 3, 32, 32),
    "image": lambda: torch.rand(2, 3, 32, 32),
    "video": lambda: torch.rand(2, 3, 4, 32, 32),
    "pixel_values": lambda: torch.rand(2, 3, 32, 32),
    "mask": lambda: torch.ones(2, 8, dtype=torch.bool),
    "attention_mask": lambda: torch.ones(2, 8, dtype=torch.bool),
}
SLOW = {"SphericalBasisLayer"}
"""What takes minutes to make, in one process too."""
SHAPES = [
    shape
    for width in (8, 3)
    for shape in (
        (12, width),
        (2, 8, width),
        (2, width, 8, 8),
        (2, width, 32, 32),
        (2, width, 8),
        (2, width, 8, 8, 8),
        (2, 4, 8, width),
        (2, 8, 8, width),
    )
] + [(2, 16), (2, 1, 32, 32), (2, 4, 16, 16), (2, 1, 64), (2, 2000), (2, 1, 4000)]
SHAPES += [("ids", 2, 8), ("ids", 12)]


def _value(shape: Any) -> torch.Tensor:
    return torch.randint(0, 8, shape[1:]) if shape[0] == "ids" else torch.rand(shape)


def _required(function: Any) -> list[inspect.Parameter]:
    own = list(inspect.signature(function).parameters.values())
    return [p for p in own if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def _constructor(kind: type[nn.Module], shrunk: bool, lists: bool, numbers: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments, or ``None`` where one of them has no value."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        default = parameter.default
        if default is not parameter.empty and not (shrunk and name in numbers and type(default) is type(numbers[name])):
            continue
        if lists and name in LISTS:
            found[name] = LISTS[name]
        elif name in numbers:
            found[name] = numbers[name]
        elif name in MADE:
            found[name] = MADE[name]
        elif "bool" in str(parameter.annotation):
            found[name] = False
        elif "int" in str(parameter.annotation):
            found[name] = 8
        elif "float" in str(parameter.annotation):
            found[name] = 0.5
        else:
            return None
    return found


def _batches(kind: type[nn.Module], graphs: bool) -> Iterator[Callable[[int], Batch]]:
    known = _OTHERS | (_GRAPH if graphs else {})
    names = [parameter.name for parameter in _required(kind.forward)[1:]]
    given = {name: known[name] for name in names if name in known}
    free = [name for name in names if name not in known]
    for shapes in itertools.chain(
        ((shape,) * len(free) for shape in SHAPES), () if len(free) != 2 else itertools.product(SHAPES[:5], SHAPES[:5])
    ):
        values = given | {name: partial(_value, shape) for name, shape in zip(free, shapes)}
        yield lambda n, values=values: ((), {name: make() for name, make in values.items()})
        if not free:
            break


def proposals(kind: type[nn.Module], shrink_first: bool, graphs: bool, numbers: dict[str, Any]) -> Iterator[Proposal]:
    seen: list[Any] = []
    for lists, shrunk in itertools.product((False, True), (shrink_first, not shrink_first)):
        arguments = _constructor(kind, shrunk, lists, numbers)
        if arguments is None or arguments in seen:
            continue
        seen.append(arguments)

        def make(arguments: dict[str, Any] = arguments) -> nn.Module:
            return kind(**{name: value() if callable(value) else value for name, value in arguments.items()})

        try:
            if numel(make) <= LARGE:
                make()
        except Exception:
            continue
        for batch in _batches(kind, graphs):
            yield make, batch


def classes(*roots: str) -> Iterator[type[nn.Module]]:
    """All modules that packages define."""
    found = {}
    for root in roots:
        package = importlib.import_module(root)
        inner = pkgutil.walk_packages(getattr(package, "__path__", []), f"{root}.", onerror=lambda name: None)
        for name in (root, *(module.name for module in inner if "test" not in module.name)):
            try:
                own = vars(importlib.import_module(name))
            except Exception:  # it needs something that is not there
                continue
            for kind in own.values():
                if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__.startswith(root):
                    found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return (kind for _, kind in sorted(found.items()))


def library(*roots: str, shrink_first: bool = False, graphs: bool = False, **numbers: Any) -> Iterator[tuple[str, Tried]]:
    for kind in classes(*roots):
        if inspect.isabstract(kind) or kind.__name__.startswith("_") or kind.__name__ in SLOW:
            continue
        path = kind.__module__.removeprefix(f"{roots[0]}.")
        yield f"{path}.{kind.__qualname__}", Tried(partial(proposals, kind, shrink_first, graphs, NUMBERS | numbers))
