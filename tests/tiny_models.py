"""Tiny random-weight models of every architecture the engine is tested with; made from configurations, no downloads.

Two to four layers, grouped heads, 64 wide. Weights are drawn wide (0.2 instead of 0.02), so that attention is far from
uniform and a wrong position or a missing key changes the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

WINDOW = 48


def rope(kind: str, theta: float = 10_000.0, **options: Any) -> dict[str, Any]:
    """RoPE settings under the names of transformers 4 and 5."""
    scaling = {"rope_type": kind, "rope_theta": theta, **options}
    if int(transformers.__version__.split(".")[0]) >= 5:
        return {"rope_parameters": scaling}
    del scaling["rope_theta"]
    return {"rope_theta": theta, "rope_scaling": scaling if kind != "default" else None}


REUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 4}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 6}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "glm": ("GlmConfig", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "gpt-neox": ("GPTNeoXConfig", {"rotary_pct": 0.25, "partial_rotary_factor": 0.25}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "llama-linear": ("LlamaConfig", rope("linear", factor=4.0)),
    "llama-llama3": (
        "LlamaConfig",
        rope(
            "llama3",
            theta=500_000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
    ),
    "llama-yarn": ("LlamaConfig", rope("yarn", factor=4.0, original_max_position_embeddings=512)),
}

FULL_PREFILL: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2048}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "mpt": ("MptConfig", {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 2048}),
    "mamba": ("MambaConfig", {"state_size": 8}),
}


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny model by its name in ``REUSED`` or ``FULL_PREFILL``; the same weights every time."""
    class_name, options = {**REUSED, **FULL_PREFILL}[name]
    config = getattr(transformers, class_name)(**{**_COMMON, **options, **changes})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()
