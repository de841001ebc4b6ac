"""Plain transformers: ``generate`` over the whole prompt, nothing kept."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from benchmarks.rivals.base import Clock, Engine, Prompt, Reply, Settings


class TokenClock(BaseStreamer):
    """Notes when each token of an answer comes; the first thing that ``generate`` streams is the prompt."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._has_prompt = clock, False

    def put(self, value: Any) -> None:
        """Take the prompt, then one token after the other."""
        if self._has_prompt:
            self._clock.token()
        self._has_prompt = True

    def end(self) -> None:
        """The answer is complete; nothing is left to be done."""


class FullPrefill(Engine):
    """Computes every token of every prompt."""

    keeps: ClassVar[bool] = False

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        dtype = getattr(torch, settings.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(settings.model)

    def ask(self, prompt: Prompt, max_new_tokens: int) -> Reply:
        """Answer by full prefill."""
        clock = Clock()
        ids = self.encode(prompt)
        output = self.generate(ids, clock, max_new_tokens)
        return clock.reply(self.decode(output[0, ids.shape[1] :]), ids.shape[1], ids.shape[1])

    def cold(self, prompt: Prompt, max_new_tokens: int) -> str:
        """The same as ``ask``."""
        return FullPrefill.ask(self, prompt, max_new_tokens).text

    def encode(self, prompt: Prompt) -> torch.Tensor:
        """Ids of a prompt, ``[1, num_tokens]``."""
        ids: torch.Tensor = self.tokenizer(prompt.text, add_special_tokens=False, return_tensors="pt").input_ids
        return ids

    def generate(self, ids: torch.Tensor, clock: Clock, max_new_tokens: int, **options: Any) -> torch.Tensor:
        """Ids of prompt and answer, ``[1, num_tokens]``."""
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        sequences: torch.Tensor = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            pad_token_id=pad,
            max_new_tokens=max_new_tokens,
            streamer=TokenClock(clock),
            **options,
        )
        return sequences

    def decode(self, ids: torch.Tensor) -> str:
        """Text of an answer."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def load(settings: Settings) -> Engine:
    """The engine."""
    return FullPrefill(settings)
