"""How good answers are: against gold answers, against full prefill's answers, and against its logits."""

from __future__ import annotations

from cachecraft_rag.evaluate.bootstrap import Interval, bootstrap_mean, paired_difference
from cachecraft_rag.evaluate.metrics import exact_match, normalise, rouge_l, token_f1
from cachecraft_rag.evaluate.teacher import ScoreResult, kl_divergence, score, top1_agreement

__all__ = [
    "Interval",
    "ScoreResult",
    "bootstrap_mean",
    "exact_match",
    "kl_divergence",
    "normalise",
    "paired_difference",
    "rouge_l",
    "score",
    "token_f1",
    "top1_agreement",
]
