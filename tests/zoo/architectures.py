"""Every architecture of transformers that some rule makes small, by what it is for: nobody has chosen them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import nn
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .compare import Row, built, rows_of
from .entry import Batch, Entry, total
from .tried import LARGE

_SIZES = {
    64: "vocab_size max_position_embeddings n_positions n_ctx max_source_positions max_target_positions",
    48: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner hidden_dim",
    32: "hidden_size d_model n_embd embed_dim dim embedding_size word_embed_proj_dim true_hidden_size lru_width image_size"
    " mamba_head_dim pooler_output_dim",
    24: "moe_intermediate_size shared_expert_intermediate_size",
    16: "d_kv v_head_dim bottleneck_size intra_bottleneck_size",
    8: "kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim patch_size state_size mamba_d_state num_mel_bins"
    " sliding_window attention_window_size rotary_dim",
    4: "num_experts num_local_experts n_routed_experts attention_window block_size time_step_rank",
    3: "num_hidden_layers num_layers n_layer n_layers num_blocks num_channels",
    2: "encoder_layers decoder_layers num_decoder_layers num_encoder_layers num_attention_heads n_head n_heads num_heads"
    " eos_token_id encoder_attention_heads decoder_attention_heads attention_heads num_key_value_heads num_experts_per_tok"
    " mamba_n_heads",
    1: "bos_token_id decoder_start_token_id n_group topk_group n_shared_experts first_k_dense_replace n_groups",
    0: "pad_token_id",
}
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
HEADS: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": 16},
    {"head_dim": 8},
    {"head_dim": 8, "num_heads": 8},
    {"use_cache": False},
)
"""Tried one after the other: how wide a head is depends on other sizes in ways of each architecture's own."""
OPTIONAL = {"sliding_window", "q_lora_rank", "attention_window_size"}
"""What stays ``None`` where it is that."""
NEVER_SMALL = {"perceiver", "luke", "blt", "rwkv"}
"""What is large whatever the configuration says, or does not run then."""


def shrink(config: Any, heads: dict[str, Any]) -> Any:
    for name, size in (SMALL | heads).items():
        old = getattr(config, name, size)
        if isinstance(old, int) or (old is None and name not in OPTIONAL):
            with suppress(AttributeError, NotImplementedError, ValueError):  # read-only, or another name for others
                setattr(config, name, size)
    kinds = getattr(config, "layer_types", None)
    if kinds:  # one of each
        with suppress(AttributeError):
            config.layer_types = list(dict.fromkeys(kinds))[-3:]
            config.num_hidden_layers = len(config.layer_types)
    for part in vars(config).values():
        if isinstance(part, hf.PretrainedConfig):
            shrink(part, heads)
    return config


def _ids(**more: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[int], Batch]:
    def batch(n: int) -> Batch:
        ids = torch.randint(3, 60, (2, 8))
        ids[:, -1] = SMALL["eos_token_id"]
        return (), {"input_ids": ids, **{name: made(ids) for name, made in more.items()}}

    return batch


def _classes(ids: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 2, (2,))


def _signal(name: str, *shape: int) -> Callable[[int], Batch]:
    def batch(n: int) -> Batch:
        np.random.seed(n)  # models of sound draw from it what they mask
        return (), {name: torch.randn(2, *shape)}

    return batch


def _mask(ids: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[1] * 8, [1] * 5 + [0] * 3])


KINDS: dict[str, tuple[Any, Callable[[int], Batch]]] = {
    "causal": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, _ids(labels=torch.clone)),
    "masked": (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, _ids(labels=torch.clone)),
    "classes": (auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, _ids(attention_mask=_mask, labels=_classes)),
    "pairs": (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, _ids(labels=torch.clone)),
    "images": (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, _signal("pixel_values", 3, 32, 32)),
    "sound": (auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES, _signal("input_values", 8000)),
}
"""For each use its models, by their configurations' names, and what they read."""


@dataclass(frozen=True)
class Architecture:
    """Of one use. It has no rows where no rule makes it small."""

    kind: str
    config: str
    model: str

    def rows(self, family: str, name: str) -> list[Row]:
        entry = self.entry()
        return [] if entry is None else rows_of(family, name, entry)

    def entry(self) -> Entry | None:
        batch = KINDS[self.kind][1]
        for heads in HEADS:
            entry = Entry(lambda heads=heads: self._make(heads), batch)  # type: ignore[misc]
            try:
                net = built(entry)
                if sum(parameter.numel() for parameter in net.parameters()) > LARGE:
                    return None
                args, kwargs = batch(0)
                total(net(*args, **kwargs)).backward()
            except Exception:  # transformers', which has many for sizes that do not fit
                continue
            return entry
        return None

    def _make(self, heads: dict[str, Any]) -> nn.Module:
        return getattr(hf, self.model)(shrink(CONFIG_MAPPING[self.config](), heads))  # type: ignore[no-any-return]


def _all() -> Iterator[tuple[str, Architecture]]:
    for kind, (models, _) in KINDS.items():
        for config, model in models.items():
            if config in NEVER_SMALL:
                continue
            yield f"{config}, {kind}", Architecture(kind, config, model if isinstance(model, str) else model[0])


ENTRIES = dict(_all())
