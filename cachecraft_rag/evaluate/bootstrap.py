"""Means, medians and their ratios with confidence intervals, by drawing the values again with replacement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

Statistic = Literal["mean", "median"]

_STATISTICS: dict[str, Callable[..., Any]] = {"mean": np.mean, "median": np.median}
_DRAWN_AT_ONCE = 2**22  # numbers in memory at a time: 32 MiB


@dataclass(frozen=True)
class Interval:
    """A figure of a sample and where it lies; ``f"{interval:.3f}"`` shows all three numbers.

    Attributes:
        value: The figure itself: a mean, a median, a ratio of two.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        value, low, high = (format(number, spec or ".4g") for number in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]"


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
    return _bootstrap("mean", values, confidence, samples, seed)


def predicted_mean(values: Sequence[float], confidence: float = 0.95, samples: int = 2000, seed: int = 0) -> Interval:
    """Mean, and where that of as many new values of the kind will lie: a prediction interval.

    A new mean scatters about the true one as ours does, so it is as far from ours as two are that are drawn again.
    Arguments and errors as in ``bootstrap_mean``.
    """
    numbers = _checked("values", values)
    _check_options(confidence, samples)
    pairs = zip(*(_draws(numbers.size, samples, number) for number in (seed, seed + 1)), strict=True)
    apart = np.concatenate([numbers[ours].mean(axis=1) - numbers[new].mean(axis=1) for ours, new in pairs])
    mean = float(numbers.mean())
    return _interval(mean, mean + apart, confidence)


def bootstrap_median(values: Sequence[float], confidence: float = 0.95, samples: int = 2000, seed: int = 0) -> Interval:
    """Median with a percentile interval; arguments and errors as in ``bootstrap_mean``."""
    return _bootstrap("median", values, confidence, samples, seed)


def paired_difference(
    a: Sequence[float], b: Sequence[float], confidence: float = 0.95, samples: int = 2000, seed: int = 0
) -> Interval:
    """Mean of ``a - b`` where both were measured on the same questions in the same order: pairs are drawn together.

    Raises:
        ValueError: ``a`` and ``b`` differ in length; otherwise as in ``bootstrap_mean``.
    """
    _check_pairs(a, b)
    return bootstrap_mean([x - y for x, y in zip(a, b, strict=True)], confidence, samples, seed)


def paired_ratio(
    a: Sequence[float],
    b: Sequence[float],
    statistic: Statistic = "mean",
    confidence: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The mean (or median) of ``a`` over that of ``b``; pairs are drawn together.

    Samples in which both are 0 say nothing and are left out; one in which only ``b``'s is 0 counts as infinite.

    Raises:
        ValueError: ``a`` and ``b`` differ in length, ``b``'s figure is 0, or as in ``bootstrap_mean``.
    """
    _check_pairs(a, b)
    above, below = _checked("a", a), _checked("b", b)
    _check_options(confidence, samples)
    figure = _STATISTICS[statistic]
    if figure(below) == 0:
        raise ValueError(f"b: its {statistic} is 0, so there is no ratio")
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [
            figure(above[drawn], axis=1) / figure(below[drawn], axis=1) for drawn in _draws(above.size, samples, seed)
        ]
    ratios = np.concatenate(parts)
    return _interval(float(figure(above) / figure(below)), ratios[~np.isnan(ratios)], confidence)


def _bootstrap(statistic: Statistic, values: Sequence[float], confidence: float, samples: int, seed: int) -> Interval:
    numbers = _checked("values", values)
    _check_options(confidence, samples)
    figure = partial(_STATISTICS[statistic], axis=-1)
    drawn = np.concatenate([figure(numbers[places]) for places in _draws(numbers.size, samples, seed)])
    return _interval(float(figure(numbers)), drawn, confidence)


def _draws(size: int, samples: int, seed: int) -> Iterator[Any]:
    """Places of the values that are drawn, ``[some samples, size]`` int64 each."""
    draw = np.random.default_rng(seed)
    at_once = max(1, _DRAWN_AT_ONCE // size)
    for done in range(0, samples, at_once):
        yield draw.integers(0, size, (min(at_once, samples - done), size))


def _interval(value: float, drawn: Any, confidence: float) -> Interval:
    tail = (1.0 - confidence) / 2
    if np.isfinite(drawn).all():
        low, high = np.quantile(drawn, (tail, 1.0 - tail))
    else:  # nothing can be interpolated between infinities
        low, high = np.quantile(drawn, tail, method="lower"), np.quantile(drawn, 1.0 - tail, method="higher")
    return Interval(value, float(low), float(high))


def _checked(name: str, values: Sequence[float]) -> Any:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or numbers.size == 0 or not np.isfinite(numbers).all():
        raise ValueError(f"{name}: {values!r} must be at least one finite number in one dimension")
    return numbers


def _check_options(confidence: float, samples: int) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: {confidence} is not between 0 and 1")
    if samples < 1:
        raise ValueError(f"samples: {samples} is too small; give at least 1")


def _check_pairs(a: Sequence[float], b: Sequence[float]) -> None:
    if len(a) != len(b):
        raise ValueError(f"b: {len(b)} values don't pair with {len(a)} values of a")
