"""Token by token: one row of the model each, appended to the prompt's KV in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Set
from typing import Any

import torch

from cachecraft_rag.attention_record import AttentionObserver
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.sampling import Sampler

NextLogits = Callable[[int], torch.Tensor]
"""Appends one token and returns the logits after it, ``[vocab_size]`` float32."""


class TokenLoop:
    """The tokens of one answer: an end-of-sequence token ends it and is not part of it.

    Args:
        sampler: Draws the tokens.
        eos_ids: Ids that end the answer.
        max_new_tokens: Largest number of tokens.

    Attributes:
        token_ids: The tokens so far.
        is_complete: Whether there is nothing more to draw.
    """

    def __init__(self, sampler: Sampler, eos_ids: Set[int], max_new_tokens: int) -> None:
        self._sampler, self._eos_ids, self._max_new_tokens = sampler, eos_ids, max_new_tokens
        self.token_ids: list[int] = []
        self.is_complete = max_new_tokens == 0

    def draw(self, logits: torch.Tensor, likeliest: int | None = None) -> int | None:
        """The next token; ``None`` when it ends the answer.

        Args:
            logits: Logits of the last token, ``[vocab_size]`` float32.
            likeliest: The token of the highest logit, where that is known already.
        """
        is_known = likeliest is not None and self._sampler.takes_likeliest
        token_id = likeliest if likeliest is not None and is_known else self._sampler.draw(logits)
        if token_id in self._eos_ids:
            self.is_complete = True
            return None
        self.token_ids.append(token_id)
        self.is_complete = len(self.token_ids) == self._max_new_tokens
        return token_id


def buffer_decoder(adapter: ModelAdapter, kv: PromptKV, observe: AttentionObserver | None = None) -> NextLogits:
    """Decoding step for a prompt whose KV is in a buffer with room for the answer.

    Args:
        adapter: The model.
        kv: The buffer.
        observe: Called in every layer of every step, before its attention.
    """

    def next_logits(token_id: int) -> torch.Tensor:
        return adapter.forward_rows(torch.tensor([token_id]), torch.tensor([kv.length]), kv, observe)

    return next_logits


class PlainDecoder:
    """Prefill and decoding step for any causal model, with the cache the model itself makes.

    Works for recurrent states and for models without a cache, which read everything again for every token.

    Args:
        model: A transformers causal language model.
        device: Device of its inputs.
        keeps_cache: ``False`` reads everything again for every token, whatever the model could keep.
    """

    def __init__(self, model: Any, device: torch.device, keeps_cache: bool = True) -> None:
        self._model, self._device, self._keeps_cache = model, device, keeps_cache
        self._parameters = inspect.signature(model.forward).parameters
        self._kernel: int = getattr(model.config, "conv_kernel", 0)
        self._ids: list[int] = []
        self._cache: dict[str, Any] = {}

    @torch.inference_mode()
    def prefill(self, token_ids: list[int]) -> torch.Tensor:
        """Logits of the last prompt token, ``[vocab_size]`` float32."""
        self._ids, self._cache = list(token_ids), {}
        return self._run(self._ids)

    @torch.inference_mode()
    def next_logits(self, token_id: int) -> torch.Tensor:
        """Logits after one more token, ``[vocab_size]`` float32."""
        self._ids.append(token_id)
        return self._run([token_id] if self._cache else self._ids)

    def _run(self, token_ids: list[int]) -> torch.Tensor:
        arguments: dict[str, Any] = {"use_cache": self._keeps_cache, **self._cache}
        if "cache_position" in self._parameters and self._cache:
            # transformers 4 can't tell the position of a recurrent state by itself, and takes one inside the
            # convolution's kernel for a place in its window, which is full after any prefill.
            first = self._kernel if "cache_params" in self._cache else 0
            arguments["cache_position"] = torch.tensor([max(len(self._ids) - 1, first)], device=self._device)
        if "logits_to_keep" in self._parameters:
            arguments["logits_to_keep"] = 1
        output = self._model(input_ids=torch.tensor([token_ids], device=self._device), **arguments)
        for name in ("cache", "past_key_values", "cache_params"):
            if name in output and output[name] is not None:
                self._cache = {name: output[name]}
                break
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits


def end_of_sequence_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer, as the generation settings, the model and the tokenizer name them."""
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        ids.update(found if isinstance(found, list | tuple) else [found] if found is not None else [])
    return frozenset(ids)
