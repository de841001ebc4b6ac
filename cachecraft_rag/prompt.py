"""Prompts: from messages, text or parts to token ids and the spans of the chunks in them.

The chat template is rendered, the chunks are found in the rendered text, and every segment is tokenised alone: the ids
of a chunk never depend on its neighbours, and decoding all ids gives back the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachecraft_rag.chat_template import ChatTemplate, Message
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
    """

    system: str = ""
    chunks: tuple[str, ...] = ()
    question: str = ""
    separator: str = "\n\n"
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        chunks: Any = self.chunks
        if isinstance(chunks, str):
            raise ValueError(f"chunks: {chunks!r} is one string; give a list of strings")
        object.__setattr__(self, "chunks", tuple(chunks))
        for index, chunk in enumerate(chunks):
            if not isinstance(chunk, str) or not chunk.strip():
                raise ValueError(f"chunks[{index}]: {chunk!r} is not a text with at least one visible character")
        for name in ("system", "question", "separator"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}: {getattr(self, name)!r} is not a string")
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
    ) -> RagPrompt:
        """A chat; chunks not named here are found through the registry."""
        return cls(chunks=tuple(chunks), messages=tuple(messages), tools=None if tools is None else tuple(tools))

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
class ChunkSpan:
    """Where a chunk stands in a prompt: token ids ``[start, end)``."""

    start: int
    end: int
    text: str

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
    """

    text: str
    token_ids: tuple[int, ...]
    spans: tuple[ChunkSpan, ...]


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
        return prompt.text if prompt.text is not None else self._template.render(prompt.as_messages(), prompt.tools)

    def encode(
        self, prompt: RagPrompt, registry: ChunkRegistry | None = None, namespace: str = "default"
    ) -> EncodedPrompt:
        """Render a prompt, find its chunks and tokenise every segment alone.

        Args:
            prompt: The prompt; its own chunks are looked for first.
            registry: Known chunk texts to look for in the rest.
            namespace: Whose chunks.
        """
        text = self.render(prompt)
        adds_bos = prompt.text is not None or not self.has_chat_template
        bos_text = self.decode(self._segments.bos) if adds_bos else ""
        bos = self._segments.bos if adds_bos and not (bos_text and text.startswith(bos_text)) else ()
        ids: list[int] = list(bos)
        spans: list[ChunkSpan] = []
        cursor = 0
        for span in self._find_chunks(prompt, text, registry, namespace):
            ids += self.encode_text(text[cursor : span.start])
            chunk = text[span.start : span.end]
            chunk_ids = self.encode_chunk(chunk)
            if chunk_ids:
                spans.append(ChunkSpan(len(ids), len(ids) + len(chunk_ids), chunk))
            ids += chunk_ids
            cursor = span.end
        ids += self.encode_text(text[cursor:])
        return EncodedPrompt((bos_text if bos else "") + text, tuple(ids), tuple(spans))

    def head_ids(self, instruction: str) -> tuple[int, ...]:
        """Ids of the chat head followed by an instruction: the canonical prefix of chunks."""
        if not self.has_chat_template:
            return self._segments.bos + self.encode_text(instruction)
        return self.encode_text(self._template.head() + instruction)

    def _find_chunks(
        self, prompt: RagPrompt, text: str, registry: ChunkRegistry | None, namespace: str
    ) -> list[TextSpan]:
        """Named chunks, then registered ones, where they stand inside the contents of messages."""
        known = registry.find(text, namespace) if registry is not None else []
        if not prompt.chunks and not known:
            return []
        if prompt.text is not None:
            ranges = [(0, len(text))]
        else:
            ranges = self._template.content_ranges(prompt.as_messages(), prompt.tools)
        named_in = ranges
        if prompt.messages is None and prompt.text is None:  # made of parts: chunks begin the last message
            start, end = ranges[-1]
            named_in = [(max(start, end - len(prompt.as_messages()[-1]["content"])), end)]
        found = _find_in_order(text, prompt.chunks, named_in)
        inside = [s for s in known if any(start <= s.start and s.end <= end for start, end in ranges)]
        found += [s for s in inside if all(s.end <= other.start or s.start >= other.end for other in found)]
        return sorted(found, key=lambda span: span.start)


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
                spans.append(TextSpan(at, at + len(chunk)))
                cursor = at + len(chunk)
                break
    return spans
