"""What sparse attention over reused chunks saves and what it costs: time to first token and divergence by share.

    python benchmarks/sparse.py --model FOLDER --data QUESTIONS.jsonl [--questions 20] [--shares 1 0.5 0.25 0.125]

Every question is answered with the same recomputed tokens at each share of the blocks that they look at, in another
order each time. Long documents are cut into eight chunks of 512 tokens, those with the answer among them. Divergence is
best measured in float32, time in the precision that is used.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workload import machine
from cachecraft_rag import CacheCraftEngine, EngineConfig, RecomputeConfig
from cachecraft_rag.evaluate import Evaluator, Outcome, Summary, Variant, load_questions, summarise


def main() -> None:
    """Measure and print one table."""
    arguments = _arguments()
    config = EngineConfig.model_validate({"store": {"cold": {"size": "2GiB"}}})
    with CacheCraftEngine.from_pretrained(arguments.model, config, dtype=arguments.dtype) as engine:
        outcomes = measure(engine, arguments)
        print(f"{arguments.model}, {arguments.dtype}, {machine()}")
    tokens = sorted(outcome.prompt_tokens for outcome in outcomes)
    print(f"{len(outcomes) // (len(arguments.shares) + 1)} questions, prompts of {tokens[0]} to {tokens[-1]} tokens")
    print(as_table(summarise(outcomes, _label(arguments.shares[0]))))


def measure(engine: CacheCraftEngine, arguments: argparse.Namespace) -> list[Outcome]:
    """Answer all questions at all shares."""
    variants = [
        Variant(_label(share), RecomputeConfig(ratio=arguments.ratio, attend_share=share), with_answer=False)
        for share in arguments.shares
    ]
    questions = load_questions(
        arguments.data, engine.prompts, limit=arguments.questions, chunk_tokens=512, num_chunks=8
    )
    draw = random.Random(arguments.seed)
    outcomes: list[Outcome] = []
    with Evaluator(engine, max_new_tokens=arguments.max_new_tokens) as evaluator:
        for question in tqdm(questions, unit="question"):
            outcomes += evaluator.run(question, draw.sample(variants, len(variants)))
    return outcomes


def as_table(summaries: list[Summary]) -> str:
    """In Markdown; the first share is what the others are compared with."""
    lines = [
        "| looked at | KL mean | median | KL beyond the first | top-1 | TTFT / full prefill |",
        "|---|---|---|---|---|---|",
    ]
    for one in summaries:
        if one.setting:
            beyond = "" if one.kl_difference is None else f"{one.kl_difference:.4f}"
            figures = (f"{one.kl:.4f}", f"{one.kl_median.value:.4f}", beyond, f"{one.top1.value:.3f}")
            lines.append(f"| {one.label} | {' | '.join(figures)} | {one.ttft_ratio:.3f} |")
    return "\n".join(lines)


def _label(share: float) -> str:
    return f"{share:.4g} of the blocks"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, alias or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", type=Path, required=True, help="questions, JSONL")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.125])
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
