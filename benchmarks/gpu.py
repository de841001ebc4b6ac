"""Time to first token on a GPU in bfloat16, measured by CUDA events: full prefill against reuse, by recompute ratio.

    python benchmarks/gpu.py [--model FOLDER] [--contexts 1024 2048 4096 8192] [--ratios 0 0.15 0.3 1.0] [--requests 10]

Without a model it takes one in the shape of an 8B Llama with random weights, made on the GPU: right for times, not for
answers. It runs from a checkout on a machine with PyTorch and transformers; the few small packages that are missing
there can be brought in a folder, as ``make gpu-site`` fills it. The whole run ends within ten minutes: contexts that no
longer fit into ``--limit`` seconds are left out, and named.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_model import random_engine
from benchmarks.growth_parts import CHUNK_TOKENS, QUESTION, SYSTEM, made_up
from benchmarks.workload import machine
from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig, RequestStats


@dataclass(frozen=True)
class Timed:
    """One request.

    Attributes:
        ttft_s: Seconds to the first token, between two CUDA events.
        stats: The engine's own figures.
    """

    ttft_s: float
    stats: RequestStats


def main() -> None:
    """Measure and print one table per context length, and what decoding costs."""
    arguments = _arguments()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py: PyTorch sees no CUDA device here; on a CPU use benchmarks/ttft.py")
    begun = time.monotonic()
    console = Console(width=120)
    config = EngineConfig.model_validate({"keep_exact": False, "store": {"device_size": arguments.device_memory}})
    with _engine(arguments, config) as engine:
        name = arguments.model or "8B-shaped Llama with random weights"
        console.print(f"{name}, bfloat16; {machine()}; loaded after {time.monotonic() - begun:.0f} s", highlight=False)
        texts = made_up(engine, max(arguments.contexts) // CHUNK_TOKENS, CHUNK_TOKENS)
        warm_s = _timed(lambda: engine.warm(texts))
        console.print(
            f"{len(texts)} chunks computed and stored in {warm_s:.1f} s, {engine.store.nbytes / 2**30:.2f} GiB"
        )
        for context in arguments.contexts:
            if time.monotonic() - begun > arguments.limit:
                console.print(f"context {context}: left out, {arguments.limit} s are over")
                continue
            console.print(as_table(context, measure(engine, texts[: context // CHUNK_TOKENS], arguments)))
        console.print(
            f"decoding: {_decoding(engine, texts[:4]):.1f} tokens/s behind {4 * CHUNK_TOKENS} tokens of context"
        )
        console.print(f"largest GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


def measure(engine: CacheCraftEngine, texts: list[str], arguments: argparse.Namespace) -> dict[str, list[Timed]]:
    """Every request by full prefill and at every ratio, in random order; the first two are left out."""
    draw = random.Random(0)
    measured: dict[str, list[Timed]] = {}
    for number in range(arguments.requests + 2):
        prompt = RagPrompt(SYSTEM, tuple(draw.sample(texts, len(texts))), QUESTION)
        runs: list[float | None] = [None, *arguments.ratios]
        draw.shuffle(runs)
        for ratio in runs:
            timed = _first_token(engine, prompt, ratio)
            if number > 1:
                measured.setdefault("full" if ratio is None else f"{ratio:g}", []).append(timed)
    return measured


def as_table(context: int, measured: dict[str, list[Timed]]) -> Table:
    """Medians of one context length."""
    full = measured["full"]
    table = Table(title=f"{context // CHUNK_TOKENS} chunks of {CHUNK_TOKENS} tokens, {len(full)} requests")
    for column in ("ratio", "charged", "TTFT ms", "TTFT / full", "load ms", "select ms", "prefill ms"):
        table.add_column(column, justify="right")
    for name in ["full", *sorted((name for name in measured if name != "full"), key=float)]:
        timed = measured[name]
        share = statistics.median(one.ttft_s / whole.ttft_s for one, whole in zip(timed, full, strict=True))
        parts = [f"{1e3 * _median(timed, field):.2f}" for field in ("load_s", "select_s", "prefill_s")]
        ttft = 1e3 * statistics.median(one.ttft_s for one in timed)
        table.add_row(name, f"{_median(timed, 'charged_ratio'):.3f}", f"{ttft:.2f}", f"{share:.3f}", *parts)
    return table


def _first_token(engine: CacheCraftEngine, prompt: RagPrompt, ratio: float | None) -> Timed:
    found: list[RequestStats] = []

    def call() -> None:
        how: dict[str, Any] = {"reuse": False} if ratio is None else {"recompute": RecomputeConfig(ratio=ratio)}
        found.append(engine.generate(prompt, max_new_tokens=1, **how).stats)

    seconds = _timed(call)
    if ratio is not None and (found[0].chunk_misses or found[0].fallback_reason is not None):
        raise SystemExit(f"chunks were not reused: {found[0]}")
    return Timed(seconds - found[0].store_s, found[0])


def _timed(call: Callable[[], object]) -> float:
    """Seconds between two CUDA events around a call, all it started on the GPU included."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _decoding(engine: CacheCraftEngine, texts: list[str], tokens: int = 64) -> float:
    """Tokens per second of an answer, the first one left out."""
    prompt = RagPrompt(SYSTEM, tuple(texts), QUESTION)
    engine.generate(prompt, max_new_tokens=4)
    stats = engine.generate(prompt, max_new_tokens=tokens).stats
    return max(stats.output_tokens - 1, 0) / stats.decode_s if stats.decode_s else 0.0


def _median(timed: list[Timed], field: str) -> float:
    return float(statistics.median(getattr(one.stats, field) for one in timed))


def _engine(arguments: argparse.Namespace, config: EngineConfig) -> CacheCraftEngine:
    if arguments.model is None:
        return random_engine(config, layers=arguments.layers)
    return CacheCraftEngine.from_pretrained(arguments.model, config, dtype="bfloat16", device="cuda")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, alias or hub id (default: an 8B shape with random weights)")
    parser.add_argument("--layers", type=int, default=32, help="of the random model (default: %(default)s)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="multiples of 512")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.15, 0.3, 1.0])
    parser.add_argument("--requests", type=int, default=10, help="per context (default: %(default)s)")
    parser.add_argument("--device-memory", default="8GiB", help="for stored chunks (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds after which no context begins")
    return parser.parse_args()


if __name__ == "__main__":
    main()
