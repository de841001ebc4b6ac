"""LlamaIndex's ``HuggingFaceLLM``, streaming; its own environment holds it.

It hands on text, not tokens: the first piece may be empty, and comes with the first token all the same.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from llama_index.llms.huggingface import HuggingFaceLLM  # type: ignore[import-not-found,import-untyped,unused-ignore]

from benchmarks.rivals.base import Clock, Engine, Prompt, Reply, Settings


class LlamaIndex(Engine):
    """What our ``CacheCraftLLM`` takes the place of."""

    keeps: ClassVar[bool] = False

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0}
        self._llm: Any = HuggingFaceLLM(
            model_name=settings.model,
            tokenizer_name=settings.model,
            context_window=settings.window,
            device_map="cpu",
            model_kwargs={"dtype": getattr(torch, settings.dtype)},
            generate_kwargs=greedy,
        )

    def ask(self, prompt: Prompt, max_new_tokens: int) -> Reply:
        """Answer by full prefill."""
        self._llm.max_new_tokens = max_new_tokens
        clock, text, pieces = Clock(), "", 0
        for piece in self._llm.stream_complete(prompt.text, formatted=True):
            clock.token()
            text, pieces = piece.text, pieces + 1
        length = len(self._llm._tokenizer(prompt.text).input_ids)
        return clock.reply(text, length, length, max(pieces - 1, 0))  # the last piece closes the stream

    def cold(self, prompt: Prompt, max_new_tokens: int) -> str:
        """The same as ``ask``."""
        return self.ask(prompt, max_new_tokens).text


def load(settings: Settings) -> Engine:
    """The engine."""
    return LlamaIndex(settings)
