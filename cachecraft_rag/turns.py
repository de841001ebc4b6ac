"""Whose turn it is on the model: the next request's prefill, or the tokens of those who decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SHARE = 3.0
"""Time that prefills may take, as a multiple of that of everyone's next token.

A token for 32 readers takes about as long as a prefill that reuses its chunks. Turn by turn, those who wait for their
first token would wait twice as long; this way they get three quarters of the time, and a reader waits for one prefill
or for three times as long as the token takes.
"""


class Turns:
    """Has prefills and tokens take turns while there are both.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ahead_s = self._rows_s = 0.0

    @property
    def are_rows_due(self) -> bool:
        """Whether everyone who decodes gets a token before the next prefill."""
        return self._ahead_s > 0.0 and self._ahead_s >= _SHARE * self._rows_s

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """While a prefill, or the end of an answer, is under way."""
        started = self._clock()
        try:
            yield
        finally:
            self._ahead_s += self._clock() - started

    @contextmanager
    def rows(self) -> Iterator[None]:
        """While everyone gets a token."""
        started = self._clock()
        try:
            yield
        finally:
            self._rows_s = self._clock() - started
            self.rest()

    def rest(self) -> None:
        """Nobody decodes: the next prefill has nobody to wait for."""
        self._ahead_s = 0.0
