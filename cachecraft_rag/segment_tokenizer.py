"""Segments of a prompt to token ids and back; the only place that calls the tokenizer.

Every segment is tokenised alone, and the ids of all segments together decode to the text of all segments together.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_REMEMBERED_CHUNKS = 4096
# Put before a segment to keep a SentencePiece tokenizer from starting it with a dummy space, and cut off again.
_ANCHORS = ("\n", "=", "|")

Result = TypeVar("Result")


class SegmentTokenizer:
    """A tokenizer that treats text between chunks and chunks differently.

    Args:
        tokenizer: A Hugging Face tokenizer. A copy of it is used, under a lock: fast tokenizers are not thread-safe,
            and their settings change with every call.

    Attributes:
        tokenizer: The copy.
        bos: What the tokenizer itself puts before a text: the id of its BOS token, or nothing.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not callable(getattr(tokenizer, "encode", None)):
            raise ValueError(
                f"tokenizer: {type(tokenizer).__name__} has no encode method; give a Hugging Face tokenizer"
            )
        self.tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._chunk_ids: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._has_dummy_space = self._starts_with_dummy_space()
        self._added_tokens = self._pattern_of_added_tokens()
        bos, ids = getattr(tokenizer, "bos_token_id", None), self.tokenizer("a")["input_ids"]
        self.bos: tuple[int, ...] = (ids[0],) if bos is not None and ids and ids[0] == bos else ()

    def locked(self, call: Callable[[Any], Result]) -> Result:
        """Call something with the tokenizer while no other thread uses it."""
        with self._lock:
            return call(self.tokenizer)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of text between chunks; special tokens written in it are special tokens."""
        if not self._has_dummy_space:
            return self._raw_encode(text, split_special_tokens=False)
        # A dummy space follows every special token too, so the text between them is encoded piece by piece.
        ids: list[int] = []
        for index, piece in enumerate(self._added_tokens.split(text)):
            is_added_token = index % 2 == 1
            if is_added_token:
                ids.append(self.tokenizer.convert_tokens_to_ids(piece))
            else:
                ids += self._encode_behind_anchor(piece, split_special_tokens=False)
        return tuple(ids)

    def encode_chunk(self, text: str) -> tuple[int, ...]:
        """Ids of a chunk's text; special tokens written in it stay text, so a document can't end a turn."""
        with self._lock:
            ids = self._chunk_ids.get(text)
        if ids is None:
            encode = self._encode_behind_anchor if self._has_dummy_space else self._raw_encode
            ids = encode(text, split_special_tokens=True)
        with self._lock:
            self._chunk_ids[text] = ids
            self._chunk_ids.move_to_end(text)
            if len(self._chunk_ids) > _REMEMBERED_CHUNKS:
                self._chunk_ids.popitem(last=False)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of some ids, spaces untouched."""
        with self._lock:
            text: str = self.tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

    def _encode_behind_anchor(self, text: str, split_special_tokens: bool) -> tuple[int, ...]:
        """Ids without a dummy space in front; an anchor that merges with the text is passed over for the next."""
        if not text:
            return ()
        for anchor in _ANCHORS:
            anchor_ids = self._raw_encode(anchor, split_special_tokens)
            ids = self._raw_encode(anchor + text, split_special_tokens)
            if ids[: len(anchor_ids)] == anchor_ids and self.decode(ids).endswith(text):
                return ids[len(anchor_ids) :]
        return self._raw_encode(text, split_special_tokens)

    def _raw_encode(self, text: str, split_special_tokens: bool) -> tuple[int, ...]:
        if not text:
            return ()
        try:
            with self._lock:
                encoded = self.tokenizer(
                    text, add_special_tokens=False, split_special_tokens=split_special_tokens, verbose=False
                )
        except TypeError as error:
            at = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            if at is None:
                raise
            raise ValueError(
                f"prompt: {text[at]!r} in {text[max(0, at - 20) : at + 20]!r} is half a character (a lone surrogate), "
                "which no tokenizer can read; replace it"
            ) from error
        return tuple(encoded["input_ids"])

    def _starts_with_dummy_space(self) -> bool:
        twice = list(self._raw_encode("Hello", split_special_tokens=False)) * 2
        return bool(self.decode(twice) != "HelloHello")

    def _pattern_of_added_tokens(self) -> re.Pattern[str]:
        added = {str(token) for token in getattr(self.tokenizer, "added_tokens_decoder", {}).values()}
        longest_first = sorted(added, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if added else r"(\Z.)")
