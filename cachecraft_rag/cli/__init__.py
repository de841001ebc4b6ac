"""The ``cachecraft`` command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from cachecraft_rag.cli import bench, calibrate, evaluate, store, tune

app = typer.Typer(
    name="cachecraft",
    help="Chunk caching for retrieval-augmented generation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # they may hold a master key
)
app.add_typer(store.app, name="store")
app.command("bench")(bench.bench)
app.command("evaluate")(evaluate.evaluate)
app.command("calibrate")(calibrate.calibrate)
app.command("tune")(tune.tune)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"cachecraft-rag {version('cachecraft-rag')}")
        raise typer.Exit


@app.callback()
def cachecraft(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Chunk caching for retrieval-augmented generation."""
