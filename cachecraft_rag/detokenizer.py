"""Token ids to text, one token at a time: whole characters only, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "�"  # what decoders give for a character whose bytes are not all there yet


class Detokenizer:
    """Turns the tokens of one answer into text deltas.

    Args:
        decode: Turns ids into text, special tokens left out.
        stop: Texts that end the answer. Text that may be the beginning of one is held back until that is decided.

    Attributes:
        text: All text given out so far.
        is_stopped: Whether a stop text was met.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # Tokens before _shown are part of the text already; decoding starts at _context so that the text of a token
        # is right whatever a decoder does at the beginning of a sequence (strips spaces, say).
        self._context = 0
        self._shown = 0
        self._held = ""
        self.text = ""
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now certain, often empty."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._shown])
        after = self._decode(self._ids[self._context :])
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return self._release(after[len(before) :])

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        if self.is_stopped:
            return ""
        before = self._decode(self._ids[self._context : self._shown])
        after = self._decode(self._ids[self._context :])
        self._context, self._shown = self._shown, len(self._ids)
        rest = self._release(after[len(before) :])
        held, self._held = self._held, ""
        self.text += held
        return rest + held

    def _release(self, text: str) -> str:
        text = self._held + text
        # The stop text that is complete first ends the answer, wherever the tokens happen to end.
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            certain, self._held = text[: min(found)[1]], ""
        else:
            keep = max((_overlap(text, stop) for stop in self._stop), default=0)
            certain, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += certain
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
