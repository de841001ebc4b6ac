"""Answers to the inputs of one ``batch``, drawn together though LangChain asks for them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from langchain_core.messages import BaseMessage

A = TypeVar("A")


class BatchRound(Generic[A]):
    """Every input has a run of its own, with its own callbacks and its own look at the response cache; the first that
    needs an answer has those of all inputs behind it drawn too.

    Args:
        model: Whose batch it is.
        chats: The messages of each input; ``None`` for one that there are none of, which is left out.
        draw: Answers to some of them. When it fails, every input is answered by itself, so that an error
            stays with the input that it belongs to.
    """

    def __init__(
        self,
        model: object,
        chats: Sequence[list[BaseMessage] | None],
        draw: Callable[[Sequence[list[BaseMessage]]], list[A]],
    ) -> None:
        self._model, self._chats, self._draw = model, chats, draw
        self._answers: dict[int, A] = {}
        self._has_failed = False
        self._place = 0

    @contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Say which input is asked for in the block, for ``current_round``."""
        self._place = place
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def answer(self, model: object, messages: list[BaseMessage]) -> A | None:
        """The answer to the input that is asked for; ``None`` when it has to be drawn by itself.

        Args:
            model: Who asks; a callback may ask another model meanwhile.
            messages: What is asked; or the same model something else.
        """
        if model is not self._model or messages != self._chats[self._place]:
            return None
        if self._place not in self._answers and not self._has_failed:
            chats = {place: chat for place, chat in enumerate(self._chats) if place >= self._place and chat is not None}
            try:
                self._answers.update(zip(chats, self._draw([*chats.values()]), strict=True))
            except Exception:
                # Whose error it is shows when each is answered by itself; there it is raised again.
                self._has_failed = True
        return self._answers.pop(self._place, None)


_current: ContextVar[BatchRound[Any] | None] = ContextVar("cachecraft_batch_round", default=None)


def current_round() -> BatchRound[Any] | None:
    """The round whose input is asked for here; ``None`` outside a batch."""
    return _current.get()
