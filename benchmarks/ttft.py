"""Time to first token as a share of full prefill, by recompute ratio and context length.

    python benchmarks/ttft.py --model FOLDER [--data docs.jsonl] [--contexts 1024 2048 4096 8192] [--requests 20]

Every chunk is stored in host memory before the first measured request; each request takes its chunks in a new random
order and is answered by full prefill and at every ratio, one after the other, so that noise of the machine hits all of
them alike. Reported are medians over the requests. The floor of a ratio is one forward pass of as many tokens over KV
that is in place already: the free ones, and others at random places.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workload import Workload, load_workload, machine
from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig, RequestStats
from cachecraft_rag.config import SamplingConfig
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.request import Request

SYSTEM = "You answer questions about contracts."


class Measured(NamedTuple):
    """Statistics of a request, and seconds of its floor; those of full prefill are its own."""

    stats: RequestStats
    floor_s: float


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


def measure(
    engine: CacheCraftEngine, workload: Workload, num_chunks: int, arguments: argparse.Namespace
) -> dict[str, list[Measured]]:
    """Every request by full prefill and at every ratio."""
    draw = random.Random(arguments.seed)
    measured: dict[str, list[Measured]] = {}
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
                floor_s = stats.ttft_s if ratio is None else floor(engine, prompt, ratio, draw)
                measured.setdefault(name, []).append(Measured(stats, floor_s))
    return measured


def floor(engine: CacheCraftEngine, prompt: RagPrompt, ratio: float, draw: random.Random) -> float:
    """Seconds of a forward pass of a request's rows over its KV, nothing looked up, placed or chosen."""
    encoded, reuse_all = engine.prompts.encode(prompt, engine.library.registry), RecomputeConfig(ratio=0.0)
    request = Request(encoded, SamplingConfig(max_new_tokens=1), reuse_all, engine.config.namespace, started=0.0)
    engine.prefill(request, reuse=True)
    assert request.plan is not None
    assert request.kv is not None
    places = [place for chunk in request.plan.approximate for place in range(chunk.start, chunk.end)]
    chosen = draw.sample(places, request.plan.with_budget(round(ratio * len(places))).budget)
    free = [place for start, end in request.plan.free_ranges() for place in range(start, end)]
    rows = torch.tensor(sorted({*free, *chosen}))
    token_ids, adapter = torch.tensor(encoded.token_ids)[rows], ModelAdapter(engine.model)
    started = time.perf_counter()
    adapter.forward_rows(token_ids, rows, request.kv)
    seconds: float = time.perf_counter() - started
    return seconds


def as_table(context: int, chunk_tokens: int, measured: dict[str, list[Measured]]) -> Table:
    """Medians of one context length; everything over full prefill is a median of ratios of one request."""
    full = measured["full"]
    table = Table(
        title=f"{context // chunk_tokens} chunks of {chunk_tokens} tokens, {len(full)} requests, "
        f"full prefill {statistics.median(one.floor_s for one in full):.2f} s"
    )
    for column in ("ratio", "charged", "TTFT s", "TTFT / full", "floor / full", "TTFT / floor"):
        table.add_column(column, justify="right")
    for column in ("load s", "select s", "prefill s"):
        table.add_column(column, justify="right")
    for name in ["full", *sorted((name for name in measured if name != "full"), key=float)]:
        stats = [one.stats for one in measured[name]]
        pairs = list(zip(measured[name], full, strict=True))
        ratios = (
            statistics.median(one.stats.ttft_s / whole.stats.ttft_s for one, whole in pairs),
            statistics.median(one.floor_s / whole.stats.ttft_s for one, whole in pairs),
            statistics.median(one.stats.ttft_s / one.floor_s for one, _ in pairs),
        )
        times = (_median(stats, field) for field in ("ttft_s", "load_s", "select_s", "prefill_s"))
        ttft, *parts = (f"{seconds:.3f}" for seconds in times)
        charged = f"{_median(stats, 'charged_ratio'):.3f}"
        table.add_row(name, charged, ttft, *(f"{ratio:.3f}" for ratio in ratios), *parts)
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
