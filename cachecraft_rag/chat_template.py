"""Chat messages to text, and where in the text their contents stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from cachecraft_rag.segment_tokenizer import SegmentTokenizer
from cachecraft_rag.tool_calls import written_call

Message = Mapping[str, Any]

_PLACEHOLDER = "@@{}@@"
_PROBE_NAME = "probe_the_lease"
_PROBE = {"id": "probe1234", "type": "function", "function": {"name": _PROBE_NAME, "arguments": {"clause": "alpha"}}}
_PROBE_CHAT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [_PROBE]}]
# Of another name, so that a template that only lists tools does not seem to print their calls.
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "list", "description": "Lists.", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    """The chat template of a tokenizer, or a plain layout where it has none: contents joined by blank lines.

    Args:
        tokenizer: Holds the template.
    """

    def __init__(self, tokenizer: SegmentTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: tuple[Any, dict[bool, bool]] = (None, {})

    @property
    def is_plain(self) -> bool:
        """Whether the tokenizer brings no chat template."""
        return not getattr(self._tokenizer.tokenizer, "chat_template", None)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text of a chat, ready for the answer.

        A template that refuses system messages gets each at the head of the message that follows it, the model's own
        left out. One that prints no calls of tools gets them as text.

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
        if any(message.get("tool_calls") for message in messages) and not self._prints_calls(bool(tools)):
            messages = [_with_calls_as_text(message) for message in messages]
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

    def _prints_calls(self, has_tools: bool) -> bool:
        if self.is_plain:
            return False
        template = self._tokenizer.tokenizer.chat_template
        if self._known[0] != template:
            self._known = (template, {})
        known = self._known[1]
        if has_tools not in known:
            known[has_tools] = self._tokenizer.locked(lambda tokenizer: prints_calls(tokenizer, has_tools))
        return known[has_tools]

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


def prints_calls(tokenizer: Any, has_tools: bool) -> bool:
    """Whether a chat template prints the calls of tools in earlier messages, in whatever form.

    Args:
        tokenizer: Holds the template.
        has_tools: Whether tools are offered, too; some templates depend on it.
    """
    try:
        text = tokenizer.apply_chat_template(_PROBE_CHAT, tools=[_PROBE_TOOL] if has_tools else None, tokenize=False)
    except (TemplateError, ValueError, TypeError, KeyError):  # it knows no calls, or only ones of another form
        return False
    return _PROBE_NAME in text


def _with_calls_as_text(message: Message) -> Message:
    """A message with its calls behind its content."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    texts = [written_call(call["name"], call.get("arguments", {})) for call in calls]
    content = "\n".join([*([str(message["content"])] if message.get("content") else []), *texts])
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _without_system_messages(messages: Sequence[Message]) -> list[Message]:
    """Every system message put at the head of the next one that is not the model's own.

    Where there is none, it is put behind the user's last; where there is none of the user either, all stay.
    """
    merged: list[Message] = []
    pending: list[str] = []
    for message in messages:
        if message["role"] == "system":
            pending.append(str(message["content"]))
        elif pending and message["role"] != "assistant":
            merged.append({**message, "content": "\n\n".join([*pending, str(message["content"])])})
            pending = []
        else:
            merged.append(message)
    if not pending:
        return merged
    last = max((index for index, message in enumerate(merged) if message["role"] == "user"), default=None)
    if last is None:
        return [*messages]
    merged[last] = {**merged[last], "content": "\n\n".join([str(merged[last]["content"]), *pending])}
    return merged


def _refused(error: TemplateError) -> ValueError:
    return ValueError(f"messages: the model's chat template refuses them: {error}")
