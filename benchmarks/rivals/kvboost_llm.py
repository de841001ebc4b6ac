"""kvboost, with its default strategy, and as many pieces kept as the byte budget allows.

Chunks are not prepared ahead: kvboost cuts prompts every 128 tokens from their beginning, so a chunk that was warmed
alone is found only where it stands at a multiple of that.
"""

from __future__ import annotations

from typing import Any

import torch
from kvboost import KVBoost  # type: ignore[import-not-found]
from kvboost.engine import GenerationMode  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.rivals.base import Clock, Engine, Prompt, Reply, Settings

_NO_LIMIT = 10**6


class KVBoosted(Engine):
    """Times are taken from outside: its own begin after cached pieces were put together and mended."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        dtype = getattr(torch, settings.dtype)
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(settings.model)
        self._computed = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)
        limits = {"max_cache_bytes": settings.memory, "max_chunks": _NO_LIMIT}
        self._engine: Any = KVBoost(model, self._tokenizer, device="cpu", **limits)

    def ask(self, prompt: Prompt, max_new_tokens: int) -> Reply:
        """Answer, pieces of earlier prompts reused; it returns when all bookkeeping is done."""
        computed: list[int] = []
        clock = Clock()

        def on_token(_: int) -> None:
            computed.append(self._computed)
            clock.token()

        self._computed = 0
        result = self._engine.generate(prompt.text, max_new_tokens=max_new_tokens, on_token=on_token)
        return clock.reply(result.output_text, result.prompt_tokens, computed[0] if computed else 0)

    def cold(self, prompt: Prompt, max_new_tokens: int) -> str:
        """Its own baseline mode."""
        result = self._engine.generate(prompt.text, max_new_tokens=max_new_tokens, mode=GenerationMode.BASELINE)
        return str(result.output_text)

    def _count(self, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Every forward pass counts, those that only mend what is cached too."""
        ids = options["input_ids"] if "input_ids" in options else arguments[0]
        self._computed += ids.shape[1]


def load(settings: Settings) -> Engine:
    """The engine."""
    return KVBoosted(settings)
