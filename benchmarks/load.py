"""Many users at once: time to first token and throughput, against plain transformers served one by one.

    python benchmarks/load.py --model FOLDER [--data docs.jsonl] [--users 1 8 32] [--requests 4] [--max-new-tokens 32]
    python benchmarks/load.py --tiny                       a random model of a few thousand weights, to try it

Every user asks, reads the whole answer, and asks again. All come at the same moment. The chunks are stored in host
memory before; plain transformers prefills every prompt in full, answers one request after the other, first come first
served, and waiting counts. Shown are the times to first token over all requests, and all tokens over the whole time.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.token_times import TokenTimes
from benchmarks.workload import load_workload, machine
from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig
from cachecraft_rag.thread_workers import release_workers

SYSTEM = "You answer questions about contracts."


class Served(NamedTuple):
    """One answer: seconds to its first token, and its tokens."""

    ttft_s: float
    token_ids: tuple[int, ...]


class Load(NamedTuple):
    """What a number of users got: their answers, the seconds until the last one, and how many requests failed."""

    answers: dict[RagPrompt, Served]
    total_s: float
    num_errors: int


class OneByOne:
    """Plain transformers: full prefill, one request after the other."""

    def __init__(self, engine: CacheCraftEngine, max_new_tokens: int) -> None:
        self._engine, self._max_new_tokens = engine, max_new_tokens
        self._worker = ThreadPoolExecutor(1)

    def ask(self, prompt: RagPrompt) -> Served:
        """Wait for everyone who came before, and for the answer."""
        future: Future[Served] = self._worker.submit(self._answer, prompt, time.perf_counter())
        return future.result()

    def _answer(self, prompt: RagPrompt, came: float) -> Served:
        ids = torch.tensor([self._engine.prompts.encode(prompt).token_ids], device=self._engine.model.device)
        clock = TokenTimes()
        options: dict[str, Any] = {"max_new_tokens": self._max_new_tokens, "do_sample": False, "pad_token_id": 0}
        output = self._engine.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
        release_workers()  # or this thread would slow down those that are measured next
        return Served(clock.times[1] - came, tuple(output[0, ids.shape[1] :].tolist()))


def main() -> None:
    """Measure and print one table."""
    arguments = _arguments()
    console = Console(width=120)
    engine = _engine(arguments)
    workload = load_workload(engine, arguments.data, arguments.chunk_tokens, arguments.pool)
    engine.warm(workload.chunks, show_progress=True)
    draw = random.Random(arguments.seed)

    def prompts(number: int) -> list[RagPrompt]:
        return [
            RagPrompt(SYSTEM, tuple(draw.sample(workload.chunks, arguments.chunks)), f"{number}.{n}: {question}")
            for n, question in enumerate(draw.choices(workload.questions, k=arguments.requests))
        ]

    def ours(prompt: RagPrompt) -> Served:
        result = engine.generate(prompt, max_new_tokens=arguments.max_new_tokens)
        return Served(result.stats.ttft_s, result.token_ids)

    plain = OneByOne(engine, arguments.max_new_tokens)
    warm_up = prompts(-1)[0]
    ours(warm_up), plain.ask(warm_up)
    rows: list[tuple[str, ...]] = []
    for num_users in tqdm(arguments.users, desc="numbers of users"):
        asked = [prompts(user) for user in range(num_users)]
        single = _Single(ours, [prompt for of_user in asked for prompt in of_user][: arguments.check])
        rows.append(_row(num_users, "ours", serve(ours, asked), single))
        if num_users <= arguments.plain_up_to:
            rows.append(_row(num_users, "transformers, one by one", serve(plain.ask, asked), None))
    console.print(f"{arguments.model or 'tiny random model'}, {arguments.dtype}, {machine()}")
    console.print(as_table(rows, arguments))
    engine.close()


def serve(ask: Callable[[RagPrompt], Served], asked: list[list[RagPrompt]]) -> Load:
    """Have one thread per user ask its prompts, all from the same moment on."""
    answers: dict[RagPrompt, Served] = {}
    errors: list[Exception] = []
    start = threading.Barrier(len(asked) + 1)

    def use(prompts: list[RagPrompt]) -> None:
        start.wait()
        for prompt in prompts:
            try:
                answers[prompt] = ask(prompt)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=use, args=(prompts,)) for prompts in asked]
    for thread in threads:
        thread.start()
    start.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return Load(answers, time.perf_counter() - started, len(errors))


class _Single:
    """Answers to some prompts, each asked alone: how long they take in all, and whether others equal them."""

    def __init__(self, ask: Callable[[RagPrompt], Served], prompts: list[RagPrompt]) -> None:
        started = time.perf_counter()
        self.answers = {prompt: ask(prompt) for prompt in prompts}
        self.total_s = time.perf_counter() - started

    def share_of_equal(self, load: Load) -> float:
        """Share of the answers under load that have the same tokens."""
        equal = [
            prompt in load.answers and load.answers[prompt].token_ids == alone.token_ids
            for prompt, alone in self.answers.items()
        ]
        return sum(equal) / max(1, len(equal))

    @property
    def tokens_per_s(self) -> float:
        """Throughput of one request after the other."""
        return sum(len(served.token_ids) for served in self.answers.values()) / self.total_s


def as_table(rows: list[tuple[str, ...]], arguments: argparse.Namespace) -> Table:
    """All rows."""
    table = Table(
        title=f"{arguments.chunks} chunks of {arguments.chunk_tokens} tokens, {arguments.requests} requests per user, "
        f"answers of up to {arguments.max_new_tokens} tokens"
    )
    columns = (
        "users",
        "engine",
        "TTFT p50 s",
        "TTFT p95 s",
        "tokens/s",
        "ours alone tokens/s",
        "same answer",
        "errors",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "engine" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _row(num_users: int, name: str, load: Load, single: _Single | None) -> tuple[str, ...]:
    times = torch.tensor([served.ttft_s for served in load.answers.values()] or [float("nan")])
    tokens = sum(len(served.token_ids) for served in load.answers.values()) / load.total_s
    alone = ("", "") if single is None else (f"{single.tokens_per_s:.1f}", f"{single.share_of_equal(load):.2f}")
    quantiles = (f"{float(times.quantile(share)):.3f}" for share in (0.5, 0.95))
    return str(num_users), name, *quantiles, f"{tokens:.1f}", *alone, str(load.num_errors)


def _engine(arguments: argparse.Namespace) -> CacheCraftEngine:
    config = EngineConfig(recompute=RecomputeConfig(ratio=arguments.ratio), keep_exact=False)
    if arguments.model is not None:
        return CacheCraftEngine.from_pretrained(arguments.model, config, dtype=arguments.dtype)
    from tests.tiny_models import make
    from tests.tiny_tokenizers import byte_level

    return CacheCraftEngine(make("llama", getattr(torch, arguments.dtype)), byte_level(), config)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder, alias or hub id")
    which.add_argument("--tiny", action="store_true", help="a tiny random model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", type=Path, help="JSONL file of documents; default: the sample contracts")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--plain-up-to", type=int, default=32, help="most users that plain transformers serves")
    parser.add_argument("--requests", type=int, default=2, help="per user")
    parser.add_argument("--chunks", type=int, default=4, help="per request")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--pool", type=int, default=12, help="chunks to draw from")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--check", type=int, default=8, help="requests also asked alone, whose answers must be equal")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
