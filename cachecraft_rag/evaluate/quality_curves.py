"""Quality and speed by setting and by chunk size: curves of answers compared with full prefill's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

from tqdm.auto import tqdm

from cachecraft_rag.config import Behind, RecomputeConfig
from cachecraft_rag.errors import PromptTooLongError
from cachecraft_rag.evaluate.bootstrap import Interval, bootstrap_mean, bootstrap_median, paired_difference
from cachecraft_rag.evaluate.curve import Curve, Point
from cachecraft_rag.evaluate.questions import Question
from cachecraft_rag.evaluate.run import FULL, Evaluator, Outcome, Variant

BEHIND: tuple[Behind, ...] = get_args(Behind)
"""What chunks can be computed behind."""

_LABEL = "measured"


def behind_curve(
    evaluator: Evaluator,
    questions: Sequence[Question],
    recompute: RecomputeConfig,
    current: Behind,
    *,
    show_progress: bool = False,
) -> Curve:
    """Divergence against what chunks are computed behind; every point but the current one has ``kl_change``.

    Args:
        evaluator: Compares with full prefill; it makes engines for the others and keeps them until it is closed.
        questions: The questions.
        recompute: Policy, ratio and offset.
        current: What the others are compared with.
        show_progress: Whether to show a progress bar.

    Raises:
        ValueError: As in ``ratio_curve``.
    """
    variants = [Variant(behind, recompute, with_answer=False, behind=behind) for behind in BEHIND]
    found = _by_label(evaluator, questions, variants, "behind", show_progress)
    points = _compared(found, dict(enumerate(BEHIND)), current)
    title = f"Divergence by what chunks are computed behind, ratio {recompute.ratio:g}, offset {recompute.offset:g}"
    sample = f"{len(found[FULL])} questions"
    return Curve("behind", title, "chunks computed behind", ("kl",), points, sample, BEHIND)


def offset_curve(
    evaluator: Evaluator,
    questions: Sequence[Question],
    recompute: RecomputeConfig,
    offsets: Iterable[float],
    *,
    behind: Behind | None = None,
    show_progress: bool = False,
) -> Curve:
    """Divergence against the strength of the offset; every point but the one of ``recompute`` has ``kl_change``.

    Args:
        evaluator: Compares with full prefill.
        questions: The questions.
        recompute: Policy, ratio, and the offset that the others are compared with.
        offsets: Offsets in 0 to 1, where 0 is off.
        behind: What chunks are computed behind; ``None`` takes the engine's.
        show_progress: Whether to show a progress bar.

    Raises:
        ValueError: As in ``ratio_curve``.
    """
    labels = {offset: str(offset) for offset in sorted({*offsets, recompute.offset})}
    variants = [Variant(label, recompute.changed(offset=x), None, False, behind) for x, label in labels.items()]
    found = _by_label(evaluator, questions, variants, "offsets", show_progress)
    points = _compared(found, labels, labels[recompute.offset])
    title = f"Divergence by offset, ratio {recompute.ratio:g}" + (
        f", chunks computed behind: {behind}" if behind else ""
    )
    return Curve("offset", title, "offset", ("kl",), points, f"{len(found[FULL])} questions")


def ratio_curve(
    evaluator: Evaluator,
    questions: Sequence[Question],
    recompute: RecomputeConfig,
    ratios: Sequence[float],
    *,
    behind: Behind | None = None,
    with_answer: bool = False,
    show_progress: bool = False,
) -> Curve:
    """Quality against the recompute ratio.

    Args:
        evaluator: Compares with full prefill.
        questions: The questions.
        recompute: Policy and its settings; its ratio is not looked at.
        ratios: Ratios in 0 to 1.
        behind: What chunks are computed behind; ``None`` takes the engine's.
        with_answer: Whether answers are generated and held against the right ones.
        show_progress: Whether to show a progress bar.

    Raises:
        ValueError: All questions are longer than the context window, or see ``Evaluator``.
    """
    settings = {ratio: recompute.changed(ratio=ratio) for ratio in sorted(set(ratios))}
    points, num_questions = _by_setting(evaluator, questions, settings, with_answer, behind, "ratios", show_progress)
    drawn = ("kl", "ttft_ratio", *(("f1",) if with_answer else ()))
    title = f"Quality and time by recompute ratio, policy {recompute.policy}"
    return Curve("ratio", title, "recompute ratio", drawn, points, f"{num_questions} questions")


def target_curve(
    evaluator: Evaluator,
    questions: Sequence[Question],
    recompute: RecomputeConfig,
    targets: Sequence[float],
    *,
    show_progress: bool = False,
) -> Curve:
    """Measured divergence against the target divergence that requests were given; needs a calibrated engine.

    Args:
        evaluator: Compares with full prefill.
        questions: The questions; better others than those of the calibration.
        recompute: Policy and its settings; its ratio is not looked at.
        targets: Targets in nats per token.
        show_progress: Whether to show a progress bar.

    Raises:
        ValueError: Nothing is calibrated for the policy, or as in ``ratio_curve``.
    """
    settings = {target: recompute.changed(target_divergence=target) for target in sorted(set(targets))}
    points, num_questions = _by_setting(evaluator, questions, settings, False, None, "targets", show_progress)
    title = "Measured divergence by target divergence"
    return Curve("target", title, "target (nats per token)", ("kl", "charged"), points, f"{num_questions} questions")


def chunk_size_curve(
    evaluator: Evaluator,
    samples: Mapping[int, Sequence[Question]],
    recompute: RecomputeConfig,
    *,
    with_answer: bool = False,
    show_progress: bool = False,
) -> Curve:
    """Quality and throughput against chunk size; sizes that give the same chunks are measured once.

    Args:
        evaluator: Compares with full prefill.
        samples: The same questions, in the same order, over chunks of every size; see ``resplit``.
        recompute: Policy and ratio.
        with_answer: Whether answers are generated and held against the right ones.
        show_progress: Whether to show a progress bar.

    Raises:
        ValueError: As in ``ratio_curve``.
    """
    sizes = sorted(samples)
    same = {size: next(other for other in sizes if samples[other] == samples[size]) for size in sizes}
    measured = sorted(set(same.values()))
    found: dict[int, list[tuple[Outcome, Outcome]]] = {size: [] for size in measured}
    variant = Variant(_LABEL, recompute, with_answer=with_answer)
    total = len(samples[measured[0]])
    with tqdm(total=total * len(measured), desc="chunk sizes", unit="question", disable=not show_progress) as bar:
        for number in range(total):
            pairs = {}
            for size in (*measured[number % len(measured) :], *measured[: number % len(measured)]):
                outcomes = _ask(evaluator, samples[size][number], [variant])
                bar.update()
                if outcomes is not None:
                    pairs[size] = (outcomes[0], outcomes[1])
            if len(pairs) == len(measured):  # a question that is too long at one size would favour the others
                for size, pair in pairs.items():
                    found[size].append(pair)
    num_questions = _check_some(len(found[measured[0]]), total)
    figures = {size: _chunk_size_figures(pairs) for size, pairs in found.items()}
    points = tuple(Point(size, figures[same[size]]) for size in sizes)
    drawn = ("kl", "tokens_per_s", "ttft_s", *(("f1",) if with_answer else ()))
    title, x_label = "Quality and throughput by chunk size", "chunk size (tokens)"
    sample = f"{num_questions} questions, about as much text at every size"
    return Curve("chunk_size", title, x_label, drawn, points, sample)


def _by_setting(
    evaluator: Evaluator,
    questions: Sequence[Question],
    settings: Mapping[float, RecomputeConfig],
    with_answer: bool,
    behind: Behind | None,
    name: str,
    show_progress: bool,
) -> tuple[tuple[Point, ...], int]:
    variants = [Variant(str(x), recompute, None, with_answer, behind) for x, recompute in settings.items()]
    found = _by_label(evaluator, questions, variants, name, show_progress)
    return tuple(Point(x, _figures(found[str(x)], found[FULL])) for x in settings), len(found[FULL])


def _by_label(
    evaluator: Evaluator, questions: Sequence[Question], variants: Sequence[Variant], name: str, show_progress: bool
) -> dict[str, list[Outcome]]:
    """Outcomes of full prefill and of every variant by its label, question after question; too long ones are left out.

    By label, as the evaluator may take variants in another order.
    """
    found: dict[str, list[Outcome]] = {label: [] for label in (FULL, *(variant.label for variant in variants))}
    for question in tqdm(questions, desc=name, unit="question", disable=not show_progress):
        for outcome in _ask(evaluator, question, variants) or ():
            found[outcome.label].append(outcome)
    _check_some(len(found[FULL]), len(questions))
    return found


def _compared(found: Mapping[str, Sequence[Outcome]], labels: Mapping[float, str], current: str) -> tuple[Point, ...]:
    """A point per label, all but the current one with the difference from it."""
    divergences = {label: [outcome.kl for outcome in found[label]] for label in labels.values()}
    points = []
    for x, label in labels.items():
        figures = _figures(found[label], found[FULL])
        if label != current:
            figures["kl_change"] = paired_difference(divergences[label], divergences[current])
        points.append(Point(x, figures))
    return tuple(points)


def _ask(evaluator: Evaluator, question: Question, variants: Sequence[Variant]) -> list[Outcome] | None:
    """Outcomes of full prefill and all variants; ``None`` for a question that is too long."""
    try:
        return list(evaluator.run(question, variants))
    except PromptTooLongError:
        return None


def _check_some(number: int, total: int) -> int:
    if number == 0:
        raise ValueError(f"questions: all {total} are longer than the model's context window")
    return number


def _figures(outcomes: Sequence[Outcome], full: Sequence[Outcome]) -> dict[str, Interval]:
    figures = {
        "kl": _mean(outcomes, lambda outcome: outcome.kl),
        "charged": _mean(outcomes, lambda outcome: outcome.charged_ratio),
        "ttft_s": _median(outcomes, lambda outcome: outcome.ttft_s),
        "ttft_ratio": _median(outcomes, lambda outcome: outcome.ttft_ratio),
    }
    for name, items in (("f1", outcomes), ("full_f1", full)):
        if outcomes[0].f1 is not None:
            figures[name] = _mean(items, lambda outcome: outcome.f1 or 0.0)
    return figures


def _chunk_size_figures(pairs: Sequence[tuple[Outcome, Outcome]]) -> dict[str, Interval]:
    reused = [outcome for _, outcome in pairs]
    speed = _mean(reused, lambda outcome: outcome.prompt_tokens / outcome.ttft_s)
    return {**_figures(reused, [full for full, _ in pairs]), "tokens_per_s": speed}


def _mean(outcomes: Sequence[Outcome], figure: Callable[[Outcome], float]) -> Interval:
    return bootstrap_mean([figure(outcome) for outcome in outcomes])


def _median(outcomes: Sequence[Outcome], figure: Callable[[Outcome], float]) -> Interval:
    return bootstrap_median([figure(outcome) for outcome in outcomes])
