"""Questions with their answers and passages, from JSONL.

A line holds ``id``, ``question``, ``answers`` and ``docs``. A document with a ``text`` (and perhaps a ``title``) is one
chunk. Documents without one are looked up by ``id`` in the file ``<name>_docs.jsonl`` beside; a question that carries
``spans`` (character offsets of its answers in its one document) has that document cut into chunks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachecraft_rag.evaluate.text_file import read_text
from cachecraft_rag.neighbours import MAX_CHUNKS
from cachecraft_rag.prompt import PromptEncoder, RagPrompt

INSTRUCTION = "Answer the question using only the passages. Reply with one complete sentence."
"""System message where none is given."""


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        id: Its name, unique in a file.
        question: What is asked.
        answers: The right answers, any of which will do.
        chunks: The passages.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...]

    def prompt(self, instruction: str = INSTRUCTION) -> RagPrompt:
        """The prompt: instruction as system message, then passages and question."""
        return RagPrompt(system=instruction, chunks=self.chunks, question=f"Question: {self.question}\nAnswer:")


@dataclass(frozen=True)
class Source:
    """A question with its documents as they are, before they are cut.

    Attributes:
        id: As in ``Question``.
        question: As in ``Question``.
        answers: As in ``Question``.
        documents: The documents, each with its title as first line unless it carries spans.
        spans: Character ranges of the answers in the one document; empty where none are known.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    spans: tuple[tuple[int, int], ...] = ()


def load_sources(path: str | Path, *, seed: int = 0) -> list[Source]:
    """All questions of a file with their documents, in the order of ``load_questions``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not as described (file, line and field are named), or there is none.
    """
    path = Path(path)
    documents = _documents(path)
    sources = []
    for row in _drawn(path, seed):
        found = _found(row, documents)
        asked = (row.name, row.text("question"), row.answers())
        if "spans" in row.fields:
            text = _only(row, found)
            sources.append(Source(*asked, (text,), row.spans(len(text))))
        else:
            sources.append(Source(*asked, tuple(map(_chunk_text, found))))
    if not sources:
        raise ValueError(f"{path}: there is no question")
    return sources


def load_questions(
    path: str | Path,
    prompts: PromptEncoder,
    *,
    limit: int | None = None,
    seed: int = 0,
    chunk_tokens: int = 512,
    num_chunks: int = 8,
) -> list[Question]:
    """Questions of a file, in an order drawn by ``seed``.

    Of a document that is cut, the chunks that hold the answers are taken, as far as there is room, and others of the
    same document drawn by ``seed``; all in random order, as a retriever might return them. Questions whose document
    has fewer chunks, or whose first answer spans more, are left out.

    Args:
        path: The JSONL file.
        prompts: The engine's tokenizer, which counts the tokens of chunks.
        limit: Most questions; ``None`` takes all.
        seed: The same seed gives the same questions with the same chunks.
        chunk_tokens: Length of the chunks that documents are cut into.
        num_chunks: Chunks per question of documents that are cut.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not as described (file, line and field are named), or no question is left.
    """
    for name, value in (("limit", limit), ("chunk_tokens", chunk_tokens), ("num_chunks", num_chunks)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value} is too small; give at least 1")
    path = Path(path)
    documents = _documents(path)
    cutter = _Cutter(prompts, chunk_tokens, num_chunks, seed)
    questions: list[Question] = []
    is_empty = True
    for row in _drawn(path, seed):
        is_empty = False
        found = _found(row, documents)
        chunks = cutter.chunks(row, found) if "spans" in row.fields else tuple(map(_chunk_text, found))
        if chunks is None:
            continue
        questions.append(Question(row.name, row.text("question"), row.answers(), chunks))
        if len(questions) == limit:
            break
    if is_empty:
        raise ValueError(f"{path}: there is no question")
    if not questions:
        raise ValueError(f"{path}: no question has a document of {num_chunks} chunks of {chunk_tokens} tokens")
    return questions


def load_corpus(
    path: str | Path, prompts: PromptEncoder, *, chunk_tokens: int = 512, limit: int = MAX_CHUNKS
) -> list[str]:
    """What a retriever would choose from: all passages of a file, and all chunks of the documents that are cut.

    Args:
        path: The JSONL file, as for ``load_questions``.
        prompts: The engine's tokenizer.
        chunk_tokens: Length of the chunks that documents are cut into.
        limit: Most texts; by default as many as chunks are compared with, to be computed behind those most like them.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not as described; file, line and field are named.
    """
    path = Path(path)
    documents, cutter = _documents(path), _Cutter(prompts, chunk_tokens, 1, 0)
    texts: dict[str, None] = {}
    for row in _drawn(path, 0):
        found = _found(row, documents)
        parts = cutter.all_chunks(_only(row, found)) if "spans" in row.fields else map(_chunk_text, found)
        texts.update(dict.fromkeys(parts))
        if len(texts) >= limit:
            break
    return list(texts)[:limit]


