"""What the tiers and precisions of the store cost and give.

    python benchmarks/store.py --model FOLDER --data 2wikimqa.jsonl [--parts sizes quality ttft] [--redis URL]

sizes    bytes per token and loading speed of every precision and compression in memory, on disk (with and without the
         page cache) and in Redis. Speed is that of KV in the model's dtype: reading, checking and unpacking included.
quality  what lower precision does to answers at the default ratio: divergence from full prefill's logits over full
         prefill's own answer, and ROUGE-L between the two answers. Compression changes no number.
ttft     time to first token when all chunks of a request come from one tier, with and without loading ahead, beside
         memory: every request is answered in every way, in random order.

Redis is the server of ``--redis``, else one that is started for the run, else left out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tiers import can_drop_page_cache, drop_page_cache, read_all, redis_server
from benchmarks.workload import load_workload, machine
from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig, RequestStats
from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.evaluate import bootstrap_mean, kl_divergence, paired_difference, rouge_l, score, top1_agreement
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store import ChunkStore, DiskStore, EntryCodec, MemoryStore, RedisStore
from cachecraft_rag.store.precision import PRECISIONS
from cachecraft_rag.store_config import Compression

SYSTEM = "You answer questions about contracts."
INSTRUCTION = "Answer the question using only the passages. Reply with one complete sentence.\n\n"
NAMESPACE = "benchmark"  # of our own, for the server may hold what others stored
UNLIMITED = 2**40
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)

Entries = dict[ChunkKey, ChunkKV]


def main() -> None:
    """Measure the parts that were asked for and print their tables."""
    arguments = _arguments()
    if "quality" in arguments.parts and arguments.data is None:
        raise SystemExit("the quality part needs --data: a JSONL file of questions with their passages")
    console = Console(width=120)
    first = CacheCraftEngine.from_pretrained(arguments.model, memory_config(), dtype=arguments.dtype)
    console.print(f"{arguments.model}, {arguments.dtype}, {machine()}")
    with redis_server(arguments.redis) as url, tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        is_cold_possible = can_drop_page_cache(Path(folder))
        if not is_cold_possible:
            console.print("the page cache can't be dropped here: give --folder on a disk; left out: disk, cold")
        if url is None:
            console.print("no --redis and no redis-server: left out: redis")
        place = Place(Path(folder), url, is_cold_possible)
        if "sizes" in arguments.parts:
            console.print(sizes(first, place, arguments))
        if "quality" in arguments.parts:
            console.print(quality(first, arguments))
        if "ttft" in arguments.parts:
            console.print(ttft(first, place, arguments))


@dataclass(frozen=True)
class Place:
    """Where the slow tiers are: a folder, a server if there is one, and whether reads can be made to reach the disk."""

    folder: Path
    url: str | None
    is_cold_possible: bool


@dataclass(frozen=True, eq=False)
class Way:
    """A way to come by the chunks of a request: what must be done before, and the engine that has them there."""

    tier: str
    load_ahead: str
    engine: CacheCraftEngine
    prepare: Callable[[], object]


def memory_config(precision: str = "model") -> EngineConfig:
    """Everything in host memory."""
    store = {"device_size": 0, "cold": {"size": UNLIMITED, "precision": precision}}
    return EngineConfig.model_validate({"store": store, "namespace": NAMESPACE, "keep_exact": False})


def warmed(engine: CacheCraftEngine, texts: tuple[str, ...], show_progress: bool = False) -> Entries:
    """Compute the KV of chunks; the entries of the engine's store."""
    engine.warm(texts, show_progress=show_progress)
    found = {info.key: engine.store.get(info.key) for info in engine.store.entries()}
    return {key: entry for key, entry in found.items() if entry is not None}


def fill(store: ChunkStore, entries: Entries) -> None:
    """Put entries into a store, and see that it has them all."""
    for key, entry in entries.items():
        store.put(key, entry)
    store.flush()
    if missing := sum(not store.contains(key) for key in entries):
        raise SystemExit(f"{missing} of {len(entries)} entries were not kept: {store.stats()}")


def sizes(engine: CacheCraftEngine, place: Place, arguments: argparse.Namespace) -> Table:
    """Bytes and loading speed by precision and compression."""
    workload = load_workload(engine, arguments.docs, arguments.chunk_tokens, arguments.chunks)
    entries = warmed(engine, workload.chunks, show_progress=True)
    engine.invalidate()
    num_tokens = sum(entry.num_tokens for entry in entries.values())
    nbytes = sum(entry.keys.nbytes + entry.values.nbytes for entry in entries.values())
    table = Table(
        title=f"{len(entries)} chunks of {arguments.chunk_tokens} tokens, {nbytes / num_tokens:,.0f} bytes each"
    )
    for column in ("precision", "compression", "bytes/token", "share", "memory GB/s"):
        table.add_column(column, justify="right")
    for column in ("disk hot GB/s", "disk cold GB/s", "redis GB/s"):
        table.add_column(column, justify="right")
    for precision in tqdm(PRECISIONS, desc="sizes", unit="precision"):
        for compression in COMPRESSIONS:
            codec = EntryCodec(precision, compression)
            folder = place.folder / f"{precision}-{compression}"
            disk = DiskStore(folder, UNLIMITED, codec)
            speeds = ["-", *measured_disk(disk, folder, entries, nbytes, place, arguments.rounds)]
            if compression == "none":
                memory = MemoryStore(UNLIMITED, precision=precision)
                speeds[0] = "no copy" if precision == "model" else speed(memory, entries, nbytes, arguments.rounds)
            if place.url is None:
                speeds.append("-")
            else:
                remote = RedisStore(place.url, codec, prefix=NAMESPACE)
                speeds.append(speed(remote, entries, nbytes, arguments.rounds))
                remote.clear()
                remote.close()
            size = sum(info.nbytes for info in disk.entries()) / num_tokens
            table.add_row(precision, compression, f"{size:,.0f}", f"{size * num_tokens / nbytes:.3f}", *speeds)
            disk.clear()
            disk.close()
    return table


