"""Teacher forcing: what the model would have said at every token of a given answer, by whatever prefill.

Two ways of prefilling are compared token by token on the same answer, so that one early difference in a text does not
count again at every later token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cachecraft_rag.config import RecomputeConfig, SamplingConfig
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.errors import PromptTooLongError
from cachecraft_rag.prompt import RagPrompt
from cachecraft_rag.stats import RequestStats


@dataclass(frozen=True, eq=False)
class ScoreResult:
    """Logits of a given answer.

    Attributes:
        logits: ``[num_tokens, vocab_size]`` float32; row ``i`` is what token ``i`` of the answer is drawn from.
        stats: What the prefill did; nothing of it is about decoding.
    """

    logits: torch.Tensor
    stats: RequestStats


def score(
    engine: CacheCraftEngine,
    prompt: RagPrompt,
    token_ids: Sequence[int],
    *,
    reuse: bool = True,
    recompute: RecomputeConfig | None = None,
    namespace: str | None = None,
) -> ScoreResult:
    """Prefill a prompt as ``generate`` would, then feed a given answer through the engine's own decoding step.

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
    if engine.is_closed:
        raise RuntimeError("this engine is closed; make a new one")
    if not token_ids:
        raise ValueError("token_ids: [] holds no answer; give at least one token")
    request = engine.intake.take(prompt, SamplingConfig(max_new_tokens=len(token_ids)), recompute, namespace)
    if request.sampling.max_new_tokens < len(token_ids):
        assert engine.context_window is not None
        raise PromptTooLongError(request.num_tokens + len(token_ids), engine.context_window)
    try:
        engine.prefill(request, reuse)
    finally:
        engine.library.settle(request.chunks)
    assert request.logits is not None
    assert request.next_logits is not None
    rows = [request.logits, *(request.next_logits(int(token_id)) for token_id in token_ids[:-1])]
    return ScoreResult(torch.stack(rows), request.stats())


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
