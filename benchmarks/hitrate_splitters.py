"""The splitters that are compared, random edits of a document, and token ids that are made once per text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from langchain_text_splitters import RecursiveCharacterTextSplitter
from llama_index.core.node_parser import SentenceSplitter, TokenTextSplitter

from cachecraft_rag import ChunkSplitter
from cachecraft_rag.headings import Preset

Count = Callable[[str], int]
CountMany = Callable[[list[str]], list[int]]

# Those whose hit rate is measured at many rates of edits; the others take minutes for it.
COMPARED = ("CacheAligned, contract", "CacheAligned, plain", "SentenceSplitter 640/0", "SentenceSplitter 1024/200")
PARAGRAPH_LENGTH = range(40, 3000)


@dataclass(frozen=True)
class Splitter:
    """A splitter under the name it has in the tables; `cut` does the work, `split` remembers its results."""

    name: str
    cut: Callable[[str], list[str]]
    _known: dict[str, list[str]] = field(default_factory=dict, repr=False)

    def split(self, text: str) -> list[str]:
        """Chunks of a text, in order."""
        if text not in self._known:
            self._known[text] = self.cut(text)
        return self._known[text]


def splitters(count: Count, count_many: CountMany) -> list[Splitter]:
    """Ours in every preset, then the references: sizes in the middle of our limits, and the defaults of the most used.

    Args:
        count: Number of tokens of a text.
        count_many: Numbers of tokens of several texts.
    """

    def tokens(text: str) -> range:
        return range(count(text))

    ours = [ChunkSplitter(count, count_many=count_many, preset=preset) for preset in get_args(Preset)]
    sentences = [
        SentenceSplitter(chunk_size=size, chunk_overlap=overlap, tokenizer=tokens)
        for size, overlap in ((640, 0), (1024, 200))
    ]
    words = TokenTextSplitter(chunk_size=640, chunk_overlap=0, tokenizer=tokens)
    characters = RecursiveCharacterTextSplitter(chunk_size=640, chunk_overlap=0, length_function=count)
    return [
        *(Splitter(f"CacheAligned, {splitter.preset}", splitter.split) for splitter in ours),
        Splitter("SentenceSplitter 640/0", sentences[0].split_text),
        Splitter("SentenceSplitter 1024/200", sentences[1].split_text),
        Splitter("TokenTextSplitter 640/0", words.split_text),
        Splitter("RecursiveCharacter 640/0", characters.split_text),
    ]


class TokenIds:
    """Token ids of texts by a fast tokenizer, without special tokens; every text is tokenised once.

    Args:
        tokenizer: A Hugging Face tokenizer with a fast backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._counts: dict[str, int] = {}
        self._ids: dict[str, tuple[int, ...]] = {}

    def count(self, text: str) -> int:
        """Number of tokens; remembered, for most parts of an edited document are those of the original."""
        count = self._counts.get(text)
        return self.count_many([text])[0] if count is None else count

    def count_many(self, texts: list[str]) -> list[int]:
        """Numbers of tokens of several texts, remembered."""
        new = [text for text in dict.fromkeys(texts) if text not in self._counts]
        self._counts.update(zip(new, self.count_many_anew(new), strict=True))
        return [self._counts[text] for text in texts]

    def count_anew(self, text: str) -> int:
        """Number of tokens, tokenised now: for measuring time."""
        return self.count_many_anew([text])[0]

    def count_many_anew(self, texts: list[str]) -> list[int]:
        """Numbers of tokens of several texts, tokenised now."""
        return [len(encoding) for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def of(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""
        if text not in self._ids:
            self._ids[text] = tuple(self._backend.encode(text, add_special_tokens=False).ids)
        return self._ids[text]


def edit(text: str, donors: Sequence[str], draw: random.Random) -> str:
    """The text with one paragraph inserted, deleted, or changed in some words.

    Args:
        text: A document with blank lines between its paragraphs.
        donors: Paragraphs of other documents, for what is new.
        draw: Where and what.
    """
    parts = re.split(r"(?<=\n\n)", text)
    candidates = [index for index, part in enumerate(parts) if len(part) in PARAGRAPH_LENGTH]
    at = draw.choice(candidates or range(len(parts)))
    kind = draw.choice(("insert", "delete", "change"))
    if kind == "insert":
        parts.insert(at, draw.choice(donors).strip() + "\n\n")
    elif kind == "delete" and len(parts) > 1:
        del parts[at]
    else:
        words = parts[at].split(" ")
        start = draw.randrange(len(words))
        new = draw.choice(donors).split()[: draw.randint(1, 12)]
        parts[at] = " ".join([*words[:start], *new, *words[start + draw.randint(0, 12) :]])
        parts[at] = parts[at].rstrip() + "\n\n"
    return "".join(parts)


def paragraphs(texts: Sequence[str]) -> list[str]:
    """Paragraphs of documents that may stand in others."""
    found = [part for text in texts for part in text.split("\n\n")]
    return [part for part in found if len(part) in PARAGRAPH_LENGTH]