@dataclass(frozen=True)
class _Row:
    """A line of a file, which its errors name."""

    path: Path
    number: int
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.text("id")

    def error(self, field: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}, line {self.number}, {field}: {problem}")

    def text(self, field: str) -> str:
        value = self.fields.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.error(field, f"{value!r} is not a text with at least one visible character")
        return value

    def list_of(self, field: str, kind: type) -> list[Any]:
        value = self.fields.get(field)
        if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
            raise self.error(field, f"{value!r} is not a list of at least one {kind.__name__}")
        return value

    def answers(self) -> tuple[str, ...]:
        return tuple(self.list_of("answers", str))

    def spans(self, length: int) -> tuple[tuple[int, int], ...]:
        """Where the answers stand in a document of so many characters."""
        return tuple(self._span(span, length) for span in self.list_of("spans", dict))

    def _span(self, span: Mapping[str, Any], length: int) -> tuple[int, int]:
        start, end = span.get("start"), span.get("end")
        if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start < end <= length:
            raise self.error("spans", f"{dict(span)!r} is no range of the document's {length} characters")
        return start, end


class _Cutter:
    """Cuts documents into chunks, each document once."""

    def __init__(self, prompts: PromptEncoder, chunk_tokens: int, num_chunks: int, seed: int) -> None:
        self._prompts, self._chunk_tokens, self._num_chunks, self._seed = prompts, chunk_tokens, num_chunks, seed
        self._cut: dict[str, list[tuple[int, int]]] = {}

    def chunks(self, row: _Row, documents: Sequence[Mapping[str, Any]]) -> tuple[str, ...] | None:
        """Chunks of the question's document, those with its answers among them; ``None`` if that can't be had."""
        text = _only(row, documents)
        answers, bounds = row.spans(len(text)), self._known_bounds(text)
        if len(bounds) < self._num_chunks:
            return None
        taken: set[int] = set()
        for index, (start, end) in enumerate(answers):
            holding = {number for number, (low, high) in enumerate(bounds) if low < end and start < high}
            if len(taken | holding) <= self._num_chunks:
                taken |= holding
            elif index == 0:
                return None
        if not taken:  # the answers stand in white space, or in what is left over behind the last whole chunk
            return None
        draw = random.Random(f"{self._seed}:{row.name}")
        others = [number for number in range(len(bounds)) if number not in taken]
        chosen = [*taken, *draw.sample(others, self._num_chunks - len(taken))]
        draw.shuffle(chosen)
        return tuple(text[bounds[number][0] : bounds[number][1]].strip() for number in chosen)

    def all_chunks(self, text: str) -> list[str]:
        """All chunks of a document."""
        return [text[start:end].strip() for start, end in self._known_bounds(text)]

    def _known_bounds(self, text: str) -> list[tuple[int, int]]:
        if text not in self._cut:
            self._cut[text] = self._bounds(text)
        return self._cut[text]

    def _bounds(self, text: str) -> list[tuple[int, int]]:
        """Character ranges of whole chunks; the rest behind the last one is left out."""
        token_ids = self._prompts.encode_chunk(text)
        bounds: list[tuple[int, int]] = []
        start = 0
        for end_token in range(self._chunk_tokens, len(token_ids) + 1, self._chunk_tokens):
            # A character may be cut between its bytes, which decode to replacement characters.
            before = self._prompts.decode(token_ids[:end_token]).rstrip("\N{REPLACEMENT CHARACTER}")
            end = _common_length(before, text)
            if text[start:end].strip():
                bounds.append((start, end))
            start = end
        return bounds


def _common_length(a: str, b: str) -> int:
    """Length of the common beginning of two texts."""
    if b.startswith(a):
        return len(a)
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _rows(path: Path) -> Iterator[_Row]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: this is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{path}, line {number}: {type(fields).__name__} is no JSON object")
        yield _Row(path, number, fields)


def _drawn(path: Path, seed: int) -> Iterator[_Row]:
    """The rows of a file in an order drawn by the seed."""
    rows = list(_rows(path))
    random.Random(seed).shuffle(rows)
    ids: dict[str, int] = {}
    for row in rows:
        if row.name in ids:
            raise row.error("id", f"{row.name!r} is also that of line {ids[row.name]}")
        ids[row.name] = row.number
        yield row


def _documents(path: Path) -> dict[str, Mapping[str, Any]]:
    """The documents beside a file of questions, by id; none where there is no such file."""
    beside = path.with_name(f"{path.stem}_docs{path.suffix}")
    return {row.name: {**row.fields, "text": row.text("text")} for row in _rows(beside)} if beside.exists() else {}


def _found(row: _Row, documents: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The documents of a question with their texts."""
    return [_with_text(row, index, document, documents) for index, document in enumerate(row.list_of("docs", dict))]


def _only(row: _Row, documents: Sequence[Mapping[str, Any]]) -> str:
    """The text of the one document that spans are offsets in."""
    if len(documents) != 1:
        raise row.error("docs", f"{len(documents)} documents; spans are offsets in one")
    text: str = documents[0]["text"]
    return text


def _with_text(
    row: _Row, index: int, document: Mapping[str, Any], documents: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    if "text" not in document:
        name = document.get("id")
        if not isinstance(name, str) or name not in documents:
            beside = f"{row.path.stem}_docs{row.path.suffix}"
            raise row.error(f"docs[{index}]", f"no text, and {name!r} is no document of {beside}")
        document = documents[name]
    if not isinstance(document["text"], str) or not document["text"].strip():
        raise row.error(
            f"docs[{index}].text", f"{document['text']!r} is not a text with at least one visible character"
        )
    return document


def _chunk_text(document: Mapping[str, Any]) -> str:
    title = document.get("title")
    text: str = document["text"].strip()
    return f"{title}\n{text}" if title else text
