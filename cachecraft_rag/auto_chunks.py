"""Text that nobody registered: split at paragraphs, and known from its second appearance on.

The first time it is read as the ordinary text that it is, hashes of its parts are remembered, and whoever answers is
told of them, to store their KV after the answer. A part that comes a second time is registered like any chunk.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from cachecraft_rag.pieces import Range
from cachecraft_rag.registry import ChunkRegistry, TextSpan
from cachecraft_rag.splitting import ChunkSplitter

#: Sizes of a part in characters. Small parts are found behind and before any other text; but each has its seam.
MIN_PART_CHARS = 256
MAX_PART_CHARS = 1024

_MAX_NEW = 256
"""Parts of a namespace that wait to be stored."""

_BETWEEN_PARAGRAPHS = re.compile(r"\n[^\S\n]*\n\s*")


class AutoChunks:
    """Remembers the parts of unregistered text. Thread-safe.

    Args:
        max_parts: How many parts are remembered over all namespaces; the one seen longest ago goes first.

    Raises:
        ValueError: ``max_parts`` is below 1.
    """

    def __init__(self, max_parts: int) -> None:
        if max_parts < 1:
            raise ValueError(f"max_parts: {max_parts!r} is too small; give at least 1")
        self._max_parts = max_parts
        self._seen: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._new: dict[str, deque[str]] = {}
        self._lock = threading.Lock()
        # Counts characters: boundaries are the same for every model, and nothing is tokenised to find them.
        self._splitter = ChunkSplitter(len, min_tokens=MIN_PART_CHARS, max_tokens=MAX_PART_CHARS)

    def find(self, text: str, ranges: Iterable[Range], registry: ChunkRegistry, namespace: str) -> list[TextSpan]:
        """Parts of a prompt that were seen before.

        Args:
            text: The prompt.
            ranges: Where nothing known stands.
            registry: Where parts are registered that were seen before.
            namespace: Whose prompt it is.

        Returns:
            Those parts, ordered by start.
        """
        parts = [part for start, end in ranges for part in self._parts(text, start, end)]
        with self._lock:
            found = [part for part in parts if self._is_known(namespace, text[slice(*part)])]
            while len(self._seen) > self._max_parts:
                self._seen.popitem(last=False)
        spans = [TextSpan(*part, (text[slice(*part)],)) for part in found]
        registry.register([span.origins[0] for span in spans], namespace)
        return spans

    def clear(self, namespace: str) -> None:
        """Forget what was seen in a namespace."""
        with self._lock:
            for name in [name for name in self._seen if name[0] == namespace]:
                del self._seen[name]
            self._new.pop(namespace, None)

    def take_new(self, namespace: str) -> list[str]:
        """Parts that were seen for the first time since the last call."""
        with self._lock:
            return list(self._new.pop(namespace, ()))

    def _is_known(self, namespace: str, part: str) -> bool:
        """Whether a part was seen before; from now on it was."""
        name = (namespace, blake2b(part.encode("utf-8", "surrogatepass"), digest_size=16).digest())
        is_known = name in self._seen
        if not is_known:
            self._new.setdefault(namespace, deque(maxlen=_MAX_NEW)).append(part)
        self._seen[name] = None
        self._seen.move_to_end(name)
        return is_known

    def _parts(self, text: str, start: int, end: int) -> Iterator[Range]:
        """Long paragraphs and runs of short ones, those beyond the limit split, without white space at their edges."""
        for run_start, run_end in _runs(text, start, end):
            run = text[run_start:run_end]
            spans = [(0, len(run))] if len(run) <= MAX_PART_CHARS else self._splitter.split_spans(run)
            for part_start, part_end in spans:
                part = run[part_start:part_end]
                stripped = part.strip()
                if len(stripped) >= MIN_PART_CHARS:
                    at = run_start + part_start + len(part) - len(part.lstrip())
                    yield at, at + len(stripped)


def _runs(text: str, start: int, end: int) -> Iterator[Range]:
    """Paragraphs of at least the least size by themselves, and what lies between two of them."""
    breaks = [(match.start(), match.end()) for match in _BETWEEN_PARAGRAPHS.finditer(text, start, end)]
    begin = paragraph = start
    for last, following in [*breaks, (end, end)]:
        if last - paragraph >= MIN_PART_CHARS:
            if begin < paragraph:
                yield begin, paragraph
            yield paragraph, last
            begin = following
        paragraph = following
    if begin < end:
        yield begin, end
