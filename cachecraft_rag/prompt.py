"""Prompts: from messages, text or parts to token ids and the spans of the chunks in them.

The chat template is rendered, the chunks are found in the rendered text, and every segment is tokenised alone: the ids
of a chunk never depend on its neighbours, and decoding all ids gives back the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachecraft_rag.auto_chunks import AutoChunks
from cachecraft_rag.chat_template import ChatTemplate, Message
from cachecraft_rag.piece_ids import tokens_of
from cachecraft_rag.pieces import MIN_PIECE_CHARS, PieceSpan, Range, apart, common_prefix
from cachecraft_rag.registry import ChunkRegistry, TextSpan
from cachecraft_rag.segment_tokenizer import SegmentTokenizer


@dataclass(frozen=True)
class RagPrompt:
    """What is asked of the model, in one of three forms: parts, chat messages, or ready text.

    From parts, the user's message is the chunks and the question joined by ``separator``; nothing else is added.

    Attributes:
        system: System message; empty for none.
        chunks: Texts whose KV is reused. With messages or text they only say what to look for.
        question: The user's question; may be empty.
        separator: Joins chunks and question.
        messages: Chat messages with ``role`` and ``content``, rendered by the chat template.
        text: Ready prompt text; no chat template is applied.
        tools: Tool descriptions for the chat template.
        answer_start: What the answer begins with, put behind all that the chat template prints. The model continues
            it, and results hold the continuation only.
    """

    system: str = ""
    chunks: tuple[str, ...] = ()
    question: str = ""
    separator: str = "\n\n"
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    answer_start: str = ""

    def __post_init__(self) -> None:
        chunks: Any = self.chunks
        if isinstance(chunks, str):
            raise ValueError(f"chunks: {chunks!r} is one string; give a list of strings")
        object.__setattr__(self, "chunks", tuple(chunks))
        for index, chunk in enumerate(chunks):
            if not isinstance(chunk, str) or not chunk.strip():
                raise ValueError(f"chunks[{index}]: {chunk!r} is not a text with at least one visible character")
        for name in ("system", "question", "separator", "answer_start"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}: {getattr(self, name)!r} is not a string")
        if self.text is not None and self.answer_start:
            raise ValueError(f"answer_start: {self.answer_start!r} beside text; put it at the end of the text")
        if self.messages is not None:
            object.__setattr__(self, "messages", tuple(self.messages))
            if not self.messages:
                raise ValueError("messages: an empty list; give at least one message")

    @classmethod
    def from_messages(
        cls,
        messages: Sequence[Message],
        chunks: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer_start: str = "",
    ) -> RagPrompt:
        """A chat; chunks not named here are found through the registry."""
        tools = None if tools is None else tuple(tools)
        return cls(chunks=tuple(chunks), messages=tuple(messages), tools=tools, answer_start=answer_start)

    @classmethod
    def from_text(cls, text: str, chunks: Sequence[str] = ()) -> RagPrompt:
        """Ready text, given to the model as it is (with a BOS token where the tokenizer adds one)."""
        return cls(chunks=tuple(chunks), text=text)

    def as_messages(self) -> list[dict[str, Any]]:
        """The chat messages of this prompt."""
        if self.messages is not None:
            return [dict(message) for message in self.messages]
        content = self.separator.join([*self.chunks, self.question] if self.question else self.chunks)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": content}]


@dataclass(frozen=True)
class PieceOf:
    """What a piece is a piece of.

    Attributes:
        token_ids: Ids of the whole chunk.
        start: Number of the piece's first token in it.
    """

    token_ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class ChunkSpan:
    """Where a chunk, or a piece of one, stands in a prompt: token ids ``[start, end)``.

    Attributes:
        start: Its first token.
        end: The token behind its last.
        text: Its text, as it stands there.
        origins: The registered texts that this is a form or a piece of.
        piece: What it is a piece of; ``None`` for a whole chunk.
    """

    start: int
    end: int
    text: str
    origins: tuple[str, ...] = ()
    piece: PieceOf | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the span in tokens."""
        return self.end - self.start


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model reads it.

    Attributes:
        text: The rendered prompt, BOS included; equals ``decode(token_ids)``.
        token_ids: Ids of the whole prompt.
        spans: The chunks, in order, not overlapping.
        num_head_tokens: Tokens before the first chunk and before any turn of a conversation: what a service's prompts
            may have in common. 0 without chunks.
    """

    text: str
    token_ids: tuple[int, ...]
    spans: tuple[ChunkSpan, ...]
    num_head_tokens: int = 0

    @property
    def head_ids(self) -> tuple[int, ...]:
        """Ids of those tokens."""
        return self.token_ids[: self.num_head_tokens]

    @property
    def tail_ids(self) -> tuple[int, ...]:
        """Ids behind the last chunk."""
        return self.token_ids[self.spans[-1].end :] if self.spans else self.token_ids


class PromptEncoder:
    """Turns prompts into ids and spans with one tokenizer.

    Args:
        tokenizer: A Hugging Face tokenizer; a copy of it is used.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._segments = SegmentTokenizer(tokenizer)
        self._template = ChatTemplate(self._segments)
        self.encode_text = self._segments.encode_text
        self.encode_chunk = self._segments.encode_chunk
        self.decode = self._segments.decode

    @property
    def tokenizer(self) -> Any:
        """The copy of the tokenizer that is used; not to be called while requests run."""
        return self._segments.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template; without one a plain layout is used."""
        return not self._template.is_plain

    def render(self, prompt: RagPrompt) -> str:
        """The text of a prompt, without a BOS that only the tokenizer would add.

        Raises:
            ValueError: The chat template refuses the messages.
        """
        if prompt.text is not None:
            return prompt.text
        return self._template.render(prompt.as_messages(), prompt.tools) + prompt.answer_start

    def encode(
        self,
        prompt: RagPrompt,
        registry: ChunkRegistry | None = None,
        namespace: str = "default",
        auto_chunks: AutoChunks | None = None,
    ) -> EncodedPrompt:
        """Render a prompt, find its chunks and tokenise every segment alone.

        Args:
            prompt: The prompt; its own chunks are looked for first.
            registry: Known chunk texts to look for in the rest, whole ones and then pieces.
            namespace: Whose chunks.
            auto_chunks: Finds in what is left the text that was seen before, and remembers the other.
        """
        text = self.render(prompt)
        adds_bos = prompt.text is not None or not self.has_chat_template
        bos_text = self.decode(self._segments.bos) if adds_bos else ""
        bos = self._segments.bos if adds_bos and not (bos_text and text.startswith(bos_text)) else ()
        ids: list[int] = list(bos)
        spans: list[ChunkSpan] = []
        cursor = num_head_tokens = 0
        for span in self._find_chunks(prompt, text, registry, namespace, auto_chunks):
            start, end, piece = span.start, span.end, None
            if isinstance(span, PieceSpan):
                tokens = tokens_of(span, self._segments)
                if tokens is None:
                    continue
                start, end, piece = tokens.start, tokens.end, PieceOf(tokens.whole, tokens.first)
            ids += self.encode_text(text[cursor:start])
            chunk_ids = self.encode_chunk(text[start:end])
            if chunk_ids:
                if not spans:
                    num_head_tokens = self._num_head_tokens(prompt, text[:start], bos, tuple(ids))
                place = len(ids), len(ids) + len(chunk_ids)
                spans.append(ChunkSpan(*place, text[start:end], span.origins, piece))
            ids += chunk_ids
            cursor = end
        ids += self.encode_text(text[cursor:])
        return EncodedPrompt((bos_text if bos else "") + text, tuple(ids), tuple(spans), num_head_tokens)

    def _num_head_tokens(self, prompt: RagPrompt, before: str, bos: tuple[int, ...], ids: tuple[int, ...]) -> int:
        """How many of the ids before the first chunk, whose text is ``before``, no turn and no question is part of."""
        turns = [str(m.get("content") or "").strip() for m in prompt.messages or () if m.get("role") != "system"]
        places = [before.find(text) for text in (prompt.question.strip(), *turns) if text]
        first = min((place for place in places if place >= 0), default=None)
        if first is None:
            return len(ids)
        return common_prefix(ids, (*bos, *self.encode_text(before[:first])))

    def head_ids(self, instruction: str) -> tuple[int, ...]:
        """Ids of the chat head followed by an instruction: the canonical prefix of chunks."""
        if not self.has_chat_template:
            return self._segments.bos + self.encode_text(instruction)
        return self.encode_text(self._template.head() + instruction)

    def _find_chunks(
        self,
        prompt: RagPrompt,
        text: str,
        registry: ChunkRegistry | None,
        namespace: str,
        auto_chunks: AutoChunks | None,
    ) -> list[TextSpan | PieceSpan]:
        """Named chunks, then registered ones and pieces of them, where they stand inside the contents of messages."""
        known = registry.find(text, namespace) if registry is not None else []
        if not prompt.chunks and not known and (registry is None or len(text) < MIN_PIECE_CHARS):
            return []
        if prompt.text is not None:
            ranges = [(0, len(text))]
        else:
            ranges = self._template.content_ranges(prompt.as_messages(), prompt.tools)
        named_in = ranges
        if prompt.messages is None and prompt.text is None:  # made of parts: chunks begin the last message
            start, end = ranges[-1]
            named_in = [(max(start, end - len(prompt.as_messages()[-1]["content"])), end)]
        found: list[TextSpan | PieceSpan] = [*_find_in_order(text, prompt.chunks, named_in)]
        inside = [s for s in known if any(start <= s.start and s.end <= end for start, end in ranges)]
        found += [s for s in inside if all(s.end <= other.start or s.start >= other.end for other in found)]
        if registry is not None:
            found += registry.find_pieces(text, _left(ranges, found), namespace)
            if auto_chunks is not None:
                found += auto_chunks.find(text, _left(ranges, found), registry, namespace)
        return sorted(found, key=lambda span: span.start)


def _left(ranges: Iterable[Range], found: Iterable[TextSpan | PieceSpan]) -> list[Range]:
    """The parts of some ranges where nothing was found."""
    return apart(ranges, [(span.start, span.end) for span in found])


def _find_in_order(text: str, chunks: Sequence[str], ranges: Sequence[tuple[int, int]]) -> list[TextSpan]:
    """Places of chunks within the ranges, white space at their edges left out, as in the registry.

    Each is looked for behind the one named before it, so that repeated chunks get one place each; one that stands
    before it is found all the same.
    """
    spans: list[TextSpan] = []
    cursor = 0
    for chunk in (chunk.strip() for chunk in chunks):
        places = [(max(start, cursor), end) for start, end in ranges if end > cursor] + list(ranges)
        for start, end in places:
            at = text.find(chunk, start, end)
            if at >= 0 and all(at >= span.end or at + len(chunk) <= span.start for span in spans):
                spans.append(TextSpan(at, at + len(chunk), (chunk,)))
                cursor = at + len(chunk)
                break
    return spans
