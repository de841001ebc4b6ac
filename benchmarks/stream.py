"""A stream of questions with the chunks that a retriever finds for them, as a running application sees it.

Contracts (``cuad.jsonl``) are asked about one at a time, so the chunks of one are searched; of a manual
(``manual_tv.jsonl``) all are. Some questions come again and again: how often falls with their rank, as Zipf says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]

FEWEST, MOST = 5, 8
"""Chunks that are retrieved for a question."""


@dataclass(frozen=True)
class Asked:
    """A question with its chunks.

    Attributes:
        id: Its name.
        question: What is asked.
        chunks: What the retriever found, the best first.
    """

    id: str
    question: str
    chunks: tuple[str, ...]


class Retriever:
    """Finds the chunks of a corpus that fit a question best, by TF-IDF.

    Args:
        chunks: The corpus.
    """

    def __init__(self, chunks: Sequence[str]) -> None:
        self._chunks = chunks
        self._vectorizer = TfidfVectorizer(sublinear_tf=True)
        self._rows = self._vectorizer.fit_transform(chunks)

    def find(self, question: str, count: int) -> tuple[str, ...]:
        """The ``count`` best chunks, the best first; of equals the first in the corpus."""
        scores = (self._rows @ self._vectorizer.transform([question]).T).toarray()[:, 0]
        return tuple(self._chunks[index] for index in np.argsort(-scores, kind="stable")[:count])


def cut(text: str, tokenizer: Any, chunk_tokens: int) -> list[str]:
    """Chunks of exactly ``chunk_tokens`` tokens of a fast tokenizer; the rest behind the last one is left out."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    bounds = range(0, len(offsets) - chunk_tokens + 1, chunk_tokens)
    pieces = (text[offsets[start][0] : offsets[start + chunk_tokens - 1][1]].strip() for start in bounds)
    return [piece for piece in pieces if piece]


def load_asked(data: Path, tokenizer: Any, chunk_tokens: int, seed: int) -> list[Asked]:
    """Every question of both sets with its chunks, in an order drawn by ``seed``.

    Raises:
        SystemExit: No question has a document that is long enough.
    """
    draw = random.Random(seed)
    asked: list[Asked] = []
    contracts = {row["id"]: row for row in _rows(data / "cuad_docs.jsonl")}
    retrievers: dict[str, Retriever | None] = {}
    for row in _rows(data / "cuad.jsonl"):
        name = row["docs"][0]["id"]
        if name not in retrievers:
            retrievers[name] = _retriever(cut(contracts[name]["text"], tokenizer, chunk_tokens))
        asked += _asked(row, retrievers[name], draw)
    manual = "\n\n".join(f"{row['title']}\n{row['text']}" for row in _rows(data / "manual_tv_docs.jsonl"))
    whole = _retriever(cut(manual, tokenizer, chunk_tokens))
    for row in _rows(data / "manual_tv.jsonl"):
        asked += _asked(row, whole, draw)
    if not asked:
        raise SystemExit(f"{data}: no document has {MOST} chunks of {chunk_tokens} tokens")
    draw.shuffle(asked)
    return asked


def make_stream(asked: Sequence[Asked], length: int, distinct: int, exponent: float, seed: int) -> list[Asked]:
    """Draw requests: the question of rank r with a weight of 1 / r ** exponent.

    Args:
        asked: Questions to draw from; the first ``distinct`` are taken, their rank is their place.
        length: How many requests.
        distinct: How many questions are known to the users.
        exponent: 0.0 draws all alike.
        seed: The same seed gives the same stream, and a longer one begins like a shorter one.

    Raises:
        ValueError: A number is too small.
    """
    for name, value in (("length", length), ("distinct", distinct)):
        if value < 1:
            raise ValueError(f"{name}: {value} is too small; give at least 1")
    if exponent < 0:
        raise ValueError(f"exponent: {exponent} is negative; give 0 or more")
    known = asked[:distinct]
    weights = [1.0 / rank**exponent for rank in range(1, len(known) + 1)]
    return random.Random(seed).choices(known, weights, k=length)


def recurrence(stream: Sequence[Asked]) -> tuple[float, float, float]:
    """Shares of chunk look-ups that were seen before, that were seen behind the same chunks, and of repeated questions.

    The first is what chunk reuse can take, the second all that a prefix cache of any size can.
    """
    chunks: set[str] = set()
    prefixes: set[tuple[str, ...]] = set()
    questions: set[str] = set()
    seen = behind = again = lookups = 0
    for one in stream:
        again += one.id in questions
        questions.add(one.id)
        for index, chunk in enumerate(one.chunks, 1):
            lookups += 1
            seen += chunk in chunks
            behind += one.chunks[:index] in prefixes
        chunks.update(one.chunks)
        prefixes.update(one.chunks[:index] for index in range(1, len(one.chunks) + 1))
    return seen / lookups, behind / lookups, again / len(stream)


def _retriever(chunks: list[str]) -> Retriever | None:
    return Retriever(chunks) if len(chunks) >= MOST else None


def _asked(row: dict[str, Any], retriever: Retriever | None, draw: random.Random) -> list[Asked]:
    """Nothing where the documents are too short."""
    if retriever is None:
        return []
    return [Asked(row["id"], row["question"], retriever.find(row["question"], draw.randint(FEWEST, MOST)))]


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
