"""Refinement: what was answered approximately and comes again is computed exactly while no request runs."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch

from cachecraft_rag.assembly import assemble
from cachecraft_rag.capability import Capability
from cachecraft_rag.config import RefineConfig
from cachecraft_rag.in_flight import RequestsInFlight
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.library import ChunkLibrary
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.model_state import ModelState
from cachecraft_rag.plan import make_plan
from cachecraft_rag.prompt import EncodedPrompt
from cachecraft_rag.request import Request
from cachecraft_rag.stats import RefinementStats
from cachecraft_rag.thread_workers import release_workers

_LOOK_S = 0.05
"""Seconds after which the thread looks again whether requests run; whoever ends one tells nobody."""

_with_thread: WeakSet[Refinement] = WeakSet()


@dataclass(eq=False)
class _Job:
    """The beginning of a prompt, up to the end of a chunk, that is to be computed exactly.

    Attributes:
        beginning: Its ids and chunks.
        runs: Exact keys of its chunks; each stands for the beginning up to there.
        namespace: Whose chunks.
        is_cancelled: Whether it is no longer wanted.
    """

    beginning: EncodedPrompt
    runs: tuple[ChunkKey, ...]
    namespace: str
    is_cancelled: bool = False


class Refinement:
    """Counts the chunk sequences of prompts, and has those that come again computed exactly by one thread.

    A sequence is told by the exact key of its last chunk, which is a hash of all tokens up to there: the same chunks
    behind another instruction are another sequence. The thread exists only while there is something to do. It computes
    piece by piece, and none while a request is being answered, so that a request waits for one piece at most. While
    it waits itself it holds the KV of one prompt.

    Args:
        adapter: The model.
        state: Whether the model is as it was.
        capability: What the model allows.
        library: Looks up and keeps chunks.
        in_flight: The requests of the model.
        config: Settings.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        state: ModelState,
        capability: Capability,
        library: ChunkLibrary,
        in_flight: RequestsInFlight,
        config: RefineConfig,
    ) -> None:
        self._adapter, self._state, self._capability = adapter, state, capability
        self._library, self._in_flight, self._config = library, in_flight, config
        self._changed = threading.Condition()  # its lock guards all that follows
        self._counts: OrderedDict[ChunkKey, int] = OrderedDict()
        self._waiting: OrderedDict[ChunkKey, _Job] = OrderedDict()
        self._current: _Job | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = self._has_warned = False
        self._figures = {"refined": 0, "stored_tokens": 0, "computed_tokens": 0, "forwards": 0, "errors": 0}

    def observe(self, request: Request) -> None:
        """Count an answered request's sequences, and queue the longest that has come often enough."""
        plan = request.plan
        if plan is None or plan.ratio >= 1.0 or not plan.approximate:
            return
        first = plan.chunks.index(plan.approximate[0])
        runs = tuple(chunk.exact_key for chunk in request.chunks)
        with self._changed:
            if self._is_closed:
                return
            often = 0
            for length, key in enumerate(runs[first:], first + 1):
                count = self._counts.pop(key, 0) + 1
                self._counts[key] = count
                often = length if count >= self._config.after else often
            while len(self._counts) > self._config.max_sequences:
                self._counts.popitem(last=False)
            if often:
                self._queue(request.encoded, runs[:often], request.namespace)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to refine, or for ``timeout`` seconds; whether nothing is left."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def stats(self) -> RefinementStats:
        """The figures so far."""
        with self._changed:
            waiting = len(self._waiting) + (self._current is not None)
            return RefinementStats(sequences=len(self._counts), waiting=waiting, **self._figures)

    def forget(self, namespace: str) -> None:
        """Give up what is counted or under way of a namespace; the library stores nothing of that any more."""
        with self._changed:
            for key in [key for key in self._counts if key.namespace == namespace]:
                del self._counts[key]
            for key in [key for key in self._waiting if key.namespace == namespace]:
                del self._waiting[key]
            if self._current is not None and self._current.namespace == namespace:
                self._current.is_cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """Give everything up, and wait for the piece that is being computed. Closing twice is harmless."""
        with self._changed:
            self._is_closed = True
            self._counts.clear()
            self._waiting.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _queue(self, encoded: EncodedPrompt, runs: tuple[ChunkKey, ...], namespace: str) -> None:
        if self._current is not None and runs[-1] in self._current.runs:
            return
        if any(runs[-1] in job.runs for job in self._waiting.values()):
            return
        for key in runs:
            self._waiting.pop(key, None)  # a shorter sequence that this one begins with
        spans = encoded.spans[: len(runs)]
        beginning = replace(encoded, text="", token_ids=encoded.token_ids[: spans[-1].end], spans=spans)
        self._waiting[runs[-1]] = _Job(beginning, runs, namespace)
        while len(self._waiting) > self._config.max_waiting:
            self._waiting.popitem(last=False)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="cachecraft-refine", daemon=True)
            _with_thread.add(self)
            self._thread.start()

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                try:
                    self._refine(job)
                except Exception as error:  # no request may fail for what was only done ahead of need
                    self._report(error)
                release_workers()
        finally:
            with self._changed:
                self._end()  # warnings may be errors

    def _next(self) -> _Job | None:
        """The next sequence, as soon as no request runs; ``None`` ends the thread."""
        with self._changed:
            if self._current is not None:
                for key in self._current.runs:
                    self._counts.pop(key, None)  # should it get lost, it must come that often again
            self._current = None
            while self._waiting and self._in_flight.count:
                self._changed.wait(_LOOK_S)
            if not self._waiting:
                self._end()  # under the lock, or a sequence queued now would find a thread that has gone
                return None
            _, self._current = self._waiting.popitem(last=False)
            return self._current

    def _end(self) -> None:
        if self._thread is threading.current_thread():
            self._thread, self._current = None, None
            _with_thread.discard(self)
            self._changed.notify_all()

    def _may_go_on(self, job: _Job) -> bool:
        """Wait while requests run; whether the sequence is still wanted then, and the model undisturbed."""
        with self._changed:
            while self._in_flight.count and not self._is_given_up(job):
                self._changed.wait(_LOOK_S)
            if self._is_given_up(job):
                return False
        return self._state.intervention() is None

    def _is_given_up(self, job: _Job) -> bool:
        return job.is_cancelled or self._is_closed

    def _refine(self, job: _Job) -> None:
        token_ids = torch.tensor(job.beginning.token_ids)
        if self._capability.reason_for(token_ids.numel()) is not None or not self._may_go_on(job):
            return
        assert self._capability.rope is not None, "a model that can reuse chunks has a known rotation"
        keys = self._library.keys(job.namespace)
        chunks = self._library.look_up_exact(job.beginning, keys)
        found = [chunk.chunk_kv is not None for chunk in chunks]
        if all(found):
            return
        spans = [(span.start, span.end) for span in job.beginning.spans]
        plan = make_plan(token_ids.numel(), spans, found, found, 1.0)
        kv = self._adapter.new_kv(token_ids.numel())
        assemble(plan, [chunk.chunk_kv for chunk in chunks], self._capability.rope, kv)
        for rows in _pieces(plan.free_ranges(), self._config.piece_tokens):
            if not self._may_go_on(job):
                return
            self._adapter.forward_rows(token_ids[rows], rows, kv)
            self._count(forwards=1, computed_tokens=rows.numel())
        if not self._is_given_up(job) and self._state.fingerprint() == keys.model:
            self._count(refined=1, stored_tokens=self._library.keep_exact(plan, chunks, kv))

    def _count(self, **figures: int) -> None:
        with self._changed:
            for name, value in figures.items():
                self._figures[name] += value

    def _report(self, error: Exception) -> None:
        self._count(errors=1)
        if not self._has_warned:
            self._has_warned = True
            message = f"chunks were not refined: {type(error).__name__}: {error}; further errors are only counted"
            warnings.warn(message, UserWarning, stacklevel=2)


def _pieces(ranges: Sequence[tuple[int, int]], piece_tokens: int) -> Iterator[torch.Tensor]:
    rows = torch.cat([torch.arange(start, end) for start, end in ranges])
    for start in range(0, rows.numel(), piece_tokens):
        yield rows[start : start + piece_tokens]


@atexit.register
def _close_all() -> None:
    """Let no thread compute while the interpreter is taken down."""
    for refinement in list(_with_thread):
        refinement.close()
