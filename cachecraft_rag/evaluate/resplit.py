"""The same questions over the same documents, cut into chunks of another size."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cachecraft_rag.config import EngineConfig
from cachecraft_rag.evaluate.questions import Question, Source
from cachecraft_rag.prompt import PromptEncoder
from cachecraft_rag.splitting import ChunkSplitter


@dataclass(frozen=True)
class _Piece:
    """A chunk: its text, its length in tokens, and whether an answer stands in it."""

    text: str
    num_tokens: int
    is_evidence: bool


class Resplitter:
    """Cuts documents at their own boundaries, each document once, and makes questions of the chunks.

    A question gets all chunks of its documents, in order, where they fit. Otherwise it gets those that hold its
    answers, and others drawn by the seed as far as there is room; all in random order, as a retriever might return
    them. So the model reads about as much text at any chunk size.

    Args:
        prompts: The engine's tokenizer.
        chunk_tokens: Most tokens of a chunk, as in ``EngineConfig``.
        context_tokens: Most tokens of all chunks of a question.
        seed: The same seed gives the same questions with the same chunks.

    Raises:
        ValueError: A chunk may be longer than all chunks together, or a size is too small.
    """

    def __init__(self, prompts: PromptEncoder, chunk_tokens: int, context_tokens: int, seed: int = 0) -> None:
        if chunk_tokens > context_tokens:
            raise ValueError(f"chunk_tokens: {chunk_tokens} is more than the {context_tokens} of all chunks together")
        limits = EngineConfig(chunk_tokens=chunk_tokens).chunk_limits
        self._splitter = ChunkSplitter.from_tokenizer(prompts.tokenizer, **limits)
        self._prompts, self._context_tokens, self._seed = prompts, context_tokens, seed
        self._cut: dict[str, list[tuple[int, int, int]]] = {}

    def question(self, source: Source) -> Question | None:
        """A question with its chunks; ``None`` where none fits."""
        pieces = [piece for text in source.documents for piece in self._pieces(text, source)]
        if sum(piece.num_tokens for piece in pieces) > self._context_tokens:
            pieces = self._choose(source, pieces)
        if not pieces:
            return None
        return Question(source.id, source.question, source.answers, tuple(piece.text for piece in pieces))

    def chunks(self, source: Source) -> list[str]:
        """All chunks of a question's documents, whether or not the question gets them."""
        return [piece.text for text in source.documents for piece in self._pieces(text, source)]

    def _choose(self, source: Source, pieces: Sequence[_Piece]) -> list[_Piece]:
        draw = random.Random(f"{self._seed}:{source.id}")
        evidence = [piece for piece in pieces if piece.is_evidence]
        others = [piece for piece in pieces if not piece.is_evidence]
        draw.shuffle(others)
        chosen: list[_Piece] = []
        room = self._context_tokens
        for piece in (*evidence, *others):
            if piece.num_tokens <= room:
                chosen.append(piece)
                room -= piece.num_tokens
        draw.shuffle(chosen)
        return chosen

    def _pieces(self, text: str, source: Source) -> list[_Piece]:
        if text not in self._cut:
            self._cut[text] = [
                (start, end, len(self._prompts.encode_chunk(text[start:end].strip())))
                for start, end in self._splitter.split_spans(text)
                if text[start:end].strip()
            ]
        return [
            _Piece(text[start:end].strip(), num_tokens, _holds_answer(text[start:end], start, end, source))
            for start, end, num_tokens in self._cut[text]
        ]


def _holds_answer(text: str, start: int, end: int, source: Source) -> bool:
    if source.spans:
        return any(start < high and low < end for low, high in source.spans)
    folded = text.casefold()
    return any(answer.casefold() in folded for answer in source.answers if answer.strip())


def resplit(
    sources: Iterable[Source],
    prompts: PromptEncoder,
    sizes: Sequence[int],
    context_tokens: int,
    *,
    limit: int | None = None,
    seed: int = 0,
) -> Mapping[int, list[Question]]:
    """The same questions at every chunk size: those that can be asked at all of them.

    Args:
        sources: Questions with their documents.
        prompts: The engine's tokenizer.
        sizes: Chunk sizes in tokens.
        context_tokens: Most tokens of all chunks of a question.
        limit: Most questions; ``None`` takes all.
        seed: Draws the chunks of documents that don't fit.

    Raises:
        ValueError: No question is left, or a size does not fit.
    """
    cutters = {size: Resplitter(prompts, size, context_tokens, seed) for size in sizes}
    questions: dict[int, list[Question]] = {size: [] for size in sizes}
    for source in sources:
        asked = {size: cutter.question(source) for size, cutter in cutters.items()}
        if all(asked.values()):
            for size, question in asked.items():
                assert question is not None
                questions[size].append(question)
        if any(len(found) == limit for found in questions.values()):
            break
    if not all(questions.values()):
        raise ValueError(f"no question has a chunk that fits into {context_tokens} tokens; give more room")
    return questions
