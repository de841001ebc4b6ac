"""An engine on a tiny model with random weights, where only the number of things counts."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from cachecraft_rag import CacheCraftEngine, EngineConfig


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(["<eos>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def tiny_engine() -> CacheCraftEngine:
    """Two layers; chunks may take a gibibyte of memory."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    settings = EngineConfig.model_validate({"store": {"cold": {"size": "1GiB"}}})
    return CacheCraftEngine(model, tokenizer, settings)
