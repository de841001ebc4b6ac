"""The steps that the model is run in: one prefill, the end of one answer, or a token for everyone who decodes."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from cachecraft_rag.answer import Answer
from cachecraft_rag.batch_decode import NextRow, row_alone, rows_together
from cachecraft_rag.config import SchedulerConfig
from cachecraft_rag.errors import DeadlineExceededError, RequestCancelledError
from cachecraft_rag.in_flight import RequestsInFlight
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.prefiller import Prefiller
from cachecraft_rag.refinement import Refinement
from cachecraft_rag.request import Request
from cachecraft_rag.result import GenerationResult
from cachecraft_rag.ticket import Ticket
from cachecraft_rag.turns import Turns
from cachecraft_rag.waiting_line import WaitingLine


class StepRunner:
    """Takes requests from the line to the end of their answers, step by step; they join and leave between steps.

    Everything but ``add``, ``open`` and ``num_waiting`` is for one thread at a time: whoever has the turn.

    Args:
        adapter: The model.
        prefiller: Does what comes before the first token and after the last.
        to_text: Turns token ids into text, special tokens left out.
        eos_ids: Ids that end an answer.
        config: How many at once.
        one_by_one: Whether the model keeps its own cache, so that one request is answered after the other.
        in_flight: Is told of every request.
        refinement: Is shown every request that was answered.

    Attributes:
        open: The requests that have not ended.
        turns: Whether prefills or tokens come next.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        prefiller: Prefiller,
        to_text: Callable[[Sequence[int]], str],
        eos_ids: Set[int],
        config: SchedulerConfig,
        one_by_one: bool,
        in_flight: RequestsInFlight,
        refinement: Refinement | None,
    ) -> None:
        self._adapter, self._prefiller, self._config = adapter, prefiller, config
        self._in_flight, self._refinement = in_flight, refinement
        self._new_answer = partial(Answer, to_text=to_text, eos_ids=eos_ids)
        self._limit = 1 if one_by_one else config.max_batch
        self._arrived: SimpleQueue[Ticket] = SimpleQueue()
        self._waiting = WaitingLine()
        self._running: list[Ticket] = []
        self._unsettled: deque[Request] = deque()
        self._has_warned = False
        self._last_chunks: frozenset[tuple[str, str]] = frozenset()
        self.turns = Turns()
        self.open: set[Ticket] = set()

    @property
    def num_waiting(self) -> int:
        """Requests that have not been begun."""
        return len(self.open) - len(self._running)

    def ticket(self, request: Request, reuse: bool, timeout_s: float | None, owner: object, is_whole: bool) -> Ticket:
        """A request as it is handled here; arguments as in ``Ticket``, the time counted from the request's start."""
        deadline = None if timeout_s is None else request.started + timeout_s
        return Ticket(request, reuse, owner, is_whole, deadline, self._adapter.kv_bytes(request.capacity))

    def add(self, tickets: Sequence[Ticket]) -> None:
        """Put requests into line."""
        for _ in tickets:
            self._in_flight.__enter__()
        self.open.update(tickets)  # from here on they may end
        for ticket in tickets:
            self._arrived.put(ticket)

    def step(self) -> bool:
        """Prefill one request, end one answer, or draw a token for all who decode; whether there was anything to do.

        Prefills and ends take turns with the others' tokens, see ``Turns``.
        """
        self.drop_ended()
        while self._unsettled:
            self._do_afterwards(self._unsettled.popleft(), is_complete=False)
        while not self._arrived.empty():
            if (ticket := self._arrived.get()) in self.open:
                self._waiting.append(ticket)
        ready = [ticket for ticket in self._running if ticket.is_ready()]
        if not (self.turns.are_rows_due and ready):
            complete = next((t for t in self._running if t.answer is not None and t.answer.is_complete), None)
            admitted = self._admit() if complete is None else None
            if complete is not None or admitted is not None:
                with self.turns.ahead():
                    if complete is not None:
                        self._finish(complete)
                    elif admitted is not None:
                        self._prefill(admitted)
                return True
        if not ready:
            self.turns.rest()
            return False
        chosen = ready[: self._limit]
        if len(ready) > len(chosen):  # readers came back: everyone in turn
            self._running = [t for t in self._running if t not in chosen] + chosen
        with self.turns.rows():
            self._decode(chosen)
        return True

    def drop_ended(self) -> None:
        """Let go of requests that nobody waits for, and of those whose time is over."""
        now = time.perf_counter()
        for ticket in tuple(self.open):
            if ticket.is_cancelled:
                self.end(ticket, RequestCancelledError())
            elif ticket.deadline is not None and now >= ticket.deadline:
                self.end(ticket, DeadlineExceededError(ticket.deadline - ticket.request.started))

    def close(self) -> None:
        """Let go of the memory that is kept for later requests."""
        self._adapter.drop_buffers()

    def _admit(self) -> Ticket | None:
        """The next request to prefill, if there is one that has room.

        A request whose reader stays away keeps its memory, but not its place among those that decode. Where nobody
        else could go on, the next one is let in whatever the memory: the budget must not stop everything.
        """
        if not len(self._waiting):
            return None
        num_active = sum(not ticket.is_parked for ticket in self._running)
        if num_active >= self._limit:
            return None
        num_bytes = self._config.memory - sum(ticket.num_bytes for ticket in self._running)
        near = self._last_chunks.union(*(other.chunks for other in self._running))
        ticket = self._waiting.take(lambda ticket: num_active == 0 or ticket.num_bytes <= num_bytes, near)
        if ticket is not None:
            self._last_chunks = ticket.chunks
            self._running.append(ticket)
        return ticket

    def _prefill(self, ticket: Ticket) -> None:
        request = ticket.request
        request.figures["queue_s"] = time.perf_counter() - ticket.queued
        try:
            self._prefiller.run(request, ticket.reuse)
            assert request.logits is not None
            self._draw(ticket, NextRow(request.logits))
        except Exception as error:
            self.end(ticket, error)

    def _decode(self, tickets: Sequence[Ticket]) -> None:
        together = [ticket for ticket in tickets if self._is_batchable(ticket)] if len(tickets) > 1 else []
        if len(together) > 1:
            requests = [ticket.request for ticket in together]
            rows = rows_together(self._adapter, requests, [_last_id(ticket) for ticket in together])
            for ticket, row in zip(together, rows, strict=True):
                self._draw(ticket, row)
        for ticket in tickets:
            if len(together) < 2 or ticket not in together:
                self._draw(ticket, row_alone(ticket.request, _last_id(ticket)))

    def _is_batchable(self, ticket: Ticket) -> bool:
        if ticket.is_batchable is None:
            ticket.is_batchable = self._prefiller.is_batchable(ticket.request)
        return ticket.is_batchable

    def _draw(self, ticket: Ticket, row: NextRow | Exception) -> None:
        if isinstance(row, Exception):
            self.end(ticket, row)
        elif not ticket.is_cancelled:
            try:
                answer = ticket.answer or self._new_answer(ticket.request)
                ticket.draw(answer, answer.draw(*row))
            except Exception as error:
                self.end(ticket, error)

    def _finish(self, ticket: Ticket) -> None:
        assert ticket.answer is not None
        try:
            self._do_afterwards(ticket.request)
            self._leave(ticket, ticket.answer.result(), None)
        except Exception as error:
            self._leave(ticket, None, error)

    def _do_afterwards(self, request: Request, is_complete: bool = True) -> None:
        """What later requests gain by; no answer may be lost for it."""
        observe = [] if self._refinement is None else [self._refinement.observe]
        for learn in (self._prefiller.settle, *((self._prefiller.learn, *observe) if is_complete else ())):
            try:
                learn(request)
            except Exception as error:
                if not self._has_warned:
                    self._has_warned = True
                    message = f"{type(error).__name__}: {error}; later errors of this kind are not told"
                    warnings.warn(f"what an answer taught was not kept: {message}", UserWarning, stacklevel=2)

    def end(self, ticket: Ticket, error: Exception) -> None:
        """Give a request up, wherever it stands.

        What a cancelled one has read is settled by the next step: a garbage collection may have ended it, on a thread
        that holds the store's locks.
        """
        if ticket.is_cancelled:
            self._unsettled.append(replace(ticket.request, kv=None, logits=None, next_logits=None))
        else:
            try:
                self._prefiller.settle(ticket.request)
            except Exception as settle_error:
                error.__context__ = settle_error
        self._leave(ticket, None, error)

    def _leave(self, ticket: Ticket, result: GenerationResult | None, error: Exception | None) -> None:
        if ticket in self._running:
            self._running.remove(ticket)
        else:
            self._waiting.discard(ticket)
        self.open.discard(ticket)
        self._in_flight.__exit__()
        ticket.end(result, error)
        if not self._running:
            self._adapter.drop_buffers(num_kept=1)


def _last_id(ticket: Ticket) -> int:
    assert ticket.answer is not None
    return ticket.answer.last_id
