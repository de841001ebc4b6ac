"""What a measured curve recommends: one rule per setting, each a function of the curve alone."""

from __future__ import annotations

from dataclasses import dataclass

from cachecraft_rag.evaluate.bootstrap import Interval
from cachecraft_rag.evaluate.curve import Curve

LEAST_GAIN = 0.01
"""Hit rate that a larger hot share must gain: a percentage point."""
LOAD_TOLERANCE = 0.05
"""How much longer than in the best window loading may take, as a share of it."""
UNNOTICED = 0.01
"""How much longer than in the best window loading may take, as a share of the time to first token."""


@dataclass(frozen=True)
class Choice:
    """A recommended value.

    Attributes:
        value: The value of the setting.
        why: The figures that led to it, in words.
    """

    value: float
    why: str


def surely_closer(curve: Curve) -> Choice:
    """The value that is set now, unless another one is surely closer to full prefill; then the closest of those.

    Surely closer is a value whose mean divergence is lower, on the same questions, by a paired difference whose whole
    interval is below 0; the closest is that of the lowest mean.

    Args:
        curve: ``kl`` by the value, and ``kl_change`` of every value but the one that is set now.

    Returns:
        The choice; where values are words, its value is the ``x`` of one.

    Raises:
        ValueError: Not exactly one value lacks ``kl_change``.
    """
    divergences, changes = dict(curve.values("kl")), dict(curve.values("kl_change"))
    compared_with = [x for x in divergences if x not in changes]
    if len(compared_with) != 1:
        raise ValueError(f"curve: {len(compared_with)} values without kl_change; exactly one is compared with")
    current = compared_with[0]
    closer = [x for x, change in changes.items() if change.value < 0.0 and change.high < 0.0]
    if not closer:
        return Choice(current, f"divergence {divergences[current]:.4f}; that of no other value is surely lower")
    chosen = min(closer, key=lambda x: divergences[x].value)
    return Choice(
        chosen,
        f"divergence {divergences[chosen]:.4f}; minus that of {curve.label(current)}, question by question: "
        f"{changes[chosen]:.4f}",
    )


def smallest_ratio(curve: Curve, max_divergence: float) -> Choice:
    """The smallest ratio whose mean divergence is below the limit with its whole interval.

    Where there is none, 1.0: everything is recomputed, which is exact.

    Args:
        curve: ``kl`` by recompute ratio.
        max_divergence: Largest mean KL divergence from full prefill in nats per token.
    """
    divergences = curve.values("kl")
    for ratio, kl in divergences:
        if kl.high <= max_divergence:
            return Choice(ratio, f"the smallest whose divergence, {kl:.4f}, is surely below {max_divergence:g}")
    ratio, kl = min(divergences, key=lambda pair: pair[1].high)
    return Choice(1.0, f"no ratio is surely below {max_divergence:g} (at {ratio:g}: {kl:.4f}); 1 computes everything")


def largest_target(curve: Curve, max_divergence: float, charged: float) -> Choice | None:
    """The largest target whose measured mean divergence is below the limit with its whole interval.

    ``None`` where there is none, or where its requests compute at least as much as those of the recommended ratio: a
    fixed ratio then does the same without a calibration.

    Args:
        curve: ``kl`` and ``charged`` by target divergence.
        max_divergence: As in ``smallest_ratio``.
        charged: Share of a full prefill that requests compute at the recommended ratio.
    """
    computed = dict(curve.values("charged"))
    kept = [(target, kl) for target, kl in curve.values("kl") if kl.high <= max_divergence]
    if not kept:
        return None
    target, kl = kept[-1]
    if computed[target].value >= charged:
        return None
    return Choice(
        target,
        f"divergence {kl:.4f} is surely below {max_divergence:g}, and {computed[target].value:.3f} of a full prefill "
        f"is computed, not {charged:.3f}",
    )


def quickest_chunk_size(curve: Curve, current: float) -> Choice:
    """Of the sizes as good as the best, the one with the quickest first token.

    As good as the best is a size whose mean divergence lies within the interval of the smallest. Of equally quick ones
    (sizes that cut the same chunks were measured once), the current size, or else the largest.

    Args:
        curve: ``kl`` and ``ttft_s`` by chunk size.
        current: The size that is set now.
    """
    divergences, times = curve.values("kl"), dict(curve.values("ttft_s"))
    best_size, best = min(divergences, key=lambda pair: pair[1].value)
    as_good = [size for size, kl in divergences if kl.value <= best.high]
    quickest = min(times[size].value for size in as_good)
    equal = [size for size in as_good if times[size].value == quickest]
    if len(equal) > 1 and len(equal) == len(divergences):
        chosen = current if current in equal else equal[-1]
        return Choice(chosen, "every size cuts the same chunks: the documents are short")
    chosen = current if current in equal else equal[-1]
    if len(as_good) == 1:
        return Choice(chosen, f"divergence {best:.4f}; that of no other size is within this interval")
    others = ", ".join(f"{size:g}" for size in as_good)
    return Choice(
        chosen,
        f"first token after {quickest:.3f} s, the quickest of {others}, whose divergence is within the interval of the "
        f"best ({best_size:g}: {best:.4f})",
    )


def last_gain(curve: Curve) -> Choice:
    """The largest hot share that still gains: a point of hit rate over every smaller share.

    Going up from the smallest share, a share is taken where its hit rate is at least ``LEAST_GAIN`` above that of the
    share taken before.

    Args:
        curve: ``hit_rate`` by hot share.
    """
    rates = [(share, rate.value) for share, rate in curve.values("hit_rate")]
    (chosen, best), first = rates[0], rates[0]
    for share, rate in rates[1:]:
        if rate >= best + LEAST_GAIN:
            chosen, best = share, rate
    if chosen == first[0]:
        return Choice(chosen, f"hit rate {best:.3f}; no larger share gains a point")
    return Choice(chosen, f"hit rate {best:.3f} ({first[1]:.3f} at {first[0]:g}); no larger share gains a point")


def smallest_window(curve: Curve) -> Choice:
    """The smallest window that loads about as quickly as the best.

    That is: its load time is at most 5 % longer, or longer by at most 1 % of the time to first token, or within the
    interval of the best.

    Args:
        curve: ``load_s`` and ``ttft_s`` by window.
    """
    times, first_tokens = curve.values("load_s"), dict(curve.values("ttft_s"))
    best_window, best = min(times, key=lambda pair: pair[1].value)
    longer = max(LOAD_TOLERANCE * best.value, UNNOTICED * first_tokens[best_window].value)
    allowed = max(best.value + longer, best.high)
    window, chosen = next((window, time) for window, time in times if time.value <= allowed)
    return Choice(
        window,
        f"loading takes {_ms(chosen)}, with the best window ({best_window:g}) {_ms(best)}; up to {1000 * allowed:.1f} "
        "ms counts as equal",
    )


def _ms(interval: Interval) -> str:
    return f"{1000 * interval.value:.1f} ms"
