"""``cachecraft calibrate``: measure what a model's divergence from full prefill is predicted from."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import typer

from cachecraft_rag.calibration import Calibration
from cachecraft_rag.cli import output
from cachecraft_rag.cli.arguments import settings
from cachecraft_rag.cli.targets import check_file
from cachecraft_rag.config import EncodeConfig, EngineConfig, RecomputeConfig
from cachecraft_rag.errors import CacheCraftError

if TYPE_CHECKING:
    from cachecraft_rag.evaluate.calibrate import Measurement


def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, alias or hub id.")],
    questions: Annotated[Path, typer.Argument(metavar="QUESTIONS.jsonl", help="id, question, answers, docs per line.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the calibration goes.")] = Path(
        "calibration.json"
    ),
    policy: Annotated[str, typer.Option("--policy", help="Selection policy.")] = RecomputeConfig().policy,
    behind: Annotated[
        str, typer.Option("--behind", help="What chunks are computed behind, as the engine will be set.")
    ] = EncodeConfig().behind,
    number: Annotated[int, typer.Option("--questions", min=2, help="How many questions, drawn by the seed.")] = 50,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=1, help="Longest answer.")] = 24,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="Length of chunks cut.")] = 512,
    num_chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks per question, of documents cut.")] = 8,
    dtype: Annotated[str, typer.Option("--dtype", help="A torch dtype, or auto.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Draws questions, and the chunks of long documents.")] = 0,
) -> None:
    """Measure how far answers drift from full prefill's, for targets and presets of RecomputeConfig.

    Take questions and passages like those to come. The file is good for this model, dtype included, this policy and
    these settings; an engine refuses it for others.

    Documents without a text are looked up in QUESTIONS_docs.jsonl; questions with spans have theirs cut into chunks.
    """
    from cachecraft_rag.engine import CacheCraftEngine
    from cachecraft_rag.evaluate.calibrate import check, fit, fit_deviation, fitting, measure
    from cachecraft_rag.evaluate.questions import load_questions

    try:
        recompute = settings(RecomputeConfig, {"policy": policy}, {"policy": "--policy"})
        config = settings(EngineConfig, {"encode": {"behind": behind}}, {"encode.behind": "--behind"})
        check_file(out, "--out")
        with CacheCraftEngine.from_pretrained(model, config, dtype=dtype) as engine:
            limits = {"limit": number, "seed": seed, "chunk_tokens": chunk_tokens, "num_chunks": num_chunks}
            asked = load_questions(questions, engine.prompts, **limits)
            prompts = [question.prompt() for question in asked]
            check(engine, prompts, recompute=recompute)
            prompts = fitting(engine, prompts)
            regressor = fit_deviation(engine, prompts, show_progress=True)
            found = measure(
                engine,
                prompts,
                answer_tokens=answer_tokens,
                recompute=recompute,
                deviation=regressor,
                show_progress=True,
            )
            calibration = fit(engine, found, recompute=recompute, deviation=regressor)
            calibration.save(out)
    except (ValueError, ImportError, OSError, RuntimeError, CacheCraftError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    _show(calibration, found)
    if len(prompts) < len(asked):
        typer.echo(output.left_out(len(asked) - len(prompts)))
    typer.echo(f"predicted from {regressor.num_tokens} tokens: {regressor.explained:.0%} of how stored values differ")
    typer.echo(f"wrote {out}")


def _show(calibration: Calibration, found: list[Measurement]) -> None:
    """What was measured at every ratio beside what will be predicted for it."""
    names = ("ratio", "residual", "divergence", "predicted")
    table = output.new_table(*names, numbers=names)
    for ratio in sorted({item.ratio for item in found}):
        items = [item for item in found if item.ratio == ratio]
        measured = mean(item.divergence for item in items)
        predicted = mean(calibration.predict(item.residual) for item in items)
        residual = mean(item.residual for item in items)
        table.add_row(f"{ratio:g}", f"{residual:.4f}", f"{measured:.4f}", f"{predicted:.4f}")
    output.show(table)
    typer.echo(f"{calibration.num_questions} questions; divergence: mean KL per token in nats; margin included")
