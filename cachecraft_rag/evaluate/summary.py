"""Outcomes of many questions in a few figures, each with its interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachecraft_rag.config import RecomputeConfig
from cachecraft_rag.evaluate.bootstrap import (
    Interval,
    Statistic,
    bootstrap_mean,
    bootstrap_median,
    paired_difference,
    paired_ratio,
)
from cachecraft_rag.evaluate.run import FULL, PUBLISHED, Outcome

DEFAULT = RecomputeConfig().policy
"""The policy that others are compared with."""


@dataclass(frozen=True)
class Summary:
    """One variant over all its questions. Intervals hold 95 %; differences and ratios are over the same questions.

    Attributes:
        label: ``Outcome.label``.
        setting: ``Outcome.setting``.
        num_questions: How many questions.
        num_off_target: Questions whose charged ratio is not as good as the target; ``None`` without one.
        charged_ratio: Mean share of a full prefill that was computed.
        kl: Mean over questions of the divergence from full prefill.
        kl_median: Median of the same.
        top1: Mean agreement with full prefill.
        f1: Mean token F1; ``None`` without answers, as for the following.
        f1_share: ``f1`` over that of full prefill; ``None`` also where that is 0.
        exact_match: Mean exact match.
        rouge_l: Mean ROUGE-L against full prefill's answers.
        ttft_ratio: Median time to first token over that of full prefill.
        kl_difference: Mean divergence minus that of the baseline in the same setting; ``None`` for the baseline itself
            and where it was not run, as for the following.
        kl_ratio: Mean divergence over that of the baseline; ``None`` also where that is 0.
        f1_difference: ``f1`` minus that of the baseline.
    """

    label: str
    setting: str
    num_questions: int
    num_off_target: int | None
    charged_ratio: float
    kl: Interval
    kl_median: Interval
    top1: Interval
    f1: Interval | None
    f1_share: Interval | None
    exact_match: Interval | None
    rouge_l: Interval | None
    ttft_ratio: Interval
    kl_difference: Interval | None
    kl_ratio: Interval | None
    f1_difference: Interval | None


@dataclass(frozen=True)
class Rivalry:
    """How one policy does against the best published selector in one setting.

    Attributes:
        setting: ``Outcome.setting``.
        num_questions: Questions that all of them answered.
        best_mean: Published selector of the lowest mean divergence.
        mean_ratio: Mean divergence over that of ``best_mean``; ``None`` where that is 0.
        best_median: Published selector of the lowest median divergence.
        median_ratio: Median divergence over that of ``best_median``; ``None`` where that is 0.
    """

    setting: str
    num_questions: int
    best_mean: str
    mean_ratio: Interval | None
    best_median: str
    median_ratio: Interval | None


_Group = dict[str, Outcome]  # by question


def summarise(outcomes: Sequence[Outcome], baseline: str = DEFAULT) -> list[Summary]:
    """One summary per variant, in the order of first appearance.

    Args:
        outcomes: Of any number of questions.
        baseline: Label that the others are compared with.
    """
    groups = _groups(outcomes)
    full = groups.get(("", FULL), {})
    return [
        _summary(label, setting, group, full, groups.get((setting, baseline), {}) if label != baseline else {})
        for (setting, label), group in groups.items()
    ]


def against_published(
    outcomes: Sequence[Outcome], label: str = DEFAULT, published: Sequence[str] = PUBLISHED
) -> list[Rivalry]:
    """Per setting in which they ran, a policy against the best of the published selectors.

    Args:
        outcomes: Of any number of questions.
        label: Label of the policy.
        published: Labels of the selectors.
    """
    groups = _groups(outcomes)
    found = []
    for setting in dict.fromkeys(setting for setting, _ in groups):
        own = groups.get((setting, label), {})
        rivals = {name: groups[setting, name] for name in published if name != label and (setting, name) in groups}
        common = [name for name in own if all(name in rival for rival in rivals.values())]
        if not rivals or not common:
            continue
        divergences = {name: [rival[question].kl for question in common] for name, rival in rivals.items()}
        mine = [own[question].kl for question in common]
        best_mean, mean_ratio = _against_best(mine, divergences, "mean")
        best_median, median_ratio = _against_best(mine, divergences, "median")
        found.append(Rivalry(setting, len(common), best_mean, mean_ratio, best_median, median_ratio))
    return found


def _against_best(
    mine: Sequence[float], divergences: dict[str, list[float]], statistic: Statistic
) -> tuple[str, Interval | None]:
    figure = {"mean": bootstrap_mean, "median": bootstrap_median}[statistic]
    best = min(divergences, key=lambda name: figure(divergences[name], samples=1).value)
    return best, _ratio(mine, divergences[best], statistic)


def _groups(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], _Group]:
    groups: dict[tuple[str, str], _Group] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.setting, outcome.label), {})[outcome.question] = outcome
    return groups


def _summary(label: str, setting: str, group: _Group, full: _Group, baseline: _Group) -> Summary:
    outcomes = list(group.values())
    reached = [outcome.is_reached for outcome in outcomes if outcome.is_reached is not None]
    return Summary(
        label=label,
        setting=setting,
        num_questions=len(outcomes),
        num_off_target=reached.count(False) if reached else None,
        charged_ratio=sum(outcome.charged_ratio for outcome in outcomes) / len(outcomes),
        kl=bootstrap_mean([outcome.kl for outcome in outcomes]),
        kl_median=bootstrap_median([outcome.kl for outcome in outcomes]),
        top1=bootstrap_mean([outcome.top1 for outcome in outcomes]),
        f1=_mean([outcome.f1 for outcome in outcomes]),
        f1_share=None if label == FULL else _paired(group, full, lambda outcome: outcome.f1, _ratio),
        exact_match=_mean([outcome.exact_match for outcome in outcomes]),
        rouge_l=None if label == FULL else _mean([outcome.rouge_l for outcome in outcomes]),
        ttft_ratio=bootstrap_median([outcome.ttft_ratio for outcome in outcomes]),
        kl_difference=_paired(group, baseline, lambda outcome: outcome.kl, paired_difference),
        kl_ratio=_paired(group, baseline, lambda outcome: outcome.kl, _ratio),
        f1_difference=_paired(group, baseline, lambda outcome: outcome.f1, paired_difference),
    )


def _mean(values: Sequence[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return bootstrap_mean(known) if known else None


def _paired(
    a: _Group,
    b: _Group,
    figure: Callable[[Outcome], float | None],
    compare: Callable[[list[float], list[float]], Interval | None],
) -> Interval | None:
    """Compare a figure of the questions that both groups have it of; ``None`` where there are none."""
    pairs = [(figure(a[question]), figure(b[question])) for question in a if question in b]
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    return compare([x for x, _ in known], [y for _, y in known]) if known else None


def _ratio(a: Sequence[float], b: Sequence[float], statistic: Statistic = "mean") -> Interval | None:
    is_zero = {"mean": bootstrap_mean, "median": bootstrap_median}[statistic](b, samples=1).value == 0
    return None if is_zero else paired_ratio(a, b, statistic)
