"""Similar questions: what an earlier one looked at is where a new one starts from, if both ask nearly the same."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cachecraft_rag.config import SimilarConfig

Embed = Callable[[list[str]], Any]
"""Sentence embeddings: texts to vectors, ``[num_texts, dim]`` in anything that numpy reads."""

MAX_BYTES = 64 * 2**20
"""Room for vectors and scores."""

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(frozen=True, eq=False)
class Hint:
    """What an earlier question found out about the chunks of a new one.

    Attributes:
        similarity: Cosine of both questions.
        scores: Scores of the tokens of every chunk of the prompt, ``[num_tokens]`` float32; ``None`` for a chunk that
            the earlier prompt did not have.
        weight: What they count where the new question is scored itself, whose own scores count 1.
        may_replace: Whether the new question need not be scored itself where all of its chunks have scores.
    """

    similarity: float
    scores: tuple[torch.Tensor | None, ...]
    weight: float
    may_replace: bool

    def over(self, chunk_index: torch.Tensor, offset_in_chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores of candidates, and which of them have some; arguments as in ``SelectionContext``."""
        found, known = torch.zeros(chunk_index.numel()), torch.zeros(chunk_index.numel(), dtype=torch.bool)
        for index, scores in enumerate(self.scores):
            inside = chunk_index == index
            if scores is not None and bool(inside.any()):
                found[inside], known[inside] = scores[offset_in_chunk[inside]], True
        return found, known


@dataclass(eq=False)
class AskedQuestion:
    """A question of a request.

    Attributes:
        namespace: Whose question.
        policy: What scores it; those of another policy are no hint.
        vector: Its embedding, of length 1.
        hint: What an earlier one tells about its chunks.
        scores: What was found out about them now: scores of their tokens, ``[num_tokens]`` each, by ``ChunkKey.chunk``;
            empty where nobody looked.
    """

    namespace: str
    policy: str
    vector: Vector
    hint: Hint | None = None
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Earlier:
    namespace: str
    policy: str
    vector: Vector
    scores: Mapping[str, torch.Tensor]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        total = self.vector.nbytes + sum(scores.nbytes for scores in self.scores.values())
        object.__setattr__(self, "nbytes", total)


