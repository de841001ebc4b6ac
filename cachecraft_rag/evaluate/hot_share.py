"""Hit rate and time to first token by the share of device memory that is hot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from tqdm.auto import tqdm

from cachecraft_rag.config import RecomputeConfig
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.evaluate.bootstrap import bootstrap_mean
from cachecraft_rag.evaluate.curve import Curve, Point
from cachecraft_rag.evaluate.fitting import fits
from cachecraft_rag.evaluate.questions import INSTRUCTION
from cachecraft_rag.evaluate.stored_sample import StoredChunk, engine_with, first_token
from cachecraft_rag.prompt import RagPrompt
from cachecraft_rag.store import ChunkStore

BUDGET_SHARE = 1 / 3
"""Device memory of the measurement over what all chunks would take."""

_DRIFT = 0.1  # how often, per request, a chunk drawn at random becomes the most popular one
_NOT_COUNTED = 0.25  # of the replayed requests: while tiers fill, every share misses alike


def zipf_stream(num_chunks: int, per_request: int, num_requests: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Requests for chunks whose popularity falls as one over their rank, and changes now and then.

    Args:
        num_chunks: How many chunks there are.
        per_request: Chunks per request, all different.
        num_requests: Length of the stream.
        seed: The same seed gives the same stream.

    Returns:
        Numbers of chunks, 0 to ``num_chunks - 1``, for every request.

    Raises:
        ValueError: A request asks for more chunks than there are, or for none.
    """
    if not 1 <= per_request <= num_chunks:
        raise ValueError(f"per_request: {per_request} is not in 1 to {num_chunks}, the number of chunks")
    draw = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, num_chunks + 1)
    weights /= weights.sum()
    ranked = list(map(int, draw.permutation(num_chunks)))
    requests = []
    for _ in range(num_requests):
        if draw.random() < _DRIFT:
            ranked.insert(0, ranked.pop(int(draw.integers(num_chunks))))
        ranks = draw.choice(num_chunks, per_request, replace=False, p=weights)
        requests.append(tuple(ranked[rank] for rank in ranks))
    return requests


def hot_share_curve(
    engine: CacheCraftEngine,
    chunks: Sequence[StoredChunk],
    questions: Sequence[str],
    shares: Sequence[float],
    recompute: RecomputeConfig,
    *,
    per_request: int = 4,
    num_replayed: int = 300,
    num_requests: int = 12,
    instruction: str = INSTRUCTION,
    seed: int = 0,
    show_progress: bool = False,
) -> Curve:
    """Replay one stream of requests against stores that differ in ``hot_share`` only.

    Device memory holds a third of the chunks, and there is no tier below it, so that a miss is computed. At first
    requests only look up and store, with KV that is at hand: that gives the hit rate. Then the stream's last requests
    are answered: that gives the time to first token.

    Args:
        engine: The engine; policies and precisions of its hot and warm tier are used.
        chunks: Chunks with their KV.
        questions: What is asked, one after the other, but for those that don't fit into the context window together
            with the longest chunks.
        shares: Values of ``hot_share`` in 0 to 1.
        recompute: Policy and ratio of the requests that are answered.
        per_request: Chunks per request.
        num_replayed: Requests that are only looked up; the first quarter is not counted.
        num_requests: Requests that are answered.
        instruction: System message.
        seed: Draws the stream.
        show_progress: Whether to show a progress bar.

    Raises:
        ValueError: The chunks are too few for a budget of a third of them to hold a request's, or no question fits.
    """
    if len(chunks) * BUDGET_SHARE < per_request:
        least = round(per_request / BUDGET_SHARE)
        raise ValueError(f"chunks: {len(chunks)} are too few for {per_request} per request; give at least {least}")
    longest = sorted(chunks, key=lambda chunk: chunk.kv.num_tokens, reverse=True)[:per_request]
    texts = tuple(chunk.text for chunk in longest)
    asked = [text for text in questions if fits(engine, RagPrompt(system=instruction, chunks=texts, question=text))]
    if not asked:
        raise ValueError(
            f"questions: beside {per_request} chunks all {len(questions)} are longer than the model's context window"
        )
    budget = int(sum(chunk.kv.nbytes for chunk in chunks) * BUDGET_SHARE)
    stream = zipf_stream(len(chunks), per_request, num_replayed + num_requests, seed)
    replay = _Replay(chunks, asked, stream, instruction, recompute)
    points = []
    shares = sorted(set(shares))
    total = len(shares) * len(stream)
    with tqdm(total=total, desc="hot shares", unit="request", disable=not show_progress) as bar:
        for share in shares:
            with engine_with(engine, device_size=budget, hot_share=share) as small:
                hits, seconds = replay.run(small, num_replayed, bar)
            counted = hits[int(num_replayed * _NOT_COUNTED) :]
            points.append(Point(share, {"hit_rate": bootstrap_mean(counted), "ttft_s": bootstrap_mean(seconds)}))
    sample = (
        f"{len(chunks)} chunks, device memory for a third of them; {num_replayed} requests for {per_request} chunks "
        f"replayed, {num_requests} answered; a miss is computed"
    )
    title = "Hit rate and time to first token by hot share"
    return Curve("hot_share", title, "hot share of device memory", ("hit_rate", "ttft_s"), tuple(points), sample)


class _Replay:
    """One stream, ready to be replayed on any store."""

    def __init__(
        self,
        chunks: Sequence[StoredChunk],
        questions: Sequence[str],
        stream: Sequence[tuple[int, ...]],
        instruction: str,
        recompute: RecomputeConfig,
    ) -> None:
        self._requests = [[chunks[index] for index in request] for request in stream]
        self._questions, self._instruction, self._recompute = questions, instruction, recompute

    def run(self, engine: CacheCraftEngine, num_replayed: int, bar: tqdm[NoReturn]) -> tuple[list[float], list[float]]:
        """Hit rate of every replayed request, and seconds to first token of every other."""
        hits: list[float] = []
        seconds: list[float] = []
        for number, request in enumerate(self._requests):
            if number < num_replayed:
                hits.append(sum(self._use(engine.store, chunk) for chunk in request) / len(request))
            else:
                missing = [chunk for chunk in request if not engine.store.contains(chunk.key)]
                texts, question = [chunk.text for chunk in request], self._questions[number % len(self._questions)]
                seconds.append(first_token(engine, texts, question, self._instruction, self._recompute).ttft_s)
                for chunk in missing:  # instead of what was just computed, which may lack its sensitivity
                    engine.store.put(chunk.key, chunk.kv)
            bar.update()
        return hits, seconds

    def _use(self, store: ChunkStore, chunk: StoredChunk) -> bool:
        """Look a chunk up as a request does, and store it where it is missing; whether it was there."""
        is_hit = store.get(chunk.key) is not None
        if not is_hit:
            store.put(chunk.key, chunk.kv)
        store.flush()  # what was pushed out of one tier is in the next before anything else happens
        return is_hit
