"""``cachecraft evaluate``: how close answers come to full prefill's, by policy and by how much is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cachecraft_rag.cli import output
from cachecraft_rag.cli.arguments import names, numbers, settings
from cachecraft_rag.cli.targets import check_folder
from cachecraft_rag.config import EngineConfig, RecomputeConfig
from cachecraft_rag.errors import CacheCraftError, PromptTooLongError
from cachecraft_rag.store_config import StoreConfig

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
_POLICIES = ("key_deviation", "question_attention", "chunk_start", RecomputeConfig().policy)


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, alias or hub id.")],
    questions: Annotated[Path, typer.Argument(metavar="QUESTIONS.jsonl", help="id, question, answers, docs per line.")],
    policies: Annotated[str, typer.Option("--policies", help="Selection policies, by commas.")] = ",".join(_POLICIES),
    ratios: Annotated[
        str, typer.Option("--ratios", help="How much to compute, 0 to 1, by commas.")
    ] = "0.1,0.15,0.2,0.3",
    charged: Annotated[
        bool,
        typer.Option(
            "--charged/--no-charged",
            help="Ratios are shares of a full prefill, what choosing tokens costs included; else of the chunk tokens.",
        ),
    ] = True,
    number: Annotated[int, typer.Option("--questions", min=1, help="How many questions, drawn by the seed.")] = 50,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the files go.")] = Path("evaluation"),
    figures: Annotated[
        bool, typer.Option("--figures", help="Also measure by all that cachecraft tune chooses.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A small sample for --figures.")] = False,
    answers: Annotated[
        bool, typer.Option("--answers/--no-answers", help="Generate answers; divergence needs none and is quicker.")
    ] = True,
    instruction: Annotated[str | None, typer.Option("--instruction", help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")] = 32,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="Length of chunks cut.")] = 512,
    num_chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks per question, of documents cut.")] = 8,
    dtype: Annotated[str, typer.Option("--dtype", help="A torch dtype, or auto.")] = "auto",
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Host memory for chunks; twice that in all.")
    ] = "4GiB",
    seed: Annotated[int, typer.Option("--seed", help="Draws questions, and the chunks of long documents.")] = 0,
) -> None:
    """Measure how close answers come to those of full prefill, for every policy and ratio.

    Documents without a text are looked up in QUESTIONS_docs.jsonl; questions with spans have theirs cut into chunks.

    Prints tables, and writes every answer (CSV), the tables (Markdown) and a plot (PNG). With --figures there are
    curves too: quality against ratio, offset and what chunks are computed behind, quality and throughput against chunk
    size, hit rate and time to first token against hot share, load time against prefetch window (CSV, Markdown, a PNG
    each).
    """
    from cachecraft_rag.engine import CacheCraftEngine
    from cachecraft_rag.evaluate.curve_report import write_curves
    from cachecraft_rag.evaluate.curves import FULL_EXTENT, QUICK_EXTENT, CurveMaker, context_tokens
    from cachecraft_rag.evaluate.quality_curves import BEHIND
    from cachecraft_rag.evaluate.questions import INSTRUCTION, load_corpus, load_questions, load_sources
    from cachecraft_rag.evaluate.report import as_rich, write_report
    from cachecraft_rag.evaluate.run import Evaluator, Outcome, variants

    outcomes: list[Outcome] = []
    too_long = 0
    try:
        _check_extras()
        wanted = variants(names(policies), numbers(ratios, float, "--ratios"), charged=charged, with_answer=answers)
        store = settings(StoreConfig, {"cold": {"size": memory}}, {"cold.size": "--memory"})
        extent = (QUICK_EXTENT if quick else FULL_EXTENT).over(number, chunk_tokens, num_chunks)
        if figures:
            settings(EngineConfig, {"chunk_tokens": chunk_tokens}, {"chunk_tokens": "--chunk-tokens"})
        check_folder(out, "--out")
        with CacheCraftEngine.from_pretrained(model, EngineConfig(store=store), dtype=dtype) as engine:
            limits = {"limit": number, "seed": seed, "chunk_tokens": chunk_tokens, "num_chunks": num_chunks}
            asked = load_questions(questions, engine.prompts, **limits)
            if figures and chunk_tokens > (left := context_tokens(engine, extent, max_new_tokens)):
                raise ValueError(
                    f"--chunk-tokens: {chunk_tokens} does not fit into {left} tokens, which the context window leaves "
                    "for all chunks of a prompt together; give less, or leave out --figures"
                )
            corpus = load_corpus(questions, engine.prompts, chunk_tokens=chunk_tokens)
            engine.library.introduce(corpus, engine.config.namespace)  # an application has all its documents stored
            system = INSTRUCTION if instruction is None else instruction
            progress = Progress(*_COLUMNS, console=Console(stderr=True), transient=True)
            with Evaluator(engine, instruction=system, max_new_tokens=max_new_tokens) as evaluator, progress:
                task = progress.add_task("answering", total=len(asked) * (1 + len(wanted)))
                for index, question in enumerate(asked, 1):
                    try:
                        for outcome in evaluator.run(question, wanted):
                            outcomes.append(outcome)
                            progress.advance(task)
                    except PromptTooLongError:
                        too_long += 1
                    progress.update(task, completed=index * (1 + len(wanted)))
            if not outcomes:
                raise ValueError(f"all of {too_long} questions are longer than the model's context window")
            title = f"{Path(model).name} on {questions.name}"
            paths = write_report(outcomes, out, title)
            if figures:
                maker = CurveMaker(
                    engine,
                    load_sources(questions, seed=seed),
                    extent,
                    instruction=system,
                    max_new_tokens=max_new_tokens,
                    with_answer=answers,
                    memory=store.cold.size // len(BEHIND),
                    seed=seed,
                    show_progress=True,
                )
                paths += write_curves(maker.all(chunk_tokens), out, title)
    except (ValueError, ImportError, OSError, RuntimeError, CacheCraftError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    Console().print(as_rich(outcomes))
    if too_long:
        typer.echo(output.left_out(too_long))
    for path in paths:
        typer.echo(f"wrote {path}")


def _check_extras() -> None:
    """What is needed at the end is missed before anything has been computed."""
    from cachecraft_rag.evaluate.metrics import rouge_l
    from cachecraft_rag.evaluate.report import check_plot

    rouge_l("", "")
    check_plot()
