"""Teacher forcing: what the model would have said at every token of a given answer, by whatever prefill.

Two ways of prefilling are compared token by token on the same answer, so that one early difference in a text does not
count again at every later token. The tokens of the answer run in one forward pass, and a model's own answer is drawn
behind the same prefill where both are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cachecraft_rag.answer import answer
from cachecraft_rag.config import RecomputeConfig, SamplingConfig
from cachecraft_rag.decode import end_of_sequence_ids
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.errors import PromptTooLongError
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.prompt import RagPrompt
from cachecraft_rag.request import Request
from cachecraft_rag.result import AnswerStream, GenerationResult
from cachecraft_rag.stats import RequestStats


@dataclass(frozen=True, eq=False)
class ScoreResult:
    """Logits of a given answer.

    Attributes:
        logits: ``[num_tokens, vocab_size]`` float32; row ``i`` is what token ``i`` of the answer is drawn from.
        stats: What the prefill did. ``ttft_s`` ends where the first token could be drawn; nothing is about decoding.
    """

    logits: torch.Tensor
    stats: RequestStats


@dataclass(frozen=True, eq=False)
class AnswerScore:
    """A model's own answer, and the logits of an answer that may be another.

    Attributes:
        answer: The answer with its statistics, as ``generate`` gives it.
        logits: ``[num_tokens, vocab_size]`` float32, as in ``ScoreResult``.
    """

    answer: GenerationResult
    logits: torch.Tensor


def score(
    engine: CacheCraftEngine,
    prompt: RagPrompt,
    token_ids: Sequence[int],
    *,
    reuse: bool = True,
    recompute: RecomputeConfig | None = None,
    namespace: str | None = None,
) -> ScoreResult:
    """Prefill a prompt as ``generate`` would, then run a given answer behind it in one forward pass.

    Chunks that are missing are computed and stored. Their sensitivity is not measured afterwards: ``warm`` them, where
    the policy needs it.

    Args:
        engine: The engine.
        prompt: The prompt.
        token_ids: The answer, at least one token.
        reuse: ``False`` prefills the same ids in the ordinary way: the reference.
        recompute: Policy and ratio; ``None`` takes the engine's.
        namespace: Whose chunks are reused and stored; ``None`` takes the engine's.

    Raises:
        PromptTooLongError: Prompt and answer don't fit into the context window.
        RuntimeError: The engine is closed.
        ValueError: No tokens.
    """
    _check_tokens(token_ids)
    sampling = SamplingConfig(max_new_tokens=len(token_ids))
    request = _prefilled(engine, prompt, sampling, len(token_ids), reuse, recompute, namespace)
    request.figures["ttft_s"] = time.perf_counter() - request.started
    return ScoreResult(_forced_logits(engine, request, token_ids), request.stats())


def answer_and_score(
    engine: CacheCraftEngine,
    prompt: RagPrompt,
    token_ids: Sequence[int] | None = None,
    *,
    max_new_tokens: int = 32,
    stop: Sequence[str] = (),
    reuse: bool = True,
    recompute: RecomputeConfig | None = None,
    namespace: str | None = None,
) -> AnswerScore:
    """``generate`` greedily and ``score`` behind one and the same prefill.

    Nothing is learnt afterwards, so that one run leaves nothing behind that another would find.

    Args:
        engine: The engine; its model must be one that can reuse chunks.
        prompt: The prompt.
        token_ids: The answer to score, at least one token; ``None`` scores the own answer. An empty own answer is
            scored where it ended.
        max_new_tokens: Longest own answer in tokens.
        stop: Texts that end the own answer.
        reuse: As in ``score``.
        recompute: As in ``score``.
        namespace: As in ``score``.

    Raises:
        PromptTooLongError: Prompt and answer don't fit into the context window.
        RuntimeError: The engine is closed.
        ValueError: ``token_ids`` is empty, or the model can't reuse chunks.
    """
    if token_ids is not None:
        _check_tokens(token_ids)
    if engine.fallback_reason is not None:
        raise ValueError(f"engine: its model can't reuse chunks: {engine.fallback_reason}")
    longest = max(max_new_tokens, len(token_ids or ()))
    sampling = SamplingConfig(max_new_tokens=longest, stop=tuple(stop))
    request = _prefilled(engine, prompt, sampling, longest, reuse, recompute, namespace)
    request.sampling = sampling.model_copy(update={"max_new_tokens": max_new_tokens})
    stream = AnswerStream(_answer(engine, request))
    for _ in stream:
        continue
    own = stream.result
    # The token alone can't change its own logits, so any will do where there is none.
    scored = (own.token_ids or (0,)) if token_ids is None else token_ids
    return AnswerScore(own, _forced_logits(engine, request, scored))


def _prefilled(
    engine: CacheCraftEngine,
    prompt: RagPrompt,
    sampling: SamplingConfig,
    num_new_tokens: int,
    reuse: bool,
    recompute: RecomputeConfig | None,
    namespace: str | None,
) -> Request:
    """A request up to the logits of its prompt's last token, with room for ``num_new_tokens`` more."""
    if engine.is_closed:
        raise RuntimeError("this engine is closed; make a new one")
    request = engine.intake.take(prompt, sampling, recompute, namespace)
    if request.sampling.max_new_tokens < num_new_tokens:
        assert engine.context_window is not None
        raise PromptTooLongError(request.num_tokens + num_new_tokens, engine.context_window)
    try:
        engine.prefill(request, reuse)
    finally:
        engine.library.settle(request.chunks)
    return request