def measured_disk(
    disk: DiskStore, folder: Path, entries: Entries, nbytes: int, place: Place, rounds: int
) -> tuple[str, str]:
    """Speed with the files in the page cache, and without."""
    hot = speed(disk, entries, nbytes, rounds, partial(read_all, folder))
    cold = speed(disk, entries, nbytes, rounds, partial(drop_page_cache, folder)) if place.is_cold_possible else "-"
    return hot, cold


def speed(
    store: ChunkStore, entries: Entries, nbytes: int, rounds: int, prepare: Callable[[], object] | None = None
) -> str:
    """Load all entries several times; gigabytes of KV in the model's dtype per second, median."""
    fill(store, entries)
    seconds = []
    for _ in range(rounds):
        if prepare is not None:
            prepare()
        started = time.perf_counter()
        for key in entries:
            if store.get(key) is None:
                raise SystemExit(f"an entry is gone: {store.stats()}")
        seconds.append(time.perf_counter() - started)
    return f"{nbytes / statistics.median(seconds) / 1e9:.2f}"


def quality(first: CacheCraftEngine, arguments: argparse.Namespace) -> Table:
    """Divergence and ROUGE-L by precision."""
    engines = {"model": first}
    for precision in PRECISIONS[1:]:
        engines[precision] = CacheCraftEngine(first.model, first.tokenizer, memory_config(precision))
    figures: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in engines}
    with arguments.data.open(encoding="utf8") as lines:
        rows = [json.loads(line) for line in lines]
    rows = random.Random(arguments.seed).sample(rows, min(arguments.questions, len(rows)))
    for row in tqdm(rows, desc="quality", unit="question"):
        chunks = tuple(f"{doc['title']}\n{doc['text']}".strip() for doc in row["docs"])[: arguments.passages]
        content = INSTRUCTION + "\n\n".join(chunks) + f"\n\nQuestion: {row['question']}\nAnswer:"
        prompt = RagPrompt.from_messages([{"role": "user", "content": content}], chunks)
        entries = warmed(first, chunks)
        reference = first.generate(prompt, reuse=False, max_new_tokens=arguments.answer_tokens)
        forced = reference.token_ids or (first.tokenizer.eos_token_id,)
        expected = score(first, prompt, forced, reuse=False).logits
        for name, engine in engines.items():
            if engine is not first:
                fill(engine.store, entries)
            found = engine.generate(prompt, max_new_tokens=arguments.answer_tokens)
            if found.stats.chunk_misses:
                raise SystemExit(f"{found.stats.chunk_misses} chunks were not stored in {name}")
            logits = score(engine, prompt, forced).logits
            figures[name]["kl"].append(float(kl_divergence(expected, logits).mean()))
            figures[name]["top1"].append(top1_agreement(expected, logits))
            figures[name]["rouge"].append(rouge_l(found.text, reference.text))
            figures[name]["same"].append(float(found.token_ids == reference.token_ids))
        for engine in engines.values():
            engine.invalidate()
    ratio = RecomputeConfig().ratio
    table = Table(title=f"{len(rows)} questions, ratio {ratio:g}, against full prefill; means with 95 % intervals")
    for column in ("precision", "KL", "KL - that of model", "top-1", "ROUGE-L", "same"):
        table.add_column(column, justify="right")
    for name, figure in figures.items():
        difference = paired_difference(figure["kl"], figures["model"]["kl"])
        table.add_row(
            name,
            f"{bootstrap_mean(figure['kl']):.4f}",
            "" if name == "model" else f"{difference:.4f}",
            f"{statistics.mean(figure['top1']):.3f}",
            f"{bootstrap_mean(figure['rouge']):.3f}",
            f"{statistics.mean(figure['same']):.2f}",
        )
    return table


