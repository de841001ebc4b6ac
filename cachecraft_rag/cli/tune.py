"""``cachecraft tune``: recommend settings for a model from a sample of questions and documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cachecraft_rag.cli import output
from cachecraft_rag.cli.arguments import numbers, settings
from cachecraft_rag.cli.targets import check_folder
from cachecraft_rag.config import EngineConfig
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.store_config import StoreConfig

if TYPE_CHECKING:
    from cachecraft_rag.evaluate.tune import Tuning


def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, alias or hub id.")],
    questions: Annotated[Path, typer.Argument(metavar="QUESTIONS.jsonl", help="id, question, answers, docs per line.")],
    max_divergence: Annotated[
        float | None,
        typer.Option(
            "--max-divergence",
            help="Mean KL divergence from full prefill allowed, nats per token; else that of the preset balanced.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Settings to start from; the others stay.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="Of cachecraft calibrate: tries targets beside ratios."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the files go.")] = Path("tuning"),
    quick: Annotated[bool, typer.Option("--quick", help="A small sample: to try it, not to decide by.")] = False,
    number: Annotated[
        int | None, typer.Option("--questions", min=1, help="How many questions, drawn by the seed.")
    ] = None,
    sizes: Annotated[str | None, typer.Option("--chunk-sizes", help="In tokens, by commas.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Most tokens of a question's chunks together.")
    ] = None,
    answers: Annotated[
        bool, typer.Option("--answers/--no-answers", help="Also generate answers and hold them against the right ones.")
    ] = False,
    instruction: Annotated[str | None, typer.Option("--instruction", help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")] = 32,
    disk: Annotated[
        Path | None, typer.Option("--disk", metavar="DIR", help="On the disk whose prefetch window is measured.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="A torch dtype, or auto.")] = "auto",
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Host memory for chunks; twice that in all.")
    ] = "4GiB",
    seed: Annotated[int, typer.Option("--seed", help="Draws questions, chunks and requests.")] = 0,
) -> None:
    """Recommend settings by measured curves.

    They are: chunk size, what chunks are computed behind, offset, recompute ratio (or target), hot share and prefetch
    window.

    Documents are cut anew at every chunk size; give them whole, and as many questions as you can: 20 or more.

    Prints what is recommended and why, and writes config.json, which EngineConfig.from_file reads, the curves (CSV,
    Markdown) and a plot of each (PNG).
    """
    from cachecraft_rag.engine import CacheCraftEngine
    from cachecraft_rag.evaluate.curves import FULL_EXTENT, QUICK_EXTENT, CurveMaker
    from cachecraft_rag.evaluate.quality_curves import BEHIND
    from cachecraft_rag.evaluate.questions import INSTRUCTION, load_sources
    from cachecraft_rag.evaluate.report import check_plot
    from cachecraft_rag.evaluate.tune import tune as recommend
    from cachecraft_rag.store.build import open_store

    try:
        check_plot()
        base = EngineConfig() if config is None else EngineConfig.from_file(config)
        if calibration is not None:
            base = base.model_copy(update={"calibration": str(calibration)})
        extent = QUICK_EXTENT if quick else FULL_EXTENT
        extent = replace(
            extent,
            questions=number or extent.questions,
            context_tokens=context or extent.context_tokens,
            chunk_sizes=extent.chunk_sizes if sizes is None else tuple(numbers(sizes, int, "--chunk-sizes")),
        )
        for size in extent.chunk_sizes:
            settings(EngineConfig, {"chunk_tokens": size}, {"chunk_tokens": "--chunk-sizes"})
        sources = load_sources(questions, seed=seed)
        tiers = {"device_size": 0, "cold": {"size": memory}}
        own = settings(StoreConfig, tiers, {"cold.size": "--memory"})  # the user's is not touched
        check_folder(out, "--out")
        if disk is not None:
            check_folder(disk, "--disk")
        with (
            CacheCraftEngine.from_pretrained(model, base, dtype=dtype, store=open_store(own)) as engine,
            CurveMaker(
                engine,
                sources,
                extent,
                instruction=INSTRUCTION if instruction is None else instruction,
                max_new_tokens=max_new_tokens,
                with_answer=answers,
                disk=disk,
                memory=own.cold.size // len(BEHIND),
                seed=seed,
                show_progress=True,
            ) as maker,
        ):
            tuning = recommend(maker, base, max_divergence)
        paths = tuning.write(out, f"{Path(model).name} on {questions.name}")
    except (ValueError, ImportError, OSError, RuntimeError, CacheCraftError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    _show(tuning)
    for path in paths:
        typer.echo(f"wrote {path}")


def _show(tuning: Tuning) -> None:
    table = output.new_table("setting", "now", "recommended", "why", numbers=("now", "recommended"), texts=("why",))
    for item in tuning.recommendations:
        table.add_row(*item.texts)
    output.show(table)
    for note in tuning.notes:
        Console().print(f"Note: {note}", markup=False, highlight=False)