class SimilarQuestions:
    """Keeps the embeddings of earlier questions and what was found out about their chunks. Thread-safe.

    Nothing crosses from one namespace to another. The questions that helped or came least recently go when there is no
    more room.

    Args:
        embed: Makes the embeddings.
        config: Settings.
        max_bytes: Room for vectors and scores.

    Attributes:
        errors: How often no embedding could be had.
    """

    def __init__(self, embed: Embed, config: SimilarConfig, max_bytes: int = MAX_BYTES) -> None:
        self.errors = 0
        self._embed, self._config, self._max_bytes = embed, config, max_bytes
        self._questions: OrderedDict[int, _Earlier] = OrderedDict()
        self._next_number = self._nbytes = 0
        self._has_warned = False
        self._lock = threading.Lock()

    @classmethod
    def of(cls, embed: Embed | None, config: SimilarConfig) -> SimilarQuestions | None:
        """What settings ask for; ``None`` where that is nothing.

        Raises:
            ValueError: Similar questions are to be looked for, but there is no embedding.
        """
        if not config.enabled:
            return None
        if embed is None:
            raise ValueError("embed: None, but similar_questions is enabled; give a function from texts to vectors")
        return cls(embed, config)

    def __len__(self) -> int:
        return len(self._questions)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self._nbytes

    def ask(
        self, question: str, namespace: str, policy: str, chunks: Sequence[str], lengths: Sequence[int]
    ) -> AskedQuestion | None:
        """Embed a question and look for a similar one about the same chunks.

        Args:
            question: Its text.
            namespace: Whose question.
            policy: What will score it.
            chunks: ``ChunkKey.chunk`` of the chunks of its prompt.
            lengths: Their lengths in tokens.

        Returns:
            The question, to be added when it has been scored; ``None`` when it has no embedding.
        """
        vector = self._vector(question)
        if vector is None:
            return None
        asked = AskedQuestion(namespace, policy, vector)
        with self._lock:
            number, similarity = self._best(vector, namespace, set(chunks), policy)
            if number is not None:
                found = [self._questions[number].scores.get(chunk) for chunk in chunks]
                scores = [None if s is None or s.numel() != n else s for s, n in zip(found, lengths, strict=True)]
                if any(one is not None for one in scores):
                    asked.hint = Hint(similarity, tuple(scores), self._config.weight, self._config.skip_pass)
                    self._questions.move_to_end(number)
        return asked

    def chunks_of(self, question: str, namespace: str) -> list[str]:
        """The chunks (``ChunkKey.chunk``) of the most similar earlier question; none where none is similar enough."""
        vector = self._vector(question)
        if vector is None:
            return []
        with self._lock:
            number, _ = self._best(vector, namespace)
            return [] if number is None else list(self._questions[number].scores)

    def add(self, asked: AskedQuestion) -> None:
        """Keep a question whose chunks have been scored."""
        if not asked.scores:
            return
        scores = {chunk: one.detach().to("cpu", torch.float32) for chunk, one in asked.scores.items()}
        earlier = _Earlier(asked.namespace, asked.policy, asked.vector, scores)
        with self._lock:
            self._questions[self._next_number] = earlier
            self._next_number += 1
            self._nbytes += earlier.nbytes
            while len(self._questions) > self._config.max_questions or self._nbytes > self._max_bytes:
                self._drop(next(iter(self._questions)))

    def forget(self, namespace: str, chunks: Iterable[str] | None = None) -> None:
        """Drop the questions of a namespace whose prompts had one of these chunks; ``None`` drops all of it."""
        gone = None if chunks is None else set(chunks)
        with self._lock:
            for number, earlier in list(self._questions.items()):
                if earlier.namespace == namespace and (gone is None or not gone.isdisjoint(earlier.scores)):
                    self._drop(number)

    def _best(
        self, vector: Vector, namespace: str, chunks: Set[str] = frozenset(), policy: str | None = None
    ) -> tuple[int | None, float]:
        """Of the questions that are similar enough, the one with the most of these chunks, then the most similar."""
        numbers = [
            number
            for number, earlier in self._questions.items()
            if earlier.namespace == namespace
            and policy in (None, earlier.policy)
            and earlier.vector.shape == vector.shape
        ]
        if not numbers:
            return None, 0.0
        cosines = np.stack([self._questions[number].vector for number in numbers]) @ vector
        ranked = [
            (len(chunks & self._questions[numbers[place]].scores.keys()), float(cosines[place]), numbers[place])
            for place in np.flatnonzero(cosines >= self._config.threshold)
        ]
        if not ranked:
            return None, 0.0
        _, similarity, number = max(ranked)
        return number, similarity

    def _vector(self, question: str) -> Vector | None:
        """The embedding scaled to length 1; ``None`` without one: no request fails for what may only help it."""
        try:
            vector = np.asarray(self._embed([question]), dtype=np.float32)
            if vector.ndim != 2 or vector.shape[0] != 1 or not np.isfinite(vector).all() or not vector.any():
                raise ValueError(f"{vector.shape} is no vector [1, dim] of finite numbers that are not all 0")
        except Exception as error:
            self.errors += 1
            if not self._has_warned:
                self._has_warned = True
                message = f"similar questions are not looked for: the embedding failed: {type(error).__name__}: {error}"
                warnings.warn(message, UserWarning, stacklevel=2)
            return None
        unit: Vector = vector[0] / np.linalg.norm(vector[0])
        return unit

    def _drop(self, number: int) -> None:
        self._nbytes -= self._questions.pop(number).nbytes
