"""How close answers come to full prefill's: the default policy against the best published selector, at equal cost.

    python benchmarks/quality.py --model FOLDER --data FOLDER [--sets 2wikimqa:100 cuad:60] [--out quality]

Every policy may compute the same shares of a full prefill, selection passes included. Questions of a set whose
documents are long get eight chunks of 512 tokens, those with the answer among them. Every outcome is written as it
comes, to ``SET.jsonl`` in the folder of results; a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.results_file import ResultsFile
from benchmarks.workload import machine
from cachecraft_rag import CacheCraftEngine, EngineConfig
from cachecraft_rag.evaluate import (
    Evaluator,
    Interval,
    Outcome,
    Variant,
    against_published,
    load_corpus,
    load_questions,
    summarise,
    variants,
    write_report,
)
from cachecraft_rag.evaluate.questions import INSTRUCTION
from cachecraft_rag.evaluate.report import as_rich
from cachecraft_rag.evaluate.run import PUBLISHED
from cachecraft_rag.evaluate.summary import DEFAULT


def main() -> None:
    """Measure, print and write the tables of every set, then the table of the claim."""
    arguments = _arguments()
    console = Console(width=100)
    config = EngineConfig.model_validate({"store": {"cold": {"size": arguments.memory}}})
    claims = []
    with CacheCraftEngine.from_pretrained(arguments.model, config, dtype=arguments.dtype) as engine:
        console.print(f"{arguments.model}, {arguments.dtype}, {machine()}")
        for name, count in arguments.sets:
            outcomes = measure(engine, name, count, arguments)
            console.print(as_rich(outcomes))
            for path in write_report(outcomes, arguments.out / name, f"{Path(arguments.model).name} on {name}"):
                console.print(f"wrote {path}")
            claims += claim_rows(name, outcomes)
    print(as_table(claims))


def measure(engine: CacheCraftEngine, name: str, count: int, arguments: argparse.Namespace) -> list[Outcome]:
    """Outcomes of the first ``count`` questions of a set; those that are written already are not measured again."""
    wanted = [_with_answer(variant, arguments) for variant in variants(arguments.policies, arguments.charged)]
    options = {"chunk_tokens": arguments.chunk_tokens, "num_chunks": arguments.chunks, "seed": arguments.seed}
    questions = load_questions(arguments.data / f"{name}.jsonl", engine.prompts, limit=count, **options)
    run = {
        "model": engine.fingerprint,
        "encode": engine.config.encode.model_dump(),
        "recompute": engine.config.recompute.model_dump(),
        "instruction": arguments.instruction,
        "max_new_tokens": arguments.max_new_tokens,
        "answers": arguments.answers,
        "answers_at": arguments.answers_at,
        **options,
    }
    corpus = load_corpus(arguments.data / f"{name}.jsonl", engine.prompts, chunk_tokens=arguments.chunk_tokens)
    engine.library.introduce(corpus, engine.config.namespace)  # an application has all its documents stored
    asking = {"instruction": arguments.instruction, "max_new_tokens": arguments.max_new_tokens}
    results = ResultsFile(arguments.out / f"{name}.jsonl", run)
    known = {_key(outcome): outcome for outcome in (Outcome(**row) for row in results.rows)}
    with Evaluator(engine, **asking) as evaluator:
        for question in tqdm(questions, desc=name, unit="question"):
            missing = [v for v in wanted if (question.id, v.label, v.setting) not in known]
            if not missing:
                continue
            for outcome in evaluator.run(question, missing):
                if _key(outcome) not in known:  # full prefill is answered again as the reference of the others
                    known[_key(outcome)] = outcome
                    results.append(outcome.as_dict())
    asked, tried = {question.id for question in questions}, {(variant.label, variant.setting) for variant in wanted}
    return [o for o in known.values() if o.question in asked and (not o.setting or (o.label, o.setting) in tried)]


def claim_rows(name: str, outcomes: list[Outcome]) -> list[tuple[str, ...]]:
    """One row per setting: the default policy against the best published selector, and against full prefill's F1."""
    own = {summary.setting: summary for summary in summarise(outcomes) if summary.label == DEFAULT}
    return [
        (
            name,
            str(rival.num_questions),
            rival.setting,
            f"{own[rival.setting].kl.value:.4f} ({own[rival.setting].kl_median.value:.4f})",
            f"{rival.best_mean}: {_cell(rival.mean_ratio)}",
            f"{rival.best_median}: {_cell(rival.median_ratio)}",
            _cell(own[rival.setting].top1),
            _cell(own[rival.setting].f1_share),
        )
        for rival in against_published(outcomes)
    ]


def as_table(rows: list[tuple[str, ...]]) -> str:
    """The claim in Markdown."""
    header = ("data", "questions", "setting", "KL mean (median)", "mean / best published", "median / best published")
    lines = [(*header, "top-1", "F1 / full prefill's"), ("---",) * (len(header) + 2), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _key(outcome: Outcome) -> tuple[str, str, str]:
    return outcome.question, outcome.label, outcome.setting


def _with_answer(variant: Variant, arguments: argparse.Namespace) -> Variant:
    is_policy = arguments.answers == "all" or (arguments.answers == "default" and variant.label == DEFAULT)
    is_share = arguments.answers_at is None or variant.charged in arguments.answers_at
    return replace(variant, with_answer=is_policy and is_share)


def _cell(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval:.3f}"


def _set(text: str) -> tuple[str, int]:
    name, _, count = text.partition(":")
    if not name or not count.isdigit() or int(count) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:QUESTIONS, such as 2wikimqa:100")
    return name, int(count)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, alias or hub id")
    parser.add_argument("--dtype", default="bfloat16", help="torch dtype (default: %(default)s)")
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets, JSONL")
    parser.add_argument(
        "--sets", type=_set, nargs="+", default=[("2wikimqa", 100), ("cuad", 60)], help="NAME:QUESTIONS"
    )
    parser.add_argument("--policies", nargs="+", default=[*PUBLISHED, DEFAULT])
    parser.add_argument("--charged", type=float, nargs="+", default=[0.1, 0.15, 0.2, 0.3], help="of a full prefill")
    parser.add_argument(
        "--answers",
        choices=("default", "all", "none"),
        default="default",
        help="which policies generate answers; divergence needs none",
    )
    parser.add_argument("--answers-at", type=float, nargs="+", help="charged shares of these answers (default: all)")
    parser.add_argument("--instruction", default=INSTRUCTION)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=8, help="per question, of documents that are cut")
    parser.add_argument("--memory", default="1GiB", help="host memory for chunks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("quality"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
