"""What the replay benchmark shows: one table and one plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.rivals.catalogue import Entry
from cachecraft_rag.evaluate.metrics import rouge_l

BASELINE = "transformers"
COLUMNS = (
    "engine",
    "TTFT p50 s",
    "TTFT p95 s",
    "TTFT / full",
    "end to end p50 s",
    "tokens computed",
    "ROUGE-L",
    "peak memory GiB",
    "tokens/s",
)


@dataclass(frozen=True)
class Summary:
    """One engine over the stream.

    Attributes:
        name: Of its entry.
        title: What it is called in the table.
        requests: How many it answered.
        ttft_p50: Seconds to the first token, median.
        ttft_p95: 95th percentile.
        share: Median over requests of its time to the first token over that of plain transformers.
        total_p50: Seconds from question to the end of all bookkeeping, median.
        computed: Tokens computed before the first one, and of how many, means.
        rouge: Mean ROUGE-L to its own full prefill's answers; ``None`` without any.
        peak_bytes: Largest resident memory of its process.
        speed: Tokens per second after the first one.
        failure: Why it can't go on; ``None`` when it can.
        index_s: Seconds that it took to prepare for the chunks before the first question.
        sessions: Runs of the benchmark in which it answered.
    """

    name: str
    title: str
    requests: int = 0
    ttft_p50: float = 0.0
    ttft_p95: float = 0.0
    share: float | None = None
    total_p50: float = 0.0
    computed: tuple[float, float] = (0.0, 0.0)
    rouge: float | None = None
    peak_bytes: int = 0
    speed: float = 0.0
    failure: str | None = None
    index_s: float = 0.0
    sessions: frozenset[int] = frozenset()


def summarise(
    entries: Sequence[Entry],
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    cold: Mapping[str, Mapping[str, str]],
    failures: Mapping[str, str],
    indexed: Mapping[str, float],
) -> list[Summary]:
    """One summary per engine, in the order given.

    Args:
        entries: The engines.
        rows: Answers by engine: the fields of ``Reply``, ``number``, ``id``, ``session`` and ``peak_bytes``.
        cold: Answers of full prefill by ``Entry.cold`` and question.
        failures: Why engines can't go on.
        indexed: Seconds that preparing for the chunks took.
    """
    full = {row["number"]: row["ttft_s"] for row in rows.get(BASELINE, ())}
    found = [_summary(entry, rows.get(entry.name, ()), cold.get(entry.cold, {}), full, failures) for entry in entries]
    return [replace(summary, index_s=indexed.get(summary.name, 0.0)) for summary in found]


def _summary(
    entry: Entry,
    rows: Sequence[Mapping[str, Any]],
    cold: Mapping[str, str],
    full: Mapping[int, float],
    failures: Mapping[str, str],
) -> Summary:
    failure = failures.get(entry.name)
    if not rows:
        return Summary(entry.name, entry.title, failure=failure or "not run")
    ttft = [row["ttft_s"] for row in rows]
    shares = [row["ttft_s"] / full[row["number"]] for row in rows if row["number"] in full]
    rouge = [rouge_l(row["text"], cold[row["id"]]) for row in rows if row["id"] in cold]
    decode_s = sum(row["decode_s"] for row in rows)
    return Summary(
        entry.name,
        entry.title,
        len(rows),
        float(np.percentile(ttft, 50)),
        float(np.percentile(ttft, 95)),
        statistics.median(shares) if shares else None,
        float(np.percentile([row["total_s"] for row in rows], 50)),
        (
            statistics.fmean(row["computed_tokens"] for row in rows),
            statistics.fmean(row["prompt_tokens"] for row in rows),
        ),
        statistics.fmean(rouge) if rouge else None,
        max(row["peak_bytes"] for row in rows),
        sum(max(row["output_tokens"] - 1, 0) for row in rows) / decode_s if decode_s else 0.0,
        failure,
        sessions=frozenset(row["session"] for row in rows),
    )


def _cells(summary: Summary) -> tuple[str, ...]:
    if not summary.requests:
        return (summary.title, *[""] * (len(COLUMNS) - 1))
    return (
        summary.title,
        f"{summary.ttft_p50:.2f}",
        f"{summary.ttft_p95:.2f}",
        "" if summary.share is None else f"{summary.share:.3f}",
        f"{summary.total_p50:.2f}",
        f"{summary.computed[0]:,.0f} of {summary.computed[1]:,.0f}",
        "" if summary.rouge is None else f"{summary.rouge:.3f}",
        f"{summary.peak_bytes / 2**30:.2f}",
        f"{summary.speed:.1f}",
    )


def _notes(summaries: Sequence[Summary]) -> list[str]:
    """What the figures leave out."""
    most = max((summary.requests for summary in summaries), default=0)
    short = [f"{s.title}: {s.requests} of {most} requests" for s in summaries if 0 < s.requests < most]
    ahead = [f"{s.title}: took the chunks in ahead, {s.index_s:.0f} s" for s in summaries if s.index_s >= 1.0]
    full = next((summary.sessions for summary in summaries if summary.name == BASELINE), frozenset())
    apart = [f"{s.title}: not in the same run as plain transformers" for s in summaries if full and s.sessions - full]
    return [*(f"{s.title}: {s.failure}" for s in summaries if s.failure is not None), *short, *ahead, *apart]


def as_rich(summaries: Sequence[Summary], title: str) -> Table:
    """The table for a terminal."""
    table = Table(title=title, caption="\n".join(_notes(summaries)) or None, caption_justify="left")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    for summary in summaries:
        table.add_row(*_cells(summary))
    return table


def as_markdown(summaries: Sequence[Summary]) -> str:
    """The table in Markdown, what it leaves out below."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(_cells, summaries)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join([table, *("- " + note for note in _notes(summaries))])


def plot(summaries: Sequence[Summary], title: str, path: Path) -> None:
    """Write a PNG: a bar to the median, a line to the 95th percentile; ours in another colour."""
    from matplotlib.figure import Figure

    shown = [summary for summary in summaries if summary.requests]
    figure = Figure(figsize=(9, 1.2 + 0.42 * max(len(shown), 1)), layout="constrained")
    axes = figure.add_subplot()
    colours = ["tab:orange" if summary.name.startswith("ours") else "tab:blue" for summary in shown]
    places = range(len(shown))
    axes.barh(places, [summary.ttft_p50 for summary in shown], color=colours)
    axes.hlines(places, [s.ttft_p50 for s in shown], [s.ttft_p95 for s in shown], color="black", linewidth=1)
    axes.plot([s.ttft_p95 for s in shown], list(places), "|", color="black")
    axes.set_yticks(places, [summary.title for summary in shown])
    axes.invert_yaxis()
    axes.set_xlabel("seconds to the first token: median, and 95th percentile")
    axes.set_title(title)
    figure.savefig(path, dpi=150)
