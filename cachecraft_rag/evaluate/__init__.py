"""How good answers are: against gold answers, against full prefill's answers, and against its logits."""

from __future__ import annotations

from cachecraft_rag.evaluate.bootstrap import (
    Interval,
    bootstrap_mean,
    bootstrap_median,
    paired_difference,
    paired_ratio,
)
from cachecraft_rag.evaluate.charge import Charge, charge_for, plan_of
from cachecraft_rag.evaluate.metrics import exact_match, normalise, rouge_l, token_f1
from cachecraft_rag.evaluate.questions import Question, load_corpus, load_questions
from cachecraft_rag.evaluate.report import as_markdown, write_report
from cachecraft_rag.evaluate.run import Evaluator, Outcome, Variant, variants
from cachecraft_rag.evaluate.summary import Rivalry, Summary, against_published, summarise
from cachecraft_rag.evaluate.teacher import (
    AnswerScore,
    ScoreResult,
    answer_and_score,
    kl_divergence,
    score,
    top1_agreement,
)

__all__ = [
    "AnswerScore",
    "Charge",
    "Evaluator",
    "Interval",
    "Outcome",
    "Question",
    "Rivalry",
    "ScoreResult",
    "Summary",
    "Variant",
    "against_published",
    "answer_and_score",
    "as_markdown",
    "bootstrap_mean",
    "bootstrap_median",
    "charge_for",
    "exact_match",
    "kl_divergence",
    "load_corpus",
    "load_questions",
    "normalise",
    "paired_difference",
    "paired_ratio",
    "plan_of",
    "rouge_l",
    "score",
    "summarise",
    "token_f1",
    "top1_agreement",
    "variants",
    "write_report",
]
