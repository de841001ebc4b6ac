"""An evaluation for people: tables for the terminal and in Markdown, every answer as CSV, a plot."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cachecraft_rag.evaluate.bootstrap import Interval
from cachecraft_rag.evaluate.run import FULL, PUBLISHED, Outcome
from cachecraft_rag.evaluate.summary import DEFAULT, Summary, against_published, summarise


@dataclass(frozen=True)
class _Sheet:
    """A table before it is known where it will be shown; its first column is the setting, its second a policy."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def as_rich(self) -> Table:
        """Narrow: a setting has a line of its own, and intervals stand below their figure."""
        table = Table(title=self.title, title_justify="left", box=None, padding=(0, 1, 0, 0))
        for index, name in enumerate(self.header[1:]):
            table.add_column(name, justify="right" if index else "left", no_wrap=index == 0)
        setting = ""
        for row in self.rows:
            if row[0] != setting:
                setting = row[0]
                table.add_row(Text(setting, style="bold"))
            table.add_row(*(Text(cell.replace(" [", "\n[")) for cell in row[1:]))
        return table

    def as_markdown(self) -> str:
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        cells = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        return "\n".join([f"**{self.title}**", "", *cells])


def as_rich(outcomes: Sequence[Outcome], baseline: str = DEFAULT, published: Sequence[str] = PUBLISHED) -> Group:
    """Tables for the terminal.

    Args:
        outcomes: Of all questions and variants.
        baseline: Label that the others are compared with.
        published: Labels of the selectors that the baseline is held against.
    """
    return Group(*(sheet.as_rich() for sheet in _sheets(outcomes, baseline, published)))


def as_markdown(
    outcomes: Sequence[Outcome], title: str, baseline: str = DEFAULT, published: Sequence[str] = PUBLISHED
) -> str:
    """The same tables with a title; other arguments as in ``as_rich``."""
    sheets = [sheet.as_markdown() for sheet in _sheets(outcomes, baseline, published)]
    return "\n\n".join([f"# {title}", *sheets, _LEGEND]) + "\n"


def write_csv(outcomes: Sequence[Outcome], path: Path) -> None:
    """Every outcome as a line; nothing stands for ``None``."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Outcome)])
        writer.writeheader()
        writer.writerows(outcome.as_dict() for outcome in outcomes)


def check_plot() -> None:
    """Make sure that a plot can be drawn.

    Raises:
        ImportError: The ``bench`` extra is not installed.
    """
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'cachecraft-rag[bench]'") from error


def write_plot(outcomes: Sequence[Outcome], path: Path, title: str, baseline: str = DEFAULT) -> None:
    """Mean and median divergence over what was computed, one line per label, intervals as bars; PNG.

    Raises:
        ImportError: The ``bench`` extra is not installed.
    """
    check_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    summaries = [summary for summary in summarise(outcomes, baseline) if summary.label != FULL]
    for axes, name in zip(figure.subplots(1, 2, sharex=True), ("mean", "median"), strict=True):
        for label in dict.fromkeys(summary.label for summary in summaries):
            line = sorted((s for s in summaries if s.label == label), key=lambda summary: summary.charged_ratio)
            _draw(axes, label, line, name, is_thick=label == baseline)
        if any(summary.kl.value > 0 and summary.kl_median.value > 0 for summary in summaries):
            axes.set_yscale("log")
        axes.set_xlabel("token-layers computed / those of full prefill")
        axes.set_ylabel(f"KL to full prefill, {name} (nats per token)")
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def write_report(
    outcomes: Sequence[Outcome],
    folder: Path,
    title: str,
    baseline: str = DEFAULT,
    published: Sequence[str] = PUBLISHED,
) -> list[Path]:
    """Write ``answers.csv``, ``summary.md`` and ``divergence.png`` into a folder, which is made; returns their paths.

    Raises:
        ImportError: The ``bench`` extra is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("answers.csv", "summary.md", "divergence.png")]
    write_csv(outcomes, paths[0])
    paths[1].write_text(as_markdown(outcomes, title, baseline, published), encoding="utf-8")
    write_plot(outcomes, paths[2], title, baseline)
    return paths


_LEGEND = (
    "KL: divergence from full prefill over the tokens of its own answer, in nats per token. top-1: tokens on whose "
    "most likely value both agree. charged: token-layers computed before the first token, selection passes included, "
    "over those of full prefill. TTFT: time to first token over that of full prefill, median. Brackets: 95 % bootstrap "
    "intervals over questions."
)


def _sheets(outcomes: Sequence[Outcome], baseline: str, published: Sequence[str]) -> list[_Sheet]:
    summaries = summarise(outcomes, baseline)
    reused = [summary for summary in summaries if summary.label != FULL]
    sheets = [
        _Sheet(
            f"Divergence from full prefill, {_questions(summaries)}",
            ("setting", "policy", "charged", "KL mean", "KL median", "top-1"),
            [(s.setting, s.label, _charged(s), f"{s.kl:.4f}", f"{s.kl_median:.4f}", _cell(s.top1)) for s in reused],
        ),
        _Sheet(
            f"Compared with {baseline}",
            ("setting", "policy", "KL, difference", "KL, ratio", "F1, difference"),
            [
                (s.setting, s.label, f"{s.kl_difference:.4f}", _cell(s.kl_ratio), _cell(s.f1_difference))
                for s in reused
                if s.kl_difference is not None
            ],
        ),
        _Sheet(
            "Answers",
            ("setting", "policy", "F1", "F1 / full", "exact match"),
            [
                (s.setting, s.label, *map(_cell, (s.f1, s.f1_share, s.exact_match)))
                for s in summaries
                if s.f1 is not None
            ],
        ),
        _Sheet(
            "Likeness to full prefill's answers, and speed",
            ("setting", "policy", "ROUGE-L", "TTFT / full"),
            [(s.setting, s.label, *map(_cell, (s.rouge_l, s.ttft_ratio))) for s in reused],
        ),
        _Sheet(
            f"{baseline} against the best published selector",
            ("setting", "best", "by", "questions", "KL, ratio"),
            [
                (rival.setting, best, by, str(rival.num_questions), _cell(ratio))
                for rival in against_published(outcomes, baseline, published)
                for best, by, ratio in (
                    (rival.best_mean, "mean", rival.mean_ratio),
                    (rival.best_median, "median", rival.median_ratio),
                )
            ],
        ),
    ]
    return [sheet for sheet in sheets if sheet.rows]


def _questions(summaries: Sequence[Summary]) -> str:
    counts = sorted({summary.num_questions for summary in summaries})
    return f"{' to '.join(map(str, (counts[0], counts[-1])[: len(counts)]))} questions"


def _charged(summary: Summary) -> str:
    off = f" ({summary.num_off_target} of {summary.num_questions} off target)" if summary.num_off_target else ""
    return f"{summary.charged_ratio:.3f}{off}"


def _cell(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval:.3f}"


def _draw(axes: Any, label: str, line: Sequence[Summary], name: str, is_thick: bool) -> None:
    intervals = [summary.kl if name == "mean" else summary.kl_median for summary in line]
    below = [interval.value - interval.low for interval in intervals]
    above = [interval.high - interval.value for interval in intervals]
    axes.errorbar(
        [summary.charged_ratio for summary in line],
        [interval.value for interval in intervals],
        yerr=[[max(0.0, length) for length in below], [max(0.0, length) for length in above]],
        label=label,
        marker="o",
        capsize=3,
        linewidth=2.5 if is_thick else 1.2,
    )
