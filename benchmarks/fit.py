"""What grows how: exponents of power laws, and the cost of a request from counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The power of ``sizes`` that ``values`` grow with: the slope of a line through their logarithms.

    Raises:
        ValueError: Fewer than two different sizes, or a number that is not positive.
    """
    if len(sizes) != len(values) or len(set(sizes)) < 2:
        raise ValueError(f"sizes: {list(sizes)} and {len(values)} values; give at least two different sizes")
    if min(*sizes, *values) <= 0:
        raise ValueError(f"values: {list(values)}; logarithms need numbers above 0")
    slope, _ = np.polyfit(np.log(sizes), np.log(values), 1)
    return float(slope)


@dataclass(frozen=True)
class Costs:
    """Seconds per count.

    Attributes:
        row: Per token that goes through the layers.
        pair: Per pair of such a token with a token that it attends to.
        placed: Per token of stored KV that is put in place.
    """

    row: float
    pair: float
    placed: float

    def seconds(self, rows: float, pairs: float, placed: float) -> float:
        """Seconds to the first token of a request with these counts."""
        return self.row * rows + self.pair * pairs + self.placed * placed


def fit_costs(
    rows: Sequence[float],
    pairs: Sequence[float],
    compute_s: Sequence[float],
    placed: Sequence[float],
    load_s: Sequence[float],
) -> Costs:
    """Costs by least squares on relative errors, so that short requests weigh as much as long ones.

    Args:
        rows: Tokens that went through the layers, for every request.
        pairs: Pairs of such a token with one that it attends to.
        compute_s: Seconds that computing took.
        placed: Tokens of stored KV that were put in place; 0 where nothing was.
        load_s: Seconds that this took.

    Returns:
        None of them negative: where pairs or rows explain nothing, the other explains all.
    """
    counts, seconds = np.array([rows, pairs], dtype=float).T, np.array(compute_s, dtype=float)
    scaled, ones = counts / seconds[:, None], np.ones(len(seconds))
    row, pair = np.linalg.lstsq(scaled, ones, rcond=None)[0]
    if pair < 0:
        row, pair = float(np.linalg.lstsq(scaled[:, :1], ones, rcond=None)[0][0]), 0.0
    elif row < 0:
        row, pair = 0.0, float(np.linalg.lstsq(scaled[:, 1:], ones, rcond=None)[0][0])
    return Costs(float(row), float(pair), sum(load_s) / sum(placed) if sum(placed) else 0.0)


def causal_pairs(rows: float, length: float) -> float:
    """Pairs of so many evenly spread tokens of a prompt with those before them."""
    return rows * length / 2
