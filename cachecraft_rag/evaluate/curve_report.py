"""Curves for people: a table in Markdown, every number as CSV, a plot each."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from cachecraft_rag.evaluate.bootstrap import Interval
from cachecraft_rag.evaluate.curve import FIGURES, Curve
from cachecraft_rag.evaluate.report import check_plot

_FORMATS = {"kl": ".4f", "kl_change": ".4f", "tokens_per_s": ".0f", "load_s": ".4f"}


def as_markdown(curve: Curve) -> str:
    """A table with a title; intervals in brackets."""
    header = [curve.x_label, *(FIGURES[name] for name in curve.names)]
    figures = [[cell(name, point.figures.get(name)) for name in curve.names] for point in curve.points]
    rows = [[curve.label(point.x), *cells] for point, cells in zip(curve.points, figures, strict=True)]
    lines = ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rows)]
    return "\n".join([f"**{curve.title}** ({curve.sample})", "", *lines])


def cell(name: str, interval: Interval | None) -> str:
    """A figure with as many digits as it deserves; nothing stands for ``None``."""
    return "" if interval is None else format(interval, _FORMATS.get(name, ".3f"))


def write_csv(curves: Sequence[Curve], path: Path) -> None:
    """Every figure of every point as a line: curve, x, figure, value, low, high."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("curve", "x", "figure", "value", "low", "high"))
        for curve in curves:
            for point in curve.points:
                for name, interval in point.figures.items():
                    writer.writerow(
                        (curve.name, curve.label(point.x), name, interval.value, interval.low, interval.high)
                    )


def write_plot(curve: Curve, path: Path, title: str, chosen: float | str | None = None) -> None:
    """The drawn figures of a curve beside each other, intervals as bars, the chosen value as a dashed line; PNG.

    Values that are words have no line between them.

    Raises:
        ImportError: The ``bench`` extra is not installed.
    """
    check_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(curve.drawn) + 1, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, len(curve.drawn), squeeze=False)[0], curve.drawn, strict=True):
        xs, intervals = [x for x, _ in curve.values(name)], [interval for _, interval in curve.values(name)]
        below = [max(0.0, interval.value - interval.low) for interval in intervals]
        above = [max(0.0, interval.high - interval.value) for interval in intervals]
        values, style = [interval.value for interval in intervals], "none" if curve.labels else "-"
        axes.errorbar(xs, values, yerr=[below, above], marker="o", linestyle=style, capsize=3)
        axes.set_ylim(bottom=0)
        axes.set_xticks(xs, [curve.label(x) for x in xs])
        axes.set_xlabel(curve.x_label)
        axes.set_ylabel(FIGURES[name])
        axes.grid(alpha=0.3)
        if chosen is not None:
            axes.axvline(curve.x_of(chosen), linestyle="--", color="tab:orange", label="recommended")
            axes.legend()
    figure.suptitle(f"{title}\n{curve.title}", fontsize="medium")
    figure.savefig(path, dpi=150)


def write_curves(
    curves: Sequence[Curve],
    folder: Path,
    title: str,
    *,
    name: str = "figures",
    head: Sequence[str] = (),
    chosen: Mapping[str, float | str] | None = None,
) -> list[Path]:
    """Write ``<name>.csv``, ``<name>.md`` and ``<curve>.png`` into a folder, which is made; returns their paths.

    Args:
        curves: The curves.
        folder: Where the files go.
        title: Title of the Markdown file and of every plot.
        name: Name of the two files that hold all curves.
        head: Parts of the Markdown file before the tables.
        chosen: Values to mark in the plots, by name of the curve.

    Raises:
        ImportError: The ``bench`` extra is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.csv", folder / f"{name}.md"]
    write_csv(curves, paths[0])
    parts = [f"# {title}", *head, *(as_markdown(curve) for curve in curves), _LEGEND]
    paths[1].write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    for curve in curves:
        paths.append(folder / f"{curve.name}.png")
        write_plot(curve, paths[-1], title, (chosen or {}).get(curve.name))
    return paths


_LEGEND = "Brackets: 95 % bootstrap intervals over questions or requests."
