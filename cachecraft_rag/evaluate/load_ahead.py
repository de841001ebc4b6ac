"""Load time by the prefetch window: how many chunks are read from disk at the same time, ahead of the computation."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm.auto import tqdm

from cachecraft_rag.config import RecomputeConfig
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.evaluate.bootstrap import bootstrap_median
from cachecraft_rag.evaluate.curve import Curve, Point
from cachecraft_rag.evaluate.fitting import fits
from cachecraft_rag.evaluate.questions import INSTRUCTION, Question
from cachecraft_rag.evaluate.stored_sample import StoredChunk, distinct_chunks, engine_with, first_token, stored_chunks
from cachecraft_rag.stats import RequestStats
from cachecraft_rag.store_config import DiskTierConfig


def load_ahead_curve(
    engine: CacheCraftEngine,
    questions: Sequence[Question],
    windows: Sequence[int],
    recompute: RecomputeConfig,
    *,
    num_requests: int = 8,
    folder: Path | None = None,
    instruction: str = INSTRUCTION,
    show_progress: bool = False,
) -> Curve:
    """Time the same requests, all of whose chunks lie on disk, for every ``load_ahead``.

    The chunks are written to a temporary folder, by the settings of the engine's disk tier where it has one. Before
    every request the operating system is asked to forget their pages (Linux only: elsewhere they may come from its
    cache). Windows take turns, so that noise of the machine hits all of them alike.

    Args:
        engine: The engine.
        questions: The questions; as many as there are requests, at most, are used. Those that don't fit into the
            context window are left out.
        windows: Values of ``load_ahead``, 0 to 64.
        recompute: Policy and ratio.
        num_requests: Requests per window.
        folder: Where the temporary folder is made; ``None`` makes it beside that of the engine's disk tier, where
            there is one, else in the system's place for temporary files.
        instruction: System message.
        show_progress: Whether to show a progress bar.

    Raises:
        RuntimeError: Chunks could not be written, or could not be read again.
        ValueError: All questions are longer than the context window.
    """
    fitting = (question for question in questions if fits(engine, question.prompt(instruction)))
    asked = list(islice(fitting, num_requests))
    if not asked:
        raise ValueError(f"questions: all {len(questions)} are longer than the model's context window")
    chunks = stored_chunks(engine, distinct_chunks(question.chunks for question in asked))
    windows = sorted(set(windows))
    figures: dict[int, list[RequestStats]] = {window: [] for window in windows}
    with TemporaryDirectory(prefix="cachecraft-", dir=_parent(engine, folder)) as place, ExitStack() as stack:
        disk = _disk(engine, place, 2 * sum(chunk.kv.nbytes for chunk in chunks))
        _write(engine, disk, chunks)
        tiers = {"device_size": 0, "disk": disk, "compute_if_faster": False}
        readers = {window: stack.enter_context(engine_with(engine, load_ahead=window, **tiers)) for window in windows}
        total = num_requests * len(windows)
        with tqdm(total=total, desc="prefetch windows", unit="request", disable=not show_progress) as bar:
            for number in range(num_requests):
                question = asked[number % len(asked)]
                first = number % len(windows)
                for window in (*windows[first:], *windows[:first]):
                    forget_pages(Path(place))
                    reader, words = readers[window], question.prompt(instruction).question
                    stats = first_token(reader, question.chunks, words, instruction, recompute)
                    if stats.chunk_misses:
                        raise RuntimeError(f"{stats.chunk_misses} chunks could not be read from {place} again")
                    figures[window].append(stats)
                    bar.update()
    points = [
        Point(
            window,
            {
                "load_s": bootstrap_median([stats.load_s for stats in found]),
                "ttft_s": bootstrap_median([stats.ttft_s for stats in found]),
            },
        )
        for window, found in figures.items()
    ]
    nbytes = sum(chunk.kv.nbytes for chunk in chunks) / len(chunks) / 2**20
    sample = f"{num_requests} requests, all chunks on disk, {nbytes:.1f} MiB each"
    title = "Load time by prefetch window"
    return Curve("load_ahead", title, "chunks read ahead", ("load_s", "ttft_s"), tuple(points), sample)


def forget_pages(folder: Path) -> None:
    """Ask the operating system to drop the cached pages of a folder's files, after writing them out; Linux only."""
    if sys.platform == "linux":
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)  # pages that are not written yet are kept
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)


def _parent(engine: CacheCraftEngine, folder: Path | None) -> Path | None:
    given = engine.config.store.disk
    if folder is None and given is not None:
        folder = Path(given.path).absolute().parent
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _disk(engine: CacheCraftEngine, path: str, nbytes: int) -> DiskTierConfig:
    """The engine's disk tier, or the default one, in another place and with room for so much."""
    given = engine.config.store.disk or DiskTierConfig(path=path)
    return given.model_copy(update={"path": path, "size": nbytes + 2**20, "ttl_s": None})


def _write(engine: CacheCraftEngine, disk: DiskTierConfig, chunks: Sequence[StoredChunk]) -> None:
    with engine_with(engine, device_size=0, disk=disk, admit_after=1) as writer:
        for chunk in chunks:
            writer.store.put(chunk.key, chunk.kv)
            writer.store.flush()  # what waits for the background thread is bounded, and dropped beyond that
        missing = sum(not writer.store.contains(chunk.key) for chunk in chunks)
    if missing:
        raise RuntimeError(f"{missing} of {len(chunks)} chunks could not be written to {disk.path}")
