"""Requests that wait for a place: first come first served, but those that share chunks go together."""

from __future__ import annotations

from collections.abc import Callable, Set

from cachecraft_rag.ticket import Ticket

MAX_OVERTAKEN = 4
"""How often a request may see a later one go first. So none waits for more than these and those before it."""


class WaitingLine:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._tickets)

    def append(self, ticket: Ticket) -> None:
        """Put a request at the end."""
        self._tickets.append(ticket)

    def discard(self, ticket: Ticket) -> bool:
        """Take a request out, wherever it stands; whether it was there."""
        is_there = ticket in self._tickets
        if is_there:
            self._tickets.remove(ticket)
        return is_there

    def take(self, fits: Callable[[Ticket], bool], near: Set[tuple[str, str]]) -> Ticket | None:
        """Take the request that shares most chunks with those that run; of several, and without any, the first.

        Nobody goes before one that was overtaken ``MAX_OVERTAKEN`` times, not even while that one has no room.

        Args:
            fits: Whether there is room for a request.
            near: ``Ticket.chunks`` of those that run.
        """
        best: tuple[int, int] | None = None
        for place, ticket in enumerate(self._tickets):
            if fits(ticket):
                shared = len(ticket.chunks & near)
                if best is None or shared > best[0]:
                    best = shared, place
            if ticket.num_overtaken >= MAX_OVERTAKEN:
                break
        if best is None:
            return None
        for ticket in self._tickets[: best[1]]:
            ticket.num_overtaken += 1
        return self._tickets.pop(best[1])
