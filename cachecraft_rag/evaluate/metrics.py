"""Answers against texts: token F1 and exact match as in SQuAD, and ROUGE-L."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """A text as SQuAD compares it: lower case, without ASCII punctuation and English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over normalised words, against the answer that fits best.

    An answer that normalises to nothing is met by a prediction that does so too, and by no other.

    Args:
        prediction: What was answered.
        answers: The right answers, any of which will do.

    Returns:
        0.0 to 1.0.

    Raises:
        ValueError: No answers, or one string instead of several.
    """
    return max(_f1(normalise(prediction).split(), normalise(answer).split()) for answer in _checked(answers))


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 where the normalised prediction is one of the normalised answers, else 0.0; errors as in ``token_f1``."""
    return float(any(normalise(prediction) == normalise(answer) for answer in _checked(answers)))


def rouge_l(prediction: str, reference: str) -> float:
    """F-measure of ROUGE-L: the longest common subsequence of lower-case words, 0.0 to 1.0; words are not stemmed.

    Words are made of ASCII letters and digits, so the measure is for English. Equal texts are worth 1.0 even where they
    hold no word at all.

    Raises:
        ImportError: The ``bench`` extra is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError("rouge_l needs rouge-score: pip install 'cachecraft-rag[bench]'") from error
    if prediction == reference:
        return 1.0
    return float(RougeScorer(["rougeL"]).score(reference, prediction)["rougeL"].fmeasure)


def _f1(prediction: list[str], answer: list[str]) -> float:
    if not prediction or not answer:
        return float(prediction == answer)
    common = sum((Counter(prediction) & Counter(answer)).values())
    return 2 * common / (len(prediction) + len(answer))


def _checked(answers: Sequence[str]) -> Sequence[str]:
    if isinstance(answers, str) or not answers:
        raise ValueError(f"answers: {answers!r} must be a list of at least one string")
    return answers
