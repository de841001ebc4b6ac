"""A measured curve: figures with their intervals, by the value of one setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cachecraft_rag.evaluate.bootstrap import Interval

FIGURES: Mapping[str, str] = {
    "kl": "KL to full prefill (nats per token)",
    "kl_change": "KL minus that of the setting now",
    "f1": "token F1",
    "full_f1": "token F1 of full prefill",
    "charged": "computed / full prefill",
    "ttft_s": "time to first token (s)",
    "ttft_ratio": "time to first token / full prefill",
    "tokens_per_s": "prompt tokens per second",
    "hit_rate": "hit rate",
    "load_s": "load time (s)",
}
"""What is measured, and how it is called in tables and plots."""


@dataclass(frozen=True)
class Point:
    """One value of the setting.

    Attributes:
        x: The value.
        figures: By names of ``FIGURES``; each with the 95 % interval over questions or requests.
    """

    x: float
    figures: Mapping[str, Interval]


@dataclass(frozen=True)
class Curve:
    """Figures over the values of one setting.

    Attributes:
        name: What it shows: ``"chunk_size"``, ``"behind"``, ``"offset"``, ``"ratio"``, ``"target"``, ``"hot_share"`` or
            ``"load_ahead"``.
        title: The same in words.
        x_label: What ``Point.x`` is.
        drawn: Names of the figures that are plotted, one plot each.
        points: By rising ``x``.
        sample: How much was measured, in words.
        labels: The values where they are words: those of the points at ``x`` 0, 1, 2 and so on. Empty for numbers.
    """

    name: str
    title: str
    x_label: str
    drawn: tuple[str, ...]
    points: tuple[Point, ...]
    sample: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.points or any(a.x >= b.x for a, b in zip(self.points, self.points[1:], strict=False)):
            raise ValueError(f"points: {[point.x for point in self.points]} must be at least one, by rising x")
        if self.labels and [point.x for point in self.points] != list(range(len(self.labels))):
            raise ValueError(f"labels: {self.labels} must be one per point, and the points at 0, 1, 2 and so on")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the figures that any point has, in the order of ``FIGURES``."""
        return tuple(name for name in FIGURES if any(name in point.figures for point in self.points))

    def values(self, name: str) -> list[tuple[float, Interval]]:
        """One figure by ``x``, of the points that have it."""
        return [(point.x, point.figures[name]) for point in self.points if name in point.figures]

    def label(self, x: float) -> str:
        """The value of a point as text."""
        return self.labels[int(x)] if self.labels else f"{x:g}"

    def x_of(self, value: float | str) -> float:
        """Where a value lies."""
        return float(self.labels.index(value)) if isinstance(value, str) else value
