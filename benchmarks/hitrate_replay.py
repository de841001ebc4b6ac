"""Questions on contracts that are edited meanwhile: what a retriever would fetch, and which of it is stored."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]

from benchmarks.hitrate_splitters import Splitter, TokenIds, edit

Edits = dict[int, dict[int, str]]  # texts of contracts that change before a request: {request: {contract: text}}

TOP_K = 5
BLOCK = 16  # tokens; what vLLM's prefix cache compares at once


@dataclass(frozen=True)
class Request:
    """A question about one of the contracts, by its number."""

    contract: int
    question: str


@dataclass(frozen=True)
class Replayed:
    """Chunk tokens of a request's prompt, and those of them that were stored, chunk by chunk and as a prefix."""

    request: Request
    tokens: int
    by_chunk: int
    by_prefix: int


@dataclass
class ChunkCache:
    """Every chunk that was ever in a prompt, by its text; nothing is evicted."""

    texts: set[str] = field(default_factory=set)

    def reuse(self, chunks: Sequence[tuple[str, tuple[int, ...]]]) -> int:
        """Tokens of the chunks that are stored already; the others are stored now."""
        reused = sum(len(ids) for text, ids in chunks if text in self.texts)
        self.texts.update(text for text, _ in chunks)
        return reused


@dataclass
class PrefixCache:
    """Every prefix of every prompt, in whole blocks; nothing is evicted."""

    blocks: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def reuse(self, ids: tuple[int, ...]) -> int:
        """Tokens of a prompt's chunks behind the same tokens as before; the other blocks are stored now."""
        prefix, reused = 0, 0
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            block = (prefix, ids[start : start + BLOCK])
            reused += BLOCK * (block in self.blocks)
            prefix = self.blocks.setdefault(block, len(self.blocks) + 1)
        return reused


class Corpus:
    """Contracts as a splitter cuts them, and the retriever over them: TF-IDF within the contract in question.

    Args:
        texts: The contracts.
        splitter: Cuts them, and again what is edited.
    """

    def __init__(self, texts: Sequence[str], splitter: Splitter) -> None:
        self._splitter = splitter
        self._chunks = [self._split(text) for text in texts]
        self._vectorizer = TfidfVectorizer(sublinear_tf=True, stop_words="english")
        self._vectorizer.fit([chunk for chunks in self._chunks for chunk in chunks])
        self._matrices = [self._vectorizer.transform(chunks) for chunks in self._chunks]
        self._found: dict[Request, list[str]] = {}

    @property
    def num_chunks(self) -> int:
        """Chunks of all contracts as they are now."""
        return sum(map(len, self._chunks))

    def replace(self, contract: int, text: str) -> None:
        """Put another version of a contract in place of it."""
        self._chunks[contract] = self._split(text)
        self._matrices[contract] = self._vectorizer.transform(self._chunks[contract])
        self._found = {request: found for request, found in self._found.items() if request.contract != contract}

    def retrieve(self, request: Request) -> list[str]:
        """The chunks that fit a question best, the best first."""
        if request not in self._found:
            matrix = self._matrices[request.contract]
            scores = (matrix @ self._vectorizer.transform([request.question]).T).toarray()[:, 0]
            order = np.argsort(-scores, kind="stable")[:TOP_K]
            self._found[request] = [self._chunks[request.contract][index] for index in order]
        return self._found[request]

    def holds(self, request: Request, answers: Sequence[str]) -> bool:
        """Whether one of the answers stands in the chunks that are retrieved, white space aside."""
        found = [" ".join(chunk.split()) for chunk in self.retrieve(request)]
        return any(" ".join(answer.split()) in chunk for answer in answers for chunk in found)

    def _split(self, text: str) -> list[str]:
        # Stripped, as the engine looks for them.
        return [chunk.strip() for chunk in self._splitter.split(text) if chunk.strip()]


def zipf_requests(questions: Sequence[Request], count: int, seed: int) -> list[Request]:
    """Requests for questions whose frequencies fall with their rank (exponent 1); ranks are random."""
    draw = random.Random(seed)
    ranked = draw.sample(questions, len(questions))
    return draw.choices(ranked, weights=[1 / rank for rank in range(1, len(ranked) + 1)], k=count)


def once_edited(texts: Sequence[str], donors: Sequence[str], count: int, at: int, seed: int) -> Edits:
    """Some contracts change before request `at`, each by one edit."""
    draw = random.Random(seed)
    return {at: {number: edit(texts[number], donors, draw) for number in draw.sample(range(len(texts)), count)}}


def steadily_edited(
    texts: Sequence[str], donors: Sequence[str], per_request: float, num_requests: int, seed: int
) -> Edits:
    """One edit after the other of random contracts while requests come, evenly spread."""
    draw = random.Random(seed)
    current = list(texts)
    edits: Edits = {}
    for number in range(round(num_requests * per_request)):
        contract = draw.randrange(len(current))
        current[contract] = edit(current[contract], donors, draw)
        edits.setdefault(int(number / per_request), {})[contract] = current[contract]
    return edits


def replay(corpus: Corpus, requests: Iterable[Request], edits: Edits, ids: TokenIds) -> list[Replayed]:
    """Take requests in order and say what of each was stored; contracts are split again when they change.

    Args:
        corpus: The contracts as they are at first; changed.
        requests: The questions.
        edits: What changes meanwhile.
        ids: Tokenises chunks.
    """
    by_text, by_prefix = ChunkCache(), PrefixCache()
    replayed = []
    for number, request in enumerate(requests):
        for contract, text in edits.get(number, {}).items():
            corpus.replace(contract, text)
        chunks = [(text, ids.of(text)) for text in corpus.retrieve(request)]
        prompt = tuple(token for _, one in chunks for token in one)
        replayed.append(Replayed(request, len(prompt), by_text.reuse(chunks), by_prefix.reuse(prompt)))
    return replayed
