"""Known chunk texts, and finding them in a rendered prompt.

A framework hands the model one string; this module tells which parts of it are chunks seen before. Every text is
known in all its forms, stripped (`chunk_forms`).

Each form is indexed by a few short slices of itself (anchors). Anchors start at `PROBE_STRIDE` consecutive
characters, so looking up the prompt at every `PROBE_STRIDE`-th character meets exactly one of them wherever the chunk
stands. An anchor only proposes a place; the whole slice of the prompt is compared before a span is reported.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice

from cachecraft_rag.chunk_forms import forms_of
from cachecraft_rag.pieces import PieceIndex, PieceSpan, Range

#: Shorter texts (stripped) are not registered: a seam costs more than so few tokens save.
MIN_CHARS = 64
ANCHOR_CHARS = 32
PROBE_STRIDE = 4
#: Anchors with fewer distinct characters (rules, runs of spaces) match everywhere; they are the last choice.
MIN_ANCHOR_ALPHABET = 6
#: Steps from the start to the end of a form when looking for anchors that few other forms have.
MAX_OFFSETS = 64
#: Limits of one search, so that texts made of the same boilerplate cost misses, never seconds: places looked at, and
#: characters compared per character of the prompt.
SPARE_CANDIDATES = 2048
CHARS_PER_CANDIDATE = 16
COMPARED_PER_CHAR = 512
#: Namespaces whose latest chunks stay indexed by piece.
PIECE_NAMESPACES = 16

_WINDOW = ANCHOR_CHARS + PROBE_STRIDE - 1
_LENGTH_BITS = 32
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1


@dataclass(frozen=True)
class TextSpan:
    """Character range of a prompt whose text is a registered chunk, in one of its forms.

    Attributes:
        start: First character.
        end: One past the last character.
        origins: The registered texts that have this form: nearly always one.
    """

    start: int
    end: int
    origins: tuple[str, ...] = field(default=(), compare=False)


class ChunkRegistry:
    """Chunk texts per namespace, least recently used first out. All methods may be called from any thread.

    Every call takes one lock, `register` and `forget` once per text, so that a search never waits for a whole corpus.
    Memory beside the texts themselves is about 1 KB per form, whatever the length of the text.

    Args:
        max_chunks: Most chunks kept, over all namespaces; the forms of one text count as one chunk.

    Raises:
        ValueError: If `max_chunks` is below 1.
    """

    def __init__(self, max_chunks: int = 100_000) -> None:
        if max_chunks < 1:
            raise ValueError(f"max_chunks={max_chunks!r}: must be at least 1")
        self._max_chunks = max_chunks
        self._lock = threading.Lock()
        # (namespace, text) -> where the anchors of each form are; in order of use, oldest first.
        self._chunks: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()
        self._namespaces: dict[str, _NamespaceIndex] = {}
        self._searched: OrderedDict[str, PieceIndex] = OrderedDict()  # for pieces, by namespace

    def register(self, texts: Iterable[str], namespace: str = "default") -> int:
        """Makes texts known; a text known already becomes the most recently used.

        Args:
            texts: Chunk texts; stripped here. Those shorter than `MIN_CHARS` are ignored.
            namespace: Only searches in the same namespace find them.

        Returns:
            Number of texts that were not known before.

        Raises:
            ValueError: If `texts` is one string.
        """
        num_new = 0
        for text in _stripped(texts):
            if len(text) < MIN_CHARS:
                continue
            chunk = (namespace, text)
            with self._lock:
                if chunk in self._chunks:
                    self._use(namespace, text)
                    continue
                index = self._namespaces.setdefault(namespace, _NamespaceIndex())
                self._chunks[chunk] = index.add(text)
                index.pieces.use(text)
                num_new += 1
                if len(self._chunks) > self._max_chunks:
                    self._remove(next(iter(self._chunks)))
        return num_new

    def find(self, prompt: str, namespace: str = "default") -> list[TextSpan]:
        """Finds registered chunks in a prompt; finding a chunk counts as using it.

        Where matches overlap the longest stays, of equally long ones the first. The work is bounded: in prompts where
        very many known texts share their anchors some chunks may be missed, but a reported span is always right.

        Args:
            prompt: Any text.
            namespace: Whose chunks to look for.

        Returns:
            Spans that don't overlap, ordered by start. Each is a whole chunk in one of its forms.
        """
        starts: list[int] = []
        ends: list[int] = []
        origins: list[tuple[str, ...]] = []
        with self._lock:
            index = self._namespaces.get(namespace)
            if index is None:
                return []
            budget = COMPARED_PER_CHAR * len(prompt)
            for start, end in index.candidates(prompt):
                at = bisect_left(starts, start)
                if (at > 0 and ends[at - 1] > start) or (at < len(starts) and starts[at] < end):
                    continue
                budget -= end - start
                if budget < 0:
                    break
                chunks = index.texts_of(prompt[start:end])
                if chunks:
                    starts.insert(at, start)
                    ends.insert(at, end)
                    origins.insert(at, tuple(chunks))
                for text in chunks:
                    self._use(namespace, text)
        return [TextSpan(*span) for span in zip(starts, ends, origins, strict=True)]

    def find_pieces(self, prompt: str, ranges: Iterable[Range], namespace: str = "default") -> list[PieceSpan]:
        """Finds pieces of the chunks that were registered or found last, which doesn't count as using them.

        Args:
            prompt: Any text.
            ranges: Where to look: what `find` has left.
            namespace: Whose chunks to look for.

        Returns:
            Pieces that don't overlap, ordered by start.
        """
        with self._lock:
            index = self._namespaces.get(namespace)
            if index is None:
                return []
            self._searched[namespace] = index.pieces
            self._searched.move_to_end(namespace)
            if len(self._searched) > PIECE_NAMESPACES:
                self._searched.popitem(last=False)[1].release()
            return index.pieces.find(prompt, ranges)

    def forget(self, texts: Iterable[str], namespace: str = "default") -> int:
        """Removes texts with all their forms.

        Args:
            texts: Chunk texts; stripped here. Unknown ones are ignored.
            namespace: Where they were registered.

        Returns:
            Number of texts that were known.

        Raises:
            ValueError: If `texts` is one string.
        """
        num_forgotten = 0
        for text in _stripped(texts):
            with self._lock:
                if (namespace, text) in self._chunks:
                    self._remove((namespace, text))
                    num_forgotten += 1
        return num_forgotten

    def clear(self, namespace: str | None = None) -> None:
        """Removes every chunk of a namespace, or of all of them if None."""
        with self._lock:
            if namespace is None:
                self._chunks.clear()
                self._namespaces.clear()
                self._searched.clear()
            elif self._namespaces.pop(namespace, None) is not None:
                self._searched.pop(namespace, None)
                for chunk in [chunk for chunk in self._chunks if chunk[0] == namespace]:
                    del self._chunks[chunk]

    def contains(self, text: str, namespace: str = "default") -> bool:
        """Tells whether a text (stripped) is known; doesn't count as using it."""
        with self._lock:
            return (namespace, text.strip()) in self._chunks

    def __len__(self) -> int:
        """Number of chunks over all namespaces."""
        return len(self._chunks)

    def _use(self, namespace: str, text: str) -> None:
        self._chunks.move_to_end((namespace, text))
        self._namespaces[namespace].pieces.use(text)

    def _remove(self, chunk: tuple[str, str]) -> None:
        namespace, text = chunk
        index = self._namespaces[namespace]
        index.discard(text, self._chunks.pop(chunk))
        if not index:
            del self._namespaces[namespace]
            self._searched.pop(namespace, None)