def _answer(engine: CacheCraftEngine, request: Request) -> Generator[str, None, GenerationResult]:
    to_text = partial(engine.prompts.decode, skip_special_tokens=True)
    eos_ids = end_of_sequence_ids(engine.model, engine.tokenizer)
    return (yield from answer(request, to_text, eos_ids))


def _forced_logits(engine: CacheCraftEngine, request: Request, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits that every token is drawn from; what stands behind the prompt in its buffer is overwritten."""
    assert request.logits is not None
    if len(token_ids) == 1:
        return request.logits[None]
    if request.kv is None:  # a model that keeps its own cache takes token by token
        assert request.next_logits is not None
        return torch.stack([request.logits, *(request.next_logits(int(token_id)) for token_id in token_ids[:-1])])
    behind = torch.tensor(token_ids[:-1])
    positions = torch.arange(request.num_tokens, request.num_tokens + behind.numel())
    rows = ModelAdapter(engine.model).forward_rows_scoring(behind, positions, request.kv)
    return torch.cat([request.logits[None], rows])


def _check_tokens(token_ids: Sequence[int]) -> None:
    if not token_ids:
        raise ValueError("token_ids: [] holds no answer; give at least one token")


def kl_divergence(reference_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """How far the distributions of an answer's tokens are from those of the reference.

    Args:
        reference_logits: ``[num_tokens, vocab_size]`` of the reference, as a rule full prefill.
        logits: The other, of the same shape.

    Returns:
        KL(reference || other) in nats, ``[num_tokens]`` float64, on the device of ``reference_logits``.

    Raises:
        ValueError: The shapes differ.
    """
    _check_shapes(reference_logits, logits)
    reference = reference_logits.double().log_softmax(-1)
    other = logits.to(reference.device).double().log_softmax(-1)
    terms = reference.exp() * (reference - other)
    # A token that the reference rules out (logit -inf) counts nothing, whatever the other says of it.
    return torch.where(reference.isneginf(), 0.0, terms).sum(-1).clamp_min(0.0)  # rounding reaches a little below 0


def top1_agreement(reference_logits: torch.Tensor, logits: torch.Tensor) -> float:
    """Share of the tokens whose most likely value is the same; shapes and errors as in ``kl_divergence``."""
    _check_shapes(reference_logits, logits)
    same = reference_logits.argmax(-1) == logits.to(reference_logits.device).argmax(-1)
    return float(same.double().mean())


def _check_shapes(reference_logits: torch.Tensor, logits: torch.Tensor) -> None:
    if reference_logits.ndim != 2 or reference_logits.shape[0] == 0 or reference_logits.shape != logits.shape:
        raise ValueError(
            f"logits: {tuple(logits.shape)} is not the reference's {tuple(reference_logits.shape)}, "
            "[num_tokens, vocab_size] with at least one token"
        )
