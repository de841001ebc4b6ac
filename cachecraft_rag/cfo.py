"""How much of a reused chunk must be computed again: the formulas of Cache-Craft (arXiv 2502.15734).

Equation numbers are those that public readings of the paper cite. Attention may be summed or averaged over heads:
every formula is a ratio in which the number of heads cancels. Plain numbers only, no tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

MIN_CCI = 0.5
"""CCI of a chunk that paid no attention to what precedes it; a-bar / b-bar is never negative, so none lies lower."""
_MAX_CCI = math.nextafter(1.0, 0.0)  # rounding must not close the interval [0.5, 1)


def mean_inter(inter: Sequence[Sequence[float]], lengths: Sequence[int], num_tokens: int) -> float:
    """a-bar (Eq. 9 and 3): attention to the preceding chunks per pair of tokens, mean over layers.

    Args:
        inter: Per layer, the attention that the chunk's tokens pay to each preceding chunk.
        lengths: Tokens of each preceding chunk.
        num_tokens: Tokens of the chunk.

    Returns:
        Mean over layers of sum_j inter(i, j) / (num_tokens * lengths[j]); 0.0 with nothing before the chunk.

    Raises:
        ValueError: No layers, a layer without one figure per preceding chunk, no tokens, or attention below 0.
    """
    if not inter:
        raise ValueError("inter: [] has no layers; give one sequence per layer")
    _check_length("num_tokens", num_tokens)
    for length in lengths:
        _check_length("lengths", length)
    for layer in inter:
        if len(layer) != len(lengths):
            raise ValueError(f"inter: a layer has {len(layer)} figures; give one for each of {len(lengths)} chunks")
        _check_attention("inter", layer)
    sums = [math.fsum(paid / length for paid, length in zip(layer, lengths, strict=True)) for layer in inter]
    return math.fsum(sums) / (num_tokens * len(inter))


def mean_intra(intra: Sequence[float], num_tokens: int) -> float:
    """b-bar (Eq. 10 and 4): attention inside the chunk per pair of tokens, mean over layers.

    Args:
        intra: Per layer, the attention that the chunk's tokens pay to earlier tokens of the chunk.
        num_tokens: Tokens of the chunk.

    Returns:
        Mean over layers of intra(i) / num_tokens^2.

    Raises:
        ValueError: No layers, no tokens, or attention below 0.
    """
    if not intra:
        raise ValueError("intra: [] has no layers; give one figure per layer")
    _check_length("num_tokens", num_tokens)
    _check_attention("intra", intra)
    return math.fsum(intra) / (num_tokens * num_tokens * len(intra))


def chunk_context_impact(a_bar: float, b_bar: float) -> float:
    """CCI (Eq. 11): how much a chunk's KV owes to what precedes it, 1 / (1 + exp(-a_bar / b_bar)).

    A chunk without attention inside (one token has no earlier one) is the limit of a large ratio.

    Returns:
        In [0.5, 1): 0.5 when nothing outside was attended to.

    Raises:
        ValueError: A figure is negative or not finite.
    """
    _check_attention("a_bar", [a_bar])
    _check_attention("b_bar", [b_bar])
    if a_bar == 0.0:
        return MIN_CCI
    ratio = a_bar / b_bar if b_bar > 0.0 else math.inf
    return min(1.0 / (1.0 + math.exp(-ratio)), _MAX_CCI)


def prefix_overlap(old: Sequence[Hashable], new: Sequence[Hashable], inter: Sequence[float]) -> float:
    """beta (Eq. 6): share of the attention paid to the old preceding chunks that went to those still there.

    It says nothing about chunks that are new, so 1.0 does not mean that the prefixes are equal. It is also 1.0 when
    nothing was attended to before (the equation is 0/0 then): nothing that mattered has gone. ``variants`` adds what
    new chunks may cost.

    Args:
        old: The chunks that preceded it when its KV was made. One that occurs twice counts as two.
        new: The chunks that precede it now.
        inter: Attention that was paid to each of ``old``, over all layers.

    Raises:
        ValueError: ``inter`` does not hold one figure, 0 or more, per old chunk.
    """
    if len(inter) != len(old):
        raise ValueError(f"inter: {len(inter)} figures; give one for each of {len(old)} old chunks")
    _check_attention("inter", inter)
    total = math.fsum(inter)
    if total == 0.0:
        return 1.0
    still_there = set(_occurrences(new))
    kept = (paid for label, paid in zip(_occurrences(old), inter, strict=True) if label in still_there)
    return math.fsum(kept) / total


def order_penalty(old: Sequence[Hashable], new: Sequence[Hashable]) -> float:
    """gamma (Eq. 7): normalised Kendall distance of the order of the common chunks, D / C(m, 2).

    The n-th occurrence of a chunk in one sequence is the same as the n-th in the other.

    Returns:
        0.0 for the same order and for fewer than two common chunks, 1.0 for the reverse order.
    """
    rank = {label: index for index, label in enumerate(_occurrences(new))}
    ranks = [rank[label] for label in _occurrences(old) if label in rank]
    if len(ranks) < 2:
        return 0.0
    swapped = sum(earlier > later for index, earlier in enumerate(ranks) for later in ranks[index + 1 :])
    return swapped / math.comb(len(ranks), 2)


def adjusted_overlap(beta: float, gamma: float) -> float:
    """beta' (Eq. 8): the overlap, lowered by the change of order, beta * (1 - gamma).

    Raises:
        ValueError: An argument is not in 0 to 1.
    """
    _check_share("beta", beta)
    _check_share("gamma", gamma)
    return beta * (1.0 - gamma)


def cache_fix_overhead(alpha: float, cci: float, beta_prime: float) -> float:
    """CFO (Eq. 12): share of the chunk's tokens to compute again, alpha * CCI * (1 - beta'), at most 1.

    Args:
        alpha: Strength of the correction, 0 or more; chosen per model so that the quality is right.
        cci: From ``chunk_context_impact``.
        beta_prime: From ``adjusted_overlap``.

    Raises:
        ValueError: An argument is out of its range.
    """
    if not 0.0 <= alpha < math.inf:
        raise ValueError(f"alpha: {alpha} is not a finite number of 0 or more")
    _check_share("cci", cci)
    _check_share("beta_prime", beta_prime)
    return min(alpha * cci * (1.0 - beta_prime), 1.0)


def num_to_recompute(cfo: float, num_tokens: int) -> int:
    """N (Eq. 14): ceil(CFO * num_tokens), where a product a little above a whole number counts as that number.

    Raises:
        ValueError: ``cfo`` is not in 0 to 1, or ``num_tokens`` is negative.
    """
    _check_share("cfo", cfo)
    if num_tokens < 0:
        raise ValueError(f"num_tokens: {num_tokens} is below 0")
    share = cfo * num_tokens
    return min(num_tokens, math.ceil(share - 1e-9 * share))  # 0.07 * 100 is a little over 7


def _occurrences(chunks: Sequence[Hashable]) -> list[tuple[Hashable, int]]:
    """Every chunk with how often it occurred before: labels that differ where chunks repeat."""
    seen: Counter[Hashable] = Counter()
    labels = []
    for chunk in chunks:
        labels.append((chunk, seen[chunk]))
        seen[chunk] += 1
    return labels


def _check_length(name: str, length: int) -> None:
    if length < 1:
        raise ValueError(f"{name}: {length} is no length of a chunk; give 1 token or more")


def _check_attention(name: str, values: Sequence[float]) -> None:
    for value in values:
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}: {value} is not a finite number of 0 or more")


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: {value} is not in 0 to 1")
