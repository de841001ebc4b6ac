"""The line: first come first served, chunks together, nobody overtaken for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cachecraft_rag.ticket import Ticket
from cachecraft_rag.waiting_line import MAX_OVERTAKEN, WaitingLine


def ticket(name: str, *chunks: str, num_bytes: int = 1) -> Ticket:
    spans = [SimpleNamespace(text=text) for text in chunks]
    request: Any = SimpleNamespace(namespace="default", encoded=SimpleNamespace(spans=spans))
    return Ticket(request, True, name, True, None, num_bytes)


def line(*tickets: Ticket) -> WaitingLine:
    made = WaitingLine()
    for one in tickets:
        made.append(one)
    return made


def order(waiting: WaitingLine, *near: str, room: int = 10) -> str:
    """Owners in the order in which they are taken, each after the one whose chunks it then stands near."""
    names, chunks = "", frozenset(("default", text) for text in near)
    while (taken := waiting.take(lambda one: one.num_bytes <= room, chunks)) is not None:
        names, chunks = names + str(taken.owner), taken.chunks
    return names


def test_without_shared_chunks_it_is_first_come_first_served() -> None:
    assert order(line(ticket("A", "x"), ticket("B", "y"), ticket("C"))) == "ABC"


def test_who_shares_most_chunks_goes_first_and_of_equals_who_came_first() -> None:
    waiting = line(ticket("A", "z"), ticket("B", "x"), ticket("C", "x", "y"), ticket("D", "y", "x"))
    assert order(waiting, "x", "y") == "CDBA"


def test_chunks_of_another_namespace_are_not_shared() -> None:
    stranger = ticket("B", "x")
    stranger.chunks = frozenset({("other", "x")})
    assert order(line(ticket("A", "z"), stranger), "x") == "AB"


def test_nobody_is_overtaken_more_often_than_allowed() -> None:
    friends = [ticket(str(number), "x") for number in range(MAX_OVERTAKEN + 2)]
    names = order(line(ticket("A", "z"), *friends), "x")
    assert names.index("A") == MAX_OVERTAKEN


def test_who_has_no_room_is_passed_but_not_for_ever() -> None:
    small = [ticket(str(number)) for number in range(MAX_OVERTAKEN + 2)]
    waiting = line(ticket("A", num_bytes=100), *small)
    assert order(waiting) == "".join(map(str, range(MAX_OVERTAKEN)))
    assert len(waiting) == 3
    assert order(waiting, room=100)[0] == "A"


def test_who_leaves_is_gone() -> None:
    first, second = ticket("A"), ticket("B")
    waiting = line(first, second)
    assert waiting.discard(first)
    assert not waiting.discard(first)
    assert order(waiting) == "B"
