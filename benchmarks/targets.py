"""Whether answers stay as close to full prefill's as a preset promises, on questions it was not calibrated on.

    python benchmarks/targets.py --model FOLDER --data QUESTIONS.jsonl [--questions 60] [--presets high balanced fast]

Every other question calibrates the model; the others are answered at each preset. Shown are the measured mean
divergence beside the target, the ratios that requests got, and how many were prefilled in full because reuse looked
too risky (their divergence is 0).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workload import machine
from cachecraft_rag import CacheCraftEngine, EngineConfig, RecomputeConfig
from cachecraft_rag.calibration import Calibration
from cachecraft_rag.evaluate import Evaluator, Outcome, Question, Variant, bootstrap_mean, load_questions
from cachecraft_rag.evaluate.calibrate import calibrate


def main() -> None:
    """Calibrate on one half, measure on the other, print one table."""
    arguments = _arguments()
    settings = {"store": {"cold": {"size": "2GiB"}}}
    with CacheCraftEngine.from_pretrained(
        arguments.model, EngineConfig.model_validate(settings), dtype=arguments.dtype
    ) as engine:
        questions = load_questions(
            arguments.data,
            engine.prompts,
            limit=arguments.questions,
            seed=arguments.seed,
            chunk_tokens=512,
            num_chunks=8,
        )
        with tempfile.TemporaryDirectory() as folder:
            file = arguments.calibration or Path(folder) / "calibration.json"
            if arguments.calibration is None or not arguments.calibration.exists():
                prompts = [question.prompt() for question in questions[::2]]
                calibrate(engine, prompts, answer_tokens=arguments.max_new_tokens, show_progress=True).save(file)
            calibration = Calibration.load(file)
            config = EngineConfig.model_validate({**settings, "calibration": str(file)})
            with CacheCraftEngine(engine.model, engine.tokenizer, config) as calibrated:
                outcomes = measure(calibrated, questions[1::2], arguments)
    print(f"{arguments.model}, {arguments.dtype}, {machine()}")
    print(
        f"calibrated on {calibration.num_questions} questions: divergence = {calibration.margin:.3g} * "
        f"{calibration.scale:.3g} * residual ** {calibration.exponent:.3g}; measured on {len(questions[1::2])} others"
    )
    print(as_table(outcomes, arguments.presets))


def measure(engine: CacheCraftEngine, questions: list[Question], arguments: argparse.Namespace) -> list[Outcome]:
    """Answer questions at all presets."""
    variants = [
        Variant(name, RecomputeConfig.model_validate({"preset": name}), with_answer=False) for name in arguments.presets
    ]
    outcomes: list[Outcome] = []
    with Evaluator(engine, max_new_tokens=arguments.max_new_tokens) as evaluator:
        for question in tqdm(questions, desc="held back", unit="question"):
            outcomes += evaluator.run(question, variants)
    return outcomes


def as_table(outcomes: list[Outcome], presets: list[str]) -> str:
    """In Markdown, a row per preset."""
    names = ("preset", "target", "KL mean (95 %)", "median", "above the target", "in full", "charged", "TTFT / full")
    ratios = tuple(f"ratio p{share}" for share in (0, 25, 50, 75, 100))
    lines = ["| " + " | ".join(names + ratios) + " |", "|---" * len(names + ratios) + "|"]
    for preset in presets:
        own = [outcome for outcome in outcomes if outcome.label == preset]
        target = RecomputeConfig.model_validate({"preset": preset}).target
        divergences = [outcome.kl for outcome in own]
        in_full = sum(outcome.fallback_reason is not None for outcome in own)
        reused = [outcome.ratio for outcome in own if outcome.fallback_reason is None] or [1.0]
        above = sum(target is not None and divergence > target for divergence in divergences)
        cells = (
            preset,
            f"{target}",
            f"{bootstrap_mean(divergences):.4f}",
            f"{statistics.median(divergences):.4f}",
            f"{above / len(own):.0%}",
            f"{in_full / len(own):.0%}",
            f"{statistics.mean(outcome.charged_ratio for outcome in own):.3f}",
            f"{statistics.median(outcome.ttft_ratio for outcome in own):.3f}",
            *(f"{ratio:.3f}" for ratio in np.percentile(reused, (0, 25, 50, 75, 100))),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, alias or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", type=Path, required=True, help="questions, JSONL")
    parser.add_argument("--questions", type=int, default=60, help="half of them to calibrate on")
    parser.add_argument("--presets", nargs="+", default=["high", "balanced", "fast"])
    parser.add_argument("--calibration", type=Path, help="file to keep the calibration in, or to take it from")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
