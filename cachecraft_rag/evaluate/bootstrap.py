"""Means with confidence intervals, by drawing the values again with replacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_DRAWN_AT_ONCE = 2**22  # numbers in memory at a time: 32 MiB


@dataclass(frozen=True)
class Interval:
    """A mean and where it lies; ``f"{interval:.3f}"`` shows all three numbers.

    Attributes:
        mean: Mean of the values.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        mean, low, high = (format(number, spec or ".4g") for number in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"


def bootstrap_mean(values: Sequence[float], confidence: float = 0.95, samples: int = 2000, seed: int = 0) -> Interval:
    """Mean with a percentile interval.

    Args:
        values: One figure per question.
        confidence: Share of the resampled means inside the interval.
        samples: How often all values are drawn again.
        seed: The same seed gives the same interval.

    Raises:
        ValueError: No values, one that is not finite, or another argument out of its range.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or numbers.size == 0 or not np.isfinite(numbers).all():
        raise ValueError(f"values: {values!r} must be at least one finite number in one dimension")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: {confidence} is not between 0 and 1")
    if samples < 1:
        raise ValueError(f"samples: {samples} is too small; give at least 1")
    draw = np.random.default_rng(seed)
    at_once = max(1, _DRAWN_AT_ONCE // numbers.size)
    means = [
        numbers[draw.integers(0, numbers.size, (min(at_once, samples - done), numbers.size))].mean(axis=1)
        for done in range(0, samples, at_once)
    ]
    tail = (1.0 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), (tail, 1.0 - tail))
    return Interval(float(numbers.mean()), float(low), float(high))


def paired_difference(
    a: Sequence[float], b: Sequence[float], confidence: float = 0.95, samples: int = 2000, seed: int = 0
) -> Interval:
    """Mean of ``a - b`` where both were measured on the same questions in the same order: pairs are drawn together.

    Raises:
        ValueError: ``a`` and ``b`` differ in length; otherwise as in ``bootstrap_mean``.
    """
    if len(a) != len(b):
        raise ValueError(f"b: {len(b)} values don't pair with {len(a)} values of a")
    return bootstrap_mean([x - y for x, y in zip(a, b, strict=True)], confidence, samples, seed)
