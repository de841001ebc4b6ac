"""Drawing the next token from logits; the transformations are transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cachecraft_rag.config import SamplingConfig

_GREEDY_BELOW = 1e-4  # dividing logits by less overflows float32, and the draw would be the most likely token anyway


class Sampler:
    """Chooses one token after another for one answer.

    Args:
        config: How to draw.
        prompt_ids: Ids of the prompt; the repetition penalty counts them, as transformers' ``generate`` does.
        device: Device of the logits.
    """

    def __init__(self, config: SamplingConfig, prompt_ids: Sequence[int], device: torch.device) -> None:
        self._is_greedy = config.temperature < _GREEDY_BELOW
        self._needs_history = config.repetition_penalty != 1.0
        self._history = list(prompt_ids) if self._needs_history else []
        self._processors = LogitsProcessorList()
        if self._needs_history:
            self._processors.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        if not self._is_greedy:
            if config.temperature != 1.0:
                self._processors.append(TemperatureLogitsWarper(config.temperature))
            if config.top_k:
                self._processors.append(TopKLogitsWarper(config.top_k))
            if config.top_p < 1.0:
                self._processors.append(TopPLogitsWarper(config.top_p))
        self._generator = torch.Generator(device=device)
        if config.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(config.seed)

    @property
    def takes_likeliest(self) -> bool:
        """Whether every token is the one of the highest logit, whatever came before."""
        return self._is_greedy and not self._needs_history

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor) -> int:
        """The next token.

        Args:
            logits: ``[vocab_size]`` float32.
        """
        if self.takes_likeliest:
            return int(logits.argmax())
        history: Any = torch.tensor([self._history], dtype=torch.long, device=logits.device)
        scores = self._processors(history, logits[None].clone())[0]
        if self._is_greedy:
            token_id = int(scores.argmax())
        else:
            token_id = int(torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator))
        if self._needs_history:
            self._history.append(token_id)
        return token_id
