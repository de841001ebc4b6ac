"""Who runs the model, and for whom: requests of many threads, prefilled in turn and decoded together.

As long as all requests are waited for by one thread, that thread runs the model itself, when it wants text: a request
alone costs nothing more than its own work. When another thread comes with a request, a thread of the scheduler takes
over until all are answered, so that only one thread has PyTorch's workers behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from cachecraft_rag.cancellation import current_cancellation
from cachecraft_rag.errors import EngineBusyError
from cachecraft_rag.request import Request
from cachecraft_rag.result import GenerationResult
from cachecraft_rag.step_runner import StepRunner
from cachecraft_rag.thread_workers import release_workers
from cachecraft_rag.ticket import Ticket

LINGER_S = 1.0
"""Seconds after which the scheduler's thread ends when there is nothing to do."""


class Scheduler:
    """Answers requests, each as if it were alone. Thread-safe.

    A thread keeps PyTorch's workers only while it runs the model, see ``thread_workers``.

    Args:
        runner: Takes the steps; nobody else may use it.
        max_waiting: How many may wait in line.
    """

    def __init__(self, runner: StepRunner, max_waiting: int) -> None:
        self._runner, self._max_waiting = runner, max_waiting
        # Held by whoever takes a step. A garbage collection may end a request anywhere, also during a step of the same
        # thread, so nobody waits for this lock to end one: see _cancel.
        self._turn = threading.Lock()
        self._lock = threading.RLock()  # guards what follows; re-entrant for the same reason
        self._is_threaded = self._is_closed = False
        self._thread: threading.Thread | None = None
        self._wake: SimpleQueue[None] = SimpleQueue()

    def stream(
        self, request: Request, reuse: bool, timeout_s: float | None = None
    ) -> Generator[str, None, GenerationResult]:
        """Answer a request piece by piece; it gets into line when the first piece is asked for.

        Args:
            request: The request.
            reuse: Whether chunks may be reused.
            timeout_s: Seconds from the request's start after which it is given up.

        Raises:
            EngineBusyError: Too many are waiting.
            DeadlineExceededError: The time was over.
            RequestCancelledError: It was cancelled from another thread.
            RuntimeError: The engine was closed.
        """
        ticket = self._runner.ticket(request, reuse, timeout_s, owner=object(), is_whole=False)
        self._submit([ticket])
        try:
            while (piece := self._next_piece(ticket)) is not None:
                yield piece
        finally:
            self._cancel(ticket)
            release_workers()
        return ticket.outcome()

    def answer_all(
        self, requests: Sequence[Request], reuse: bool, timeout_s: float | None = None
    ) -> list[GenerationResult]:
        """Whole answers to several requests, in their order; when one fails, the others are given up.

        Arguments and errors as in ``stream``. They are let in together when there is room for one more to wait.
        """
        owner = object()
        tickets = [self._runner.ticket(request, reuse, timeout_s, owner, is_whole=True) for request in requests]
        self._submit(tickets)
        try:
            for ticket in tickets:
                self._next_piece(ticket)  # there is none but the end
                ticket.outcome()
        finally:
            for ticket in tickets:
                self._cancel(ticket)
            release_workers()
        return [ticket.outcome() for ticket in tickets]

    def close(self) -> None:
        """End all requests with an error, after the step that is under way. Closing twice is harmless."""
        with self._lock:
            self._is_closed = True
        self._end_all("the engine was closed before this request was answered")
        self._wake.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._runner.close()

    def _submit(self, tickets: Sequence[Ticket]) -> None:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this engine is closed; make a new one")
            if self._runner.num_waiting >= self._max_waiting:
                raise EngineBusyError(self._max_waiting)
            is_shared = bool(self._runner.open)
            self._runner.add(tickets)
            if is_shared and not self._is_threaded:
                self._is_threaded = True
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name="cachecraft-engine", daemon=True)
                    self._thread.start()
        self._wake_thread()
        if (cancellation := current_cancellation()) is not None:
            for ticket in tickets:
                cancellation.on_cancel(partial(self._cancel, ticket))

    def _next_piece(self, ticket: Ticket) -> str | None:
        """The next piece of text; ``None`` after the last. Takes steps itself while nobody else is served."""
        while self._is_for_caller(ticket):
            with self._turn:
                if self._is_for_caller(ticket):  # still: another thread may have come while the turn was another's
                    self._runner.step()
        if self._is_threaded:
            release_workers()  # another thread computes while this one waits
        piece = ticket.pieces.get()
        if ticket.is_parked:
            self._wake_thread()
        return piece

    def _is_for_caller(self, ticket: Ticket) -> bool:
        """Whether the thread that waits for a request has to take a step."""
        return ticket.pieces.empty() and not (self._is_threaded or self._is_closed)

    def _cancel(self, ticket: Ticket) -> None:
        """End a request that nobody waits for any more, at once or after the step that is under way."""
        if ticket not in self._runner.open:
            return
        ticket.is_cancelled = True
        self._wake_thread()
        if self._turn.acquire(blocking=False):
            try:
                self._runner.drop_ended()
            finally:
                self._turn.release()

    def _wake_thread(self) -> None:
        if self._is_threaded:
            self._wake.put(None)

    def _serve(self) -> None:
        """What the own thread does: steps while there are any, for all who wait."""
        while not self._is_closed:
            while not self._wake.empty():  # what woke us is looked at by the step
                self._wake.get()
            try:
                with self._turn:
                    if self._runner.step():
                        continue
            except BaseException as error:  # an error of the scheduler itself: nobody must wait for ever
                self._end_all(f"the scheduler failed: {error!r}")
            with self._lock:
                if not self._runner.open:
                    self._is_threaded = False
            release_workers()
            with suppress(Empty):
                self._wake.get(timeout=None if self._is_threaded else LINGER_S)
            with self._lock:
                if not self._is_threaded:
                    self._thread = None
                    return

    def _end_all(self, reason: str) -> None:
        with self._turn:
            for ticket in tuple(self._runner.open):
                self._runner.end(ticket, RuntimeError(reason))
