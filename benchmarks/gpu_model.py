"""An engine on a model in the shape of an 8B Llama with random weights: for times where no weights are at hand."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation.configuration_utils import GenerationConfig

from benchmarks.tiny import byte_tokenizer
from cachecraft_rag import CacheCraftEngine, EngineConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}


def random_engine(config: EngineConfig, layers: int = 32, device: str = "cuda", **shape: int) -> CacheCraftEngine:
    """Weights are drawn on the device, in bfloat16; one token per byte of text.

    Args:
        config: The engine's settings.
        layers: How many; 32 make 8 billion parameters.
        device: Where the model runs.
        **shape: Fields of ``LlamaConfig`` in place of those of the 8B model.
    """
    settings = LlamaConfig(**{**SHAPE, "num_hidden_layers": layers, "bos_token_id": None, "eos_token_id": 0, **shape})
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig()  # no end of sequence: every answer has the length asked for
    return CacheCraftEngine(model.eval(), byte_tokenizer(), config)
