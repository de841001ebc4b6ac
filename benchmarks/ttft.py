"""Time to first token as a share of full prefill, by recompute ratio and context length.

    python benchmarks/ttft.py --model FOLDER [--data docs.jsonl] [--contexts 1024 2048 4096 8192] [--requests 20]

Every chunk is stored in host memory before the first measured request; each request takes its chunks in a new random
order and is answered by full prefill and at every ratio, one after the other, so that noise of the machine hits all of
them alike. Reported are medians over the requests.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workload import load_workload, machine
from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig, RequestStats

SYSTEM = "You answer questions about contracts."


def main() -> None:
    """Measure and print one table per context length."""
    arguments = _arguments()
    console = Console(width=120)
    # Requests at ratio 1.0 must leave nothing behind that the other ratios would find.
    config = EngineConfig(recompute=RecomputeConfig(policy=arguments.policy), keep_exact=False)
    engine = CacheCraftEngine.from_pretrained(arguments.model, config, dtype=arguments.dtype)
    most = max(arguments.contexts) // arguments.chunk_tokens
    workload = load_workload(engine, arguments.data, arguments.chunk_tokens, most + most // 2)
    engine.warm(workload.chunks, show_progress=True)
    console.print(f"{arguments.model}, {arguments.dtype}, policy {arguments.policy}, {machine()}")
    for context in arguments.contexts:
        measured = measure(engine, workload, context // arguments.chunk_tokens, arguments)
        console.print(as_table(context, arguments.chunk_tokens, measured))


def measure(engine, workload, num_chunks: int, arguments) -> dict[str, list[RequestStats]]:  # type: ignore[no-untyped-def]
    """Statistics of every request by full prefill and at every ratio."""
    draw = random.Random(arguments.seed)
    measured: dict[str, list[RequestStats]] = {}
    for number in tqdm(range(arguments.requests + 1), desc=f"{num_chunks} chunks", unit="request"):
        prompt = RagPrompt(SYSTEM, tuple(draw.sample(workload.chunks, num_chunks)), draw.choice(workload.questions))
        runs = [("full", None), *((f"{ratio:g}", ratio) for ratio in arguments.ratios)]
        draw.shuffle(runs)
        for name, ratio in runs:
            recompute = None if ratio is None else RecomputeConfig(policy=arguments.policy, ratio=ratio)
            stats = engine.generate(prompt, reuse=ratio is not None, recompute=recompute, max_new_tokens=1).stats
            if ratio is not None and stats.chunk_misses:
                raise SystemExit(f"{stats.chunk_misses} chunks were not stored: {engine.store.nbytes} bytes are held")
            if number:  # the first request warms caches and allocators
                measured.setdefault(name, []).append(stats)
    return measured


def as_table(context: int, chunk_tokens: int, measured: dict[str, list[RequestStats]]) -> Table:
    """Medians of one context length."""
    full = measured["full"]
    table = Table(
        title=f"{context // chunk_tokens} chunks of {chunk_tokens} tokens, {len(full)} requests, "
        f"full prefill {_median(full, 'ttft_s'):.2f} s"
    )
    for column in ("ratio", "charged", "TTFT s", "TTFT / full", "load s", "select s", "prefill s"):
        table.add_column(column, justify="right")
    for name in ["full", *sorted((name for name in measured if name != "full"), key=float)]:
        stats = measured[name]
        shares = [one.ttft_s / whole.ttft_s for one, whole in zip(stats, full, strict=True)]
        times = [f"{_median(stats, field):.3f}" for field in ("load_s", "select_s", "prefill_s")]
        charged = f"{_median(stats, 'charged_ratio'):.3f}"
        table.add_row(name, charged, f"{_median(stats, 'ttft_s'):.3f}", f"{statistics.median(shares):.3f}", *times)
    return table


def _median(stats: list[RequestStats], field: str) -> float:
    return statistics.median(getattr(one, field) for one in stats)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder, alias or hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="torch dtype (default: %(default)s)")
    parser.add_argument("--data", type=Path, help="JSONL of documents (default: the sample contracts)")
    parser.add_argument("--policy", default=RecomputeConfig().policy)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.1, 0.15, 0.3, 1.0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="chunk tokens")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