def ttft(first: CacheCraftEngine, place: Place, arguments: argparse.Namespace) -> Table:
    """Time to first token by tier, ratio and loading ahead."""
    workload = load_workload(first, arguments.docs, arguments.chunk_tokens, arguments.chunks + arguments.chunks // 2)
    entries = warmed(first, workload.chunks, show_progress=True)
    measured: dict[tuple[str, str, float], list[RequestStats]] = defaultdict(list)
    draw = random.Random(arguments.seed)
    with opened_ways(first, place, entries, arguments) as ways:
        runs = [(way, ratio) for way in ways for ratio in arguments.ratios]
        for number in tqdm(range(arguments.requests + 1), desc="ttft", unit="request"):
            chunks = tuple(draw.sample(workload.chunks, arguments.chunks))
            prompt = RagPrompt(SYSTEM, chunks, draw.choice(workload.questions))
            draw.shuffle(runs)
            for way, ratio in runs:
                way.engine.store.flush()
                way.prepare()
                stats = way.engine.generate(prompt, recompute=RecomputeConfig(ratio=ratio), max_new_tokens=1).stats
                held_by = {"memory": "cold", "redis": "remote"}.get(way.tier, "disk")
                if stats.hits_by_tier != {held_by: arguments.chunks}:
                    raise SystemExit(f"{way.tier}: found {stats.hits_by_tier}, not {arguments.chunks} in {held_by}")
                if number:  # the first request warms caches and allocators
                    measured[way.tier, way.load_ahead, ratio].append(stats)
    table = Table(title=f"{arguments.chunks} chunks of {arguments.chunk_tokens} tokens, {arguments.requests} requests")
    for column in ("ratio", "tier", "load ahead", "TTFT s", "TTFT / memory", "load s", "prefill s", "MB loaded"):
        table.add_column(column, justify="right")
    for ratio in arguments.ratios:
        for way in ways:
            found, memory = measured[way.tier, way.load_ahead, ratio], measured["memory", "", ratio]
            shares = [one.ttft_s / other.ttft_s for one, other in zip(found, memory, strict=True)]
            times = [f"{median(found, field):.3f}" for field in ("load_s", "prefill_s")]
            figures = [f"{median(found, 'ttft_s'):.3f}", f"{statistics.median(shares):.3f}", *times]
            table.add_row(
                f"{ratio:g}", way.tier, way.load_ahead, *figures, f"{median(found, 'bytes_loaded') / 1e6:.1f}"
            )
    return table


def median(stats: list[RequestStats], field: str) -> float:
    """Median of a field."""
    return float(statistics.median(getattr(one, field) for one in stats))


@contextmanager
def opened_ways(
    first: CacheCraftEngine, place: Place, entries: Entries, arguments: argparse.Namespace
) -> Iterator[list[Way]]:
    """Memory, and every other tier with and without loading ahead; what was put there is removed afterwards."""
    folder = place.folder / "ttft"
    codec = {"precision": arguments.precision, "compression": arguments.compression}
    ways = [Way("memory", "", first, lambda: None)]
    slow = []
    for load_ahead in (arguments.load_ahead, 0):
        # One byte of memory keeps nothing, so every request finds its chunks where the first one did.
        options: dict[str, Any] = {
            "device_size": 0,
            "cold": {"size": 1},
            "load_ahead": load_ahead,
            "compute_if_faster": False,
        }
        shown = str(load_ahead) if load_ahead else "off"
        disk = engine_on({**options, "disk": {"path": str(folder), "size": UNLIMITED, **codec}}, first)
        slow.append(disk)
        fill(disk.store, entries)
        ways.append(Way("disk, hot", shown, disk, partial(read_all, folder)))
        if place.is_cold_possible:
            ways.append(Way("disk, cold", shown, disk, partial(drop_page_cache, folder)))
        if place.url is not None:
            remote = engine_on({**options, "remote": {"url": place.url, **codec}}, first)
            slow.append(remote)
            fill(remote.store, entries)
            ways.append(Way("redis", shown, remote, lambda: None))
    try:
        yield ways
    finally:
        for engine in slow:
            engine.store.clear(NAMESPACE)
            engine.close()


def engine_on(store: dict[str, Any], first: CacheCraftEngine) -> CacheCraftEngine:
    """Another engine of the same model."""
    config = EngineConfig.model_validate({"store": store, "namespace": NAMESPACE, "keep_exact": False})
    return CacheCraftEngine(first.model, first.tokenizer, config)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder, alias or hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="torch dtype (default: %(default)s)")
    parser.add_argument(
        "--parts", nargs="+", choices=["sizes", "quality", "ttft"], default=["sizes", "quality", "ttft"]
    )
    parser.add_argument("--data", type=Path, help="JSONL of questions with their passages (docs), for quality")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--passages", type=int, default=10, help="per question")
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument(
        "--docs", type=Path, help="JSONL of documents for sizes and ttft (default: the sample contracts)"
    )
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=8, help="per request")
    parser.add_argument("--rounds", type=int, default=5, help="of loading, in sizes")
    parser.add_argument("--requests", type=int, default=10, help="in ttft")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.15, 0.0])
    parser.add_argument("--load-ahead", type=int, default=3)
    parser.add_argument("--precision", default="model", help="on disk and in Redis, in ttft")
    parser.add_argument("--compression", default="none", help="on disk and in Redis, in ttft")
    parser.add_argument(
        "--folder", type=Path, help="where the disk tier lies (default: the folder for temporary files)"
    )
    parser.add_argument("--redis", help="URL of a server; only our own namespace is touched")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
