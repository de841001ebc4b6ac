"""How figures are written for people and for machines."""

from __future__ import annotations

import json
from datetime import datetime

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: int) -> str:
    """Bytes in the largest unit that leaves at least 1: ``"1.5 GiB"``."""
    value, unit = float(nbytes), 0
    while round(value, 1) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{nbytes} B"


def moment(seconds: float) -> str:
    """Unix time as local date and time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def plain(text: str) -> Text:
    """Text of a stranger: no markup, and nothing that a terminal would obey."""
    return Text("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text))


def entries(number: int) -> str:
    """``"1 entry"``, ``"1,234 entries"``."""
    return f"{number:,} {'entry' if number == 1 else 'entries'}"


def left_out(number: int) -> str:
    """What is said of questions that were not asked."""
    return f"{number} questions left out: longer than the model's context window"


def new_table(*columns: str, numbers: tuple[str, ...] = (), texts: tuple[str, ...] = ()) -> Table:
    """An empty table: columns of numbers stand to the right, those of long texts take as many lines as they need."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        justify: JustifyMethod = "right" if column in numbers else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column not in texts)
    return table


def show(table: Table) -> None:
    """Print a table."""
    Console().print(table)


def show_json(value: object) -> None:
    """Print a value as JSON, and nothing else."""
    typer.echo(json.dumps(value, indent=2))
