"""How time and memory grow with the context, the chunks, what is stored, and the users; each with its exponent.

    python benchmarks/growth.py --model FOLDER [--parts context chunks stored users memory] [--out growth.md]

An exponent of 1 grows in proportion, 0 not at all: the slope of a line through the logarithms. A context of 32k tokens
is not run but simulated: what a token costs and what a pair of tokens costs, as measured on shorter ones, times how
many there are. Stored chunks by the thousand are small ones of a tiny model with random weights, as only their number
counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import growth_parts as parts
from benchmarks.fit import exponent
from benchmarks.growth_memory import measure_memory
from benchmarks.growth_parts import Row
from benchmarks.workload import machine
from cachecraft_rag import CacheCraftEngine, EngineConfig

PARTS = ("context", "chunks", "stored", "users", "memory")


def main() -> None:
    """Measure the parts one after the other, and write each table as it is there."""
    arguments = _arguments()
    console = Console(width=140)
    head = f"{arguments.model}, {arguments.dtype}; {machine()}"
    console.print(head, highlight=False)
    arguments.out.write_text(head + "\n", encoding="utf-8")
    for name, measure in _measures(arguments).items():
        if name in arguments.parts:
            title, size, rows, note = measure()
            console.print(as_rich(title, size, rows, note))
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(f"\n## {title}\n\n{as_markdown(size, rows)}\n{note and chr(10) + note + chr(10)}")
    console.print(f"wrote {arguments.out}")


Measured = tuple[str, str, list[Row], str]
"""Title, what grows, figures by size, and a remark."""


def _measures(arguments: argparse.Namespace) -> dict[str, Callable[[], Measured]]:
    def with_engine(measure: Callable[[CacheCraftEngine], list[Row]], keep_exact: bool = False) -> list[Row]:
        config = EngineConfig.model_validate({"keep_exact": keep_exact, "store": {"cold": {"size": arguments.memory}}})
        with CacheCraftEngine.from_pretrained(arguments.model, config, dtype=arguments.dtype) as engine:
            return measure(engine)

    def context() -> Measured:
        rows = with_engine(lambda engine: parts.context(engine, arguments.contexts, arguments.repeats))
        note = "Context 32,768 is simulated from counts and measured costs; it takes no part in the exponents."
        return "Context, in chunks of 512 tokens", "tokens of context", rows, note

    def chunks() -> Measured:
        rows = with_engine(lambda engine: parts.chunks(engine, arguments.chunks, arguments.context, arguments.repeats))
        return f"Chunks, of {arguments.context} tokens in all", "chunks", rows, ""

    def stored() -> Measured:
        rows = parts.stored(arguments.stored, arguments.repeats)
        note = "Chunks of 80 tokens of a tiny model, 8 of them in every prompt, found by their text."
        return "Stored chunks", "chunks stored", rows, note

    def users() -> Measured:
        rows = with_engine(lambda engine: parts.users(engine, arguments.users, arguments.user_context))
        note = (
            "One request each, all at the same time; beside it the same requests by full prefill, one after the other."
        )
        return f"Users, {arguments.user_context} tokens of context each", "users", rows, note

    def memory() -> Measured:
        rows = measure_memory(arguments.model, arguments.dtype, arguments.contexts, arguments.tier)
        note = (
            "Peak of a process of its own, less what the interpreter and its libraries hold after a tiny model has "
            "answered; the bound is weights + tiers + one prompt's KV + 15 %."
        )
        return "Memory", "tokens of context", rows, note

    return {"context": context, "chunks": chunks, "stored": stored, "users": users, "memory": memory}


def exponents(rows: list[Row]) -> dict[str, float]:
    """Of every column whose figures are positive, by its name; simulated rows are left out."""
    measured = [row for row in rows if not row.is_simulated]
    if len({row.size for row in measured}) < 2:
        return {}
    sizes = [float(row.size) for row in measured]
    columns = {name: [row.figures[name] for row in measured] for name in measured[0].figures}
    return {name: exponent(sizes, values) for name, values in columns.items() if min(values) > 0}


def _cells(size: str, rows: list[Row]) -> list[tuple[str, ...]]:
    """Head, one line per size, and the exponents."""
    found = exponents(rows)
    names = list(rows[0].figures)
    lines = [
        (f"{row.size:,}{' (simulated)' if row.is_simulated else ''}", *(f"{row.figures[name]:.4g}" for name in names))
        for row in rows
    ]
    powers = [f"{found[name]:.2f}" if name in found else "" for name in names]
    return [(size, *names), *lines, ("exponent", *powers)]


def as_rich(title: str, size: str, rows: list[Row], note: str) -> Table:
    """The table for a terminal."""
    head, *lines = _cells(size, rows)
    table = Table(title=title, caption=note or None)
    for column in head:
        table.add_column(column, justify="right")
    for number, line in enumerate(lines, 2):
        table.add_row(*line, end_section=number == len(lines))
    return table


def as_markdown(size: str, rows: list[Row]) -> str:
    """The table in Markdown."""
    head, *lines = _cells(size, rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ("---",) * len(head), *lines])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder, alias or hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="torch dtype (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("growth.md"), help="default: %(default)s")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 7680], help="multiples of 512")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 20])
    parser.add_argument("--context", type=int, default=2560, help="of the part chunks (default: %(default)s)")
    parser.add_argument("--stored", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--user-context", type=int, default=1024, help="of every user (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="requests per figure (default: %(default)s)")
    parser.add_argument("--memory", default="4GiB", help="for stored chunks (default: %(default)s)")
    parser.add_argument("--tier", default="64MiB", help="for stored chunks, in the part memory (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
