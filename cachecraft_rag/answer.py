"""From the logits of a prompt's last token to the text of its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence, Set

import torch

from cachecraft_rag.decode import TokenLoop
from cachecraft_rag.detokenizer import Detokenizer
from cachecraft_rag.request import Request
from cachecraft_rag.result import FinishReason, GenerationResult
from cachecraft_rag.sampling import Sampler


class Answer:
    """The answer of a request that has been prefilled, as it grows token by token.

    Args:
        request: The request; its figures of time and length are filled in when the answer is complete.
        to_text: Turns token ids into text, special tokens left out.
        eos_ids: Ids that end the answer.
    """

    def __init__(self, request: Request, to_text: Callable[[Sequence[int]], str], eos_ids: Set[int]) -> None:
        assert request.logits is not None
        self._request = request
        sampler = Sampler(request.sampling, request.encoded.token_ids, request.logits.device)
        self._loop = TokenLoop(sampler, eos_ids, request.sampling.max_new_tokens)
        self._detokenizer = Detokenizer(to_text, request.sampling.stop)
        self._first_token_at: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is to be drawn any more: an end-of-sequence token, a stop text, or the token limit."""
        return self._loop.is_complete or self._detokenizer.is_stopped

    @property
    def last_id(self) -> int:
        """The token drawn last, which the model reads next."""
        return self._loop.token_ids[-1]

    def draw(self, logits: torch.Tensor, likeliest: int | None = None) -> str:
        """Draw a token from the logits of the last one, ``[vocab_size]`` float32; returns the text now certain.

        Args:
            logits: The logits.
            likeliest: The token of the highest logit, where that is known already.
        """
        token_id = self._loop.draw(logits, likeliest)
        if self._first_token_at is None:
            self._first_token_at = time.perf_counter()
        text = "" if token_id is None else self._detokenizer.push(token_id)
        return text + self._finish() if self.is_complete else text

    def result(self) -> GenerationResult:
        """The complete answer."""
        tokens, is_stopped = tuple(self._loop.token_ids), self._detokenizer.is_stopped
        is_full = len(tokens) == self._request.sampling.max_new_tokens and not is_stopped
        reason: FinishReason = "length" if is_full else "stop"
        return GenerationResult(self._detokenizer.text, tokens, self._request.stats(), reason)

    def _finish(self) -> str:
        assert self._first_token_at is not None
        self._request.figures |= {
            "ttft_s": self._first_token_at - self._request.started,
            "decode_s": time.perf_counter() - self._first_token_at,
            "output_tokens": len(self._loop.token_ids),
        }
        return self._detokenizer.finish()


def answer(
    request: Request, to_text: Callable[[Sequence[int]], str], eos_ids: Set[int]
) -> Generator[str, None, GenerationResult]:
    """Draw the answer of a request that has been prefilled, and yield its text as it becomes certain.

    Args and figures as in ``Answer``.
    """
    assert request.logits is not None
    assert request.next_logits is not None
    drawn = Answer(request, to_text, eos_ids)
    delta = drawn.draw(request.logits)
    while True:
        if delta:
            yield delta
        if drawn.is_complete:
            return drawn.result()
        delta = drawn.draw(request.next_logits(drawn.last_id))
