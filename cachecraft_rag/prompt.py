"""Prompts: from messages, text or parts to token ids and the spans of the chunks in them.

The only user of the tokenizer. The chat template is rendered once, the chunks are found in the rendered text, and every
segment is tokenised alone: the ids of a chunk never depend on its neighbours, and decoding all ids gives back the text.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from cachecraft_rag.registry import ChunkRegistry, TextSpan

Message = Mapping[str, Any]

_REMEMBERED_CHUNKS = 4096
# Put before a segment to keep a SentencePiece tokenizer from starting it with a dummy space, and cut off again.
_ANCHORS = ("\n", "=", "|")
_PLACEHOLDER = "@@@"


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
        tokenizer: A Hugging Face tokenizer. A copy of it is used, under a lock: fast tokenizers are not thread-safe,
            and their settings change with every call.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not callable(getattr(tokenizer, "encode", None)):
            raise ValueError(
                f"tokenizer: {type(tokenizer).__name__} has no encode method; give a Hugging Face tokenizer"
            )
        self.tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._chunk_ids: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._bos = self._leading_ids()
        self._anchor = self._find_anchor()

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template; without one a plain layout is used."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def render(self, prompt: RagPrompt, add_generation_prompt: bool = True) -> str:
        """The text of a prompt, as the chat template makes it (without a BOS that only the tokenizer would add).

        A tokenizer without a template gets the plain layout: message contents joined by blank lines. A template that
        refuses system messages gets each at the head of the message that follows it.

        Raises:
            ValueError: The template refuses the messages all the same.
        """
        if prompt.text is not None:
            return prompt.text
        messages = prompt.as_messages()
        if not self.has_chat_template:
            return "\n\n".join(str(message["content"]) for message in messages)
        try:
            return self._apply_template(messages, prompt.tools, add_generation_prompt)
        except TemplateError as error:
            merged = _without_system_messages(messages)
            if merged == messages:
                raise _refused(error) from error
        try:
            return self._apply_template(merged, prompt.tools, add_generation_prompt)
        except TemplateError as error:
            raise _refused(error) from error

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
        found = _find_in_order(text, prompt.chunks)
        if registry is not None:
            taken = [(span.start, span.end) for span in found]
            others = [s for s in registry.find(text, namespace) if all(s.end <= a or s.start >= b for a, b in taken)]
            found = sorted([*found, *others], key=lambda span: span.start)
        adds_bos = prompt.text is not None or not self.has_chat_template
        bos_text = self.decode(self._bos) if adds_bos else ""
        bos = self._bos if adds_bos and not (bos_text and text.startswith(bos_text)) else ()
        ids: list[int] = list(bos)
        spans: list[ChunkSpan] = []
        cursor = 0
        for span in found:
            ids += self.encode_text(text[cursor : span.start])
            chunk = text[span.start : span.end]
            chunk_ids = self.encode_chunk(chunk)
            if chunk_ids:
                spans.append(ChunkSpan(len(ids), len(ids) + len(chunk_ids), chunk))
            ids += chunk_ids
            cursor = span.end
        ids += self.encode_text(text[cursor:])
        return EncodedPrompt((bos_text if bos else "") + text, tuple(ids), tuple(spans))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of text between chunks; special tokens written in it are special tokens."""
        return self._encode(text, split_special_tokens=False)

    def encode_chunk(self, text: str) -> tuple[int, ...]:
        """Ids of a chunk's text; special tokens written in it stay text, so a document can't end a turn."""
        ids = self._chunk_ids.get(text)
        if ids is None:
            ids = self._encode(text, split_special_tokens=True)
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

    def chat_head(self) -> str:
        """What the chat template puts before the text of a single user message."""
        if not self.has_chat_template:
            return ""
        messages = [{"role": "user", "content": _PLACEHOLDER}]
        return self._apply_template(messages, None, True).partition(_PLACEHOLDER)[0]

    def head_ids(self, instruction: str) -> tuple[int, ...]:
        """Ids of the chat head followed by an instruction: the canonical prefix of chunks."""
        bos = () if self.has_chat_template else self._bos
        return bos + self.encode_text(self.chat_head() + instruction)

    def _apply_template(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        with self._lock:
            rendered: str = self.tokenizer.apply_chat_template(
                messages,
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        return rendered

    def _encode(self, text: str, split_special_tokens: bool) -> tuple[int, ...]:
        if not text:
            return ()
        anchor, anchor_ids = self._anchor
        ids = self._raw_encode(anchor + text, split_special_tokens)
        if anchor and ids[: len(anchor_ids)] != anchor_ids:
            ids, anchor_ids = self._raw_encode(text, split_special_tokens), ()
        return ids[len(anchor_ids) :]

    def _raw_encode(self, text: str, split_special_tokens: bool) -> tuple[int, ...]:
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

    def _leading_ids(self) -> tuple[int, ...]:
        """What the tokenizer itself puts before a text (BOS), found by encoding nothing."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        ids = self.tokenizer("a")["input_ids"]
        return (ids[0],) if bos is not None and ids and ids[0] == bos else ()

    def _find_anchor(self) -> tuple[str, tuple[int, ...]]:
        """A text after which segments start without a dummy space; ("", ()) where none is needed."""
        probe = "Hello"
        if self.tokenizer.decode(list(self._raw_encode(probe, False)) * 2) == probe * 2:
            return "", ()
        for anchor in _ANCHORS:
            ids, anchor_ids = self._raw_encode(anchor + probe, False), self._raw_encode(anchor, False)
            rest = list(ids[len(anchor_ids) :])
            if ids[: len(anchor_ids)] == anchor_ids and self.tokenizer.decode(list(ids) + rest).endswith(probe * 2):
                return anchor, anchor_ids
        return "", ()


def _without_system_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every system message put at the head of the next other one; a last one stays."""
    merged: list[dict[str, Any]] = []
    pending: list[str] = []
    for message in messages:
        if message["role"] == "system" and message is not messages[-1]:
            pending.append(str(message["content"]))
        else:
            content = "\n\n".join([*pending, str(message["content"])]) if pending else message["content"]
            merged.append({**message, "content": content})
            pending = []
    return merged


def _refused(error: TemplateError) -> ValueError:
    return ValueError(f"messages: the model's chat template refuses them: {error}")


def _find_in_order(text: str, chunks: Sequence[str]) -> list[TextSpan]:
    """Places of the chunks in the order given, white space at their edges left out, as in the registry."""
    spans: list[TextSpan] = []
    cursor = 0
    for chunk in (chunk.strip() for chunk in chunks):
        start = text.find(chunk, cursor)
        if start >= 0:
            spans.append(TextSpan(start, start + len(chunk)))
            cursor = start + len(chunk)
    return spans