class _NamespaceIndex:
    """The forms of the chunks of one namespace, by anchor and by hash. Not thread-safe.

    Hashes are Python's own, so they hold for this process only; whatever they find is compared with the text.
    """

    def __init__(self) -> None:
        # Hash of a form -> the chunks it is a form of (nearly always one).
        self._texts: dict[int, tuple[str, ...]] = {}
        # Hash of an anchor -> its places, packed as offset and length of the form: one, or several with how many
        # forms share each. Versions of one text mostly share their places, so they stay one candidate.
        self._places: dict[int, int | dict[int, int]] = {}
        self.pieces = PieceIndex()

    def __bool__(self) -> bool:
        return bool(self._texts)

    def add(self, text: str) -> tuple[int, ...]:
        """Adds a text not yet in it; returns the offset of the anchors in each of its forms, for `discard`."""
        offsets = []
        for form in forms_of(text):
            offset = self._least_crowded_offset(form)
            for anchor, place in _anchors(form, offset):
                self._add_place(anchor, place)
            self._texts[hash(form)] = (*self._texts.get(hash(form), ()), text)
            offsets.append(offset)
        return tuple(offsets)

    def discard(self, text: str, offsets: tuple[int, ...]) -> None:
        """Removes a text; `offsets` is what `add` returned for it."""
        self.pieces.discard(text)
        for form, offset in zip(forms_of(text), offsets, strict=True):
            for anchor, place in _anchors(form, offset):
                self._discard_place(anchor, place)
            others = tuple(other for other in self._texts.pop(hash(form)) if other != text)
            if others:
                self._texts[hash(form)] = others

    def candidates(self, prompt: str) -> list[tuple[int, int]]:
        """Ranges of the prompt where a form may stand, longest first, then by start."""
        get = self._places.get
        hits: list[tuple[int, Collection[int]]] = []
        for at in range(0, len(prompt) - ANCHOR_CHARS + 1, PROBE_STRIDE):
            places = get(hash(prompt[at : at + ANCHOR_CHARS]))
            if places is not None:
                hits.append((at, (places,) if isinstance(places, int) else places))
        # Distinctive anchors first, so that the limit on candidates cuts off boilerplate and nothing else.
        hits.sort(key=lambda hit: len(hit[1]))
        budget = len(prompt) // CHARS_PER_CANDIDATE + SPARE_CANDIDATES
        found: set[tuple[int, int]] = set()
        for at, several in hits:
            for place in islice(several, budget):
                start = at - (place >> _LENGTH_BITS)
                length = place & _LENGTH_MASK
                if start >= 0 and start + length <= len(prompt):
                    found.add((-length, start))
            budget -= min(budget, len(several))
        return [(start, start - negative_length) for negative_length, start in sorted(found)]

    def texts_of(self, form: str) -> list[str]:
        """Texts that have exactly this form."""
        texts = self._texts.get(hash(form), ())
        return [text for text in texts if text == form or form in forms_of(text)]

    def _least_crowded_offset(self, form: str) -> int:
        """Offset whose anchors propose the fewest other places; boilerplate is avoided once it is known as such."""
        last = len(form) - _WINDOW
        best_offset, best_crowd = 0, -1
        steps = max(1, min(MAX_OFFSETS, last // _WINDOW))
        for offset in (last * step // steps for step in range(steps + 1)):
            crowd = 0 if len(set(form[offset : offset + _WINDOW])) >= MIN_ANCHOR_ALPHABET else SPARE_CANDIDATES
            for anchor, place in _anchors(form, offset):
                places = self._places.get(anchor)
                if isinstance(places, dict):
                    crowd += len(places) - (place in places)
                elif places is not None:
                    crowd += places != place
            if crowd == 0:
                return offset
            if best_crowd < 0 or crowd < best_crowd:
                best_offset, best_crowd = offset, crowd
        return best_offset

    def _add_place(self, anchor: int, place: int) -> None:
        places = self._places.get(anchor)
        if places is None:
            self._places[anchor] = place
            return
        if isinstance(places, int):
            places = self._places[anchor] = {places: 1}
        places[place] = places.get(place, 0) + 1

    def _discard_place(self, anchor: int, place: int) -> None:
        places = self._places[anchor]
        if isinstance(places, dict):
            places[place] -= 1
            if places[place] == 0:
                del places[place]
            if places:
                return
        del self._places[anchor]


def _anchors(form: str, offset: int) -> list[tuple[int, int]]:
    """Hash and place (offset and length of the form, packed) of the anchors at `offset` and just after it."""
    return [
        (hash(form[at : at + ANCHOR_CHARS]), at << _LENGTH_BITS | len(form))
        for at in range(offset, offset + PROBE_STRIDE)
    ]


def _stripped(texts: Iterable[str]) -> Iterable[str]:
    if isinstance(texts, str):
        raise ValueError(f"texts={texts[:40]!r}: must be several strings, such as a list, not one string")
    return (text.strip() for text in texts)
