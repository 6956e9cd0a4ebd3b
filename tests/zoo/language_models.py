"""transformers' models from small random configurations, with their defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from .entry import Batch, Entry

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _model(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, kind)(getattr(hf, config)(**settings))


def words(length: int = 8, labels: bool = True, **more: Any) -> Callable[[int], Batch]:
    def batch(n: int) -> Batch:
        ids = torch.randint(3, 60, (2, length))
        return (), {"input_ids": ids, **({"labels": ids.clone()} if labels else {}), **more}

    return batch


def _classes(n: int) -> Batch:
    return (), {"input_ids": torch.randint(3, 60, (2, 8)), "attention_mask": _mask(), "labels": torch.randint(0, 2, (2,))}


def _mask() -> torch.Tensor:
    return torch.tensor([[1] * 8, [1] * 5 + [0] * 3])


def _pairs(n: int) -> Batch:
    return (), {"input_ids": torch.randint(3, 60, (2, 7)), "labels": torch.randint(3, 60, (2, 6))}


def _pixels(n: int) -> Batch:
    return (), {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 2, (2,))}


def _clip(n: int) -> Batch:
    return (), {"input_ids": torch.randint(3, 60, (2, 8)), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}


def _speech(n: int) -> Batch:
    return (), {"input_features": torch.randn(2, 8, 40), "labels": torch.randint(3, 60, (2, 5))}


def _causal(name: str, **more: Any) -> Callable[[], nn.Module]:
    return _model(f"{name}ForCausalLM", f"{name}Config", **{**SMALL, "num_key_value_heads": 1, **more})


GPT2 = _model("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_embd=32, n_layer=3, n_head=2, n_positions=64)
T5 = _model(
    "T5ForConditionalGeneration",
    "T5Config",
    vocab_size=64,
    d_model=32,
    d_kv=16,
    d_ff=48,
    num_layers=2,
    num_heads=2,
    decoder_start_token_id=0,
    pad_token_id=0,
)
WHISPER = _model(
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    vocab_size=64,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    num_mel_bins=8,
    max_source_positions=20,
    max_target_positions=20,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
CLIP = _model(
    "CLIPModel",
    "CLIPConfig",
    projection_dim=16,
    text_config={
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "eos_token_id": 2,
    },
    vision_config={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
)
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}

LLAMA_PLACES: Any = (
    {"model.layers.1": "worker1"},
    {"model.layers.1-2": "worker1", "model.norm": "worker1", "lm_head": "worker2"},
    {"model": "worker1"},
)
BERT_PLACES: Any = ({"bert.encoder.layer.1-2": "worker1"}, {"bert.encoder": "worker1", "classifier": "worker2"})

ENTRIES: dict[str, Entry] = {
    "GPT-2": Entry(
        GPT2, words(), places=({"transformer.h.1": "worker1", "transformer.h.2": "worker2"}, {"transformer.h": "worker1"})
    ),
    "GPT-2, transformer as one part": Entry(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=2, n_positions=64, tie_word_embeddings=False)
        ),
        words(),
        places=({"transformer": "worker1"},),
    ),
    "Llama": Entry(_causal("Llama"), words(), places=LLAMA_PLACES),
    "Mistral": Entry(_causal("Mistral"), words(), places=LLAMA_PLACES[:2]),
    "Qwen2": Entry(_causal("Qwen2"), words(), places=LLAMA_PLACES[:2]),
    "Qwen3": Entry(_causal("Qwen3", head_dim=16), words(), places=LLAMA_PLACES[:1]),
    "Gemma 2": Entry(_causal("Gemma2", head_dim=16, tie_word_embeddings=False), words(), places=LLAMA_PLACES[:2]),
    "Phi": Entry(_causal("Phi"), words(), places=({"model.layers.1": "worker1", "lm_head": "worker2"},)),
    "OPT": Entry(
        _model(
            "OPTForCausalLM",
            "OPTConfig",
            vocab_size=64,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        ),
        words(),
        places=({"model.decoder.layers.1": "worker1"},),
    ),
    "Mixtral, router logits": Entry(
        _causal("Mixtral", num_local_experts=4, num_experts_per_tok=2),
        words(output_router_logits=True),
        places=LLAMA_PLACES[:2],
    ),
    "BERT": Entry(_model("BertForSequenceClassification", "BertConfig", **SMALL), _classes, places=BERT_PLACES),
    "BERT, hidden states, attentions": Entry(
        _model("BertForSequenceClassification", "BertConfig", **SMALL, attn_implementation="eager"),
        lambda n: ((), {**_classes(n)[1], "output_hidden_states": True, "output_attentions": True}),
        places=(*BERT_PLACES, {"bert": "worker1"}),
    ),
    "RoBERTa": Entry(
        _model("RobertaForSequenceClassification", "RobertaConfig", **SMALL),
        _classes,
        places=({"roberta.encoder.layer.1": "worker1", "classifier": "worker2"},),
    ),
    "DistilBERT": Entry(
        _model(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=64,
            dim=32,
            hidden_dim=48,
            n_layers=3,
            n_heads=2,
            max_position_embeddings=64,
        ),
        _classes,
        places=({"distilbert.transformer.layer.1": "worker1", "classifier": "worker2"},),
    ),
    "ALBERT": Entry(
        _model("AlbertForSequenceClassification", "AlbertConfig", **{**SMALL, "embedding_size": 16}),
        _classes,
        places=({"albert.encoder": "worker1"}, {"albert.encoder.albert_layer_groups": "worker1"}),
    ),
    "ELECTRA": Entry(
        _model("ElectraForSequenceClassification", "ElectraConfig", **{**SMALL, "embedding_size": 16}),
        _classes,
        places=({"electra.encoder.layer.1": "worker1"},),
    ),
    "DeBERTa v2": Entry(
        _model(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **SMALL,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
        ),
        _classes,
        places=({"deberta.encoder.layer.1": "worker1"}, {"deberta.encoder": "worker1"}),
    ),
    "T5": Entry(T5, _pairs, places=({"encoder.block.1": "worker1", "decoder.block.1": "worker2"},)),
    "T5, whole stacks": Entry(
        T5, _pairs, places=({"encoder": "worker1"}, {"decoder": "worker1"}, {"encoder": "worker1", "decoder": "worker1"})
    ),
    "BART": Entry(
        _model(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=64,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        _pairs,
        places=({"model.encoder.layers.1": "worker1", "model.decoder.layers.0": "worker2"},),
    ),
    "Whisper": Entry(WHISPER, _speech, places=({"model.encoder": "worker1"}, {"model.decoder.layers.1": "worker1"})),
    "CLIP": Entry(
        CLIP, _clip, places=({"vision_model": "worker1"}, {"vision_model.encoder.layers.1": "worker1", "text_model": "worker2"})
    ),
    "ViT": Entry(
        _model("ViTForImageClassification", "ViTConfig", **VISION),
        _pixels,
        places=("half", {"classifier": "worker1"}),
    ),
    "Swin": Entry(
        _model(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=32,
            patch_size=4,
            embed_dim=8,
            depths=[1, 1],
            num_heads=[2, 2],
            window_size=4,
        ),
        _pixels,
        places=({"swin.encoder.layers.1": "worker1", "classifier": "worker2"},),
    ),
    "Mamba": Entry(
        _model(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        words(),
        places=({"backbone.layers.1": "worker1"},),
    ),
    "wav2vec 2": Entry(
        _model(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            **{
                **SMALL,
                "conv_dim": (16, 16),
                "conv_stride": (5, 2),
                "conv_kernel": (10, 3),
                "num_feat_extract_layers": 2,
                "num_conv_pos_embeddings": 8,
                "num_conv_pos_embedding_groups": 2,
                "apply_spec_augment": False,
            },
        ),
        lambda n: ((), {"input_values": torch.randn(2, 400), "labels": torch.randint(0, 2, (2,))}),
        places=({"wav2vec2.encoder.layers.1": "worker1", "classifier": "worker2"},),
    ),
}
