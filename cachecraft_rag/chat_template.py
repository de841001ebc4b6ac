"""Chat messages to text, and where in the text their contents stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from cachecraft_rag.segment_tokenizer import SegmentTokenizer

Message = Mapping[str, Any]

_PLACEHOLDER = "@@{}@@"


class ChatTemplate:
    """The chat template of a tokenizer, or a plain layout where it has none: contents joined by blank lines.

    Args:
        tokenizer: Holds the template.
    """

    def __init__(self, tokenizer: SegmentTokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def is_plain(self) -> bool:
        """Whether the tokenizer brings no chat template."""
        return not getattr(self._tokenizer.tokenizer, "chat_template", None)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text of a chat, ready for the answer.

        A template that refuses system messages gets each at the head of the message that follows it.

        Raises:
            ValueError: The template refuses the messages all the same.
        """
        return self._render(messages, tools)[0]

    def content_ranges(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[tuple[int, int]]:
        """Character ranges of the rendered text that hold the contents of messages.

        Only there are chunks looked for: a document that looks like a piece of the template must not be mistaken for
        it. Contents that a template changes by more than white space at the edges give one range from the first
        content to the end.
        """
        text, read = self._render(messages, tools)
        marked = [{**m, "content": _PLACEHOLDER.format(index)} for index, m in enumerate(read)]
        skeleton, _ = self._render(marked, tools)
        ranges: list[tuple[int, int]] = []
        cursor = 0
        for index, message in enumerate(read):
            before, found, skeleton = skeleton.partition(_PLACEHOLDER.format(index))
            if not found:
                break
            start = cursor + len(before)
            content = str(message["content"])
            body = next((form for form in (content, content.strip()) if text.startswith(form, start)), None)
            if body is None or text[cursor:start] != before:
                return [*ranges, (start, len(text))]
            cursor = start + len(body)
            ranges.append((start, cursor))
        return ranges if text[cursor:] == skeleton else [(ranges[0][0] if ranges else 0, len(text))]

    def head(self) -> str:
        """What stands before the text of a single user message."""
        mark = _PLACEHOLDER.format(0)
        return self.render([{"role": "user", "content": mark}]).partition(mark)[0]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[str, Sequence[Message]]:
        """The text, and the messages as the template took them."""
        if self.is_plain:
            return "\n\n".join(str(message["content"]) for message in messages), messages
        try:
            return self._apply(messages, tools), messages
        except TemplateError as error:
            merged = _without_system_messages(messages)
            if len(merged) == len(messages):
                raise _refused(error) from error
        try:
            return self._apply(merged, tools), merged
        except TemplateError as error:
            raise _refused(error) from error

    def _apply(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        text: str = self._tokenizer.locked(
            lambda tokenizer: tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=False,
                add_generation_prompt=True,
            )
        )
        return text


def _without_system_messages(messages: Sequence[Message]) -> list[Message]:
    """Every system message put at the head of the next other one; a last one stays."""
    merged: list[Message] = []
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
