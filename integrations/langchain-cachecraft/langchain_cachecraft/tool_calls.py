"""Tool calls in the text that a model writes, in the forms that models were taught.

- ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, several of them, text before them (Hermes, Qwen)
- an answer that is nothing but such an object, or several, perhaps in a list or in a Markdown block; ``parameters``
  instead of ``arguments`` (Llama 3); behind ``<|python_tag|>`` or ``[TOOL_CALLS]`` where these are left in the text
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import InvalidToolCall, ToolCall
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKS = ("<|python_tag|>", "[TOOL_CALLS]")
_BARE_STARTS = ("{", "[", "```", *_MARKS)
_FENCED = re.compile(r"```[a-z]*\s*\n(.*?)\n?\s*```\s*", re.DOTALL)
_BETWEEN = re.compile(r"[\s;,]*")
_ARGUMENTS = ("arguments", "parameters")
_OF_A_CALL = {"name", "type", "id", *_ARGUMENTS}
# Models break lines inside strings; only that is forgiven.
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class ToolCalls:
    """What became of a model's text.

    Attributes:
        text: The rest of the text, behind what was shown already.
        calls: Calls with arguments.
        invalid: Calls that can't be read, with the reason.
    """

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    invalid: list[InvalidToolCall] = field(default_factory=list)


class ToolCallReader:
    """Tells text from tool calls while the text comes in.

    Args:
        names: Names of the tools that were offered; without any, all is text.
        opened: What the prompt already holds of the answer.
    """

    def __init__(self, names: Sequence[str] = (), opened: str = "") -> None:
        self._names, self._text, self._num_shown = frozenset(names), opened, 0
        self._is_forced = bool(opened)

    @property
    def shown(self) -> str:
        """All that was shown."""
        return self._text[: self._num_shown]

    def take(self, delta: str) -> str:
        """Add text; returns what can be shown of all that came, since it can't be part of a call any more."""
        self._text += delta
        end = self._end_of_text()
        shown, self._num_shown = self._text[self._num_shown : end], max(end, self._num_shown)
        return shown

    def finish(self, is_cut: bool = False) -> ToolCalls:
        """The calls, and the text that was not shown.

        Args:
            is_cut: Whether the model was not done, but out of tokens.
        """
        values: list[Any] = []
        if not self._names:
            rest = self._text[self._num_shown :]
        elif _OPEN in self._text:
            values, rest = self._tagged()
        else:
            values, rest = self._bare()
        found = ToolCalls(text=rest)
        for value in values:
            _add_call(found, value, is_cut)
        return found

    def _end_of_text(self) -> int:
        """How far the text is text for certain."""
        if not self._names:
            return len(self._text)
        start = self._text.lstrip()
        if not start or any(start.startswith(bare[: len(start)]) for bare in _BARE_STARTS):
            return 0
        at = self._text.find(_OPEN)
        if at >= 0:
            return at
        return len(self._text) - max(n for n in range(len(_OPEN)) if self._text.endswith(_OPEN[:n]))

    def _tagged(self) -> tuple[list[Any], str]:
        values: list[Any] = []
        before, *parts = self._text.split(_OPEN)
        rest = [before[self._num_shown :]]
        for part in parts:
            body, _, after = part.partition(_CLOSE)
            found, end = _json_values(body)
            values += found if found and not body[end:].strip() else [_Unreadable(f"{_OPEN}{body}")]
            rest.append(after)
        return values, "".join(piece for piece in rest if piece.strip())

    def _bare(self) -> tuple[list[Any], str]:
        body = self._text.strip()
        for mark in _MARKS:
            body = body.removeprefix(mark).lstrip()
        fenced = _FENCED.fullmatch(body)
        body = fenced.group(1) if fenced else body
        values, end = _json_values(body)
        if values and not body[end:].strip() and all(self._is_call(value) for value in values):
            return values, ""
        if self._is_forced:
            return [_Unreadable(self._text)], ""
        return [], self._text[self._num_shown :]

    def _is_call(self, value: object) -> bool:
        """Whether an object without a tag is a call; an answer in JSON is one too, but of no tool."""
        value = _unwrapped(value)
        return isinstance(value, dict) and value.get("name") in self._names and set(value) <= _OF_A_CALL


@dataclass(frozen=True)
class _Unreadable:
    """Text where a call should be."""

    text: str


def _json_values(text: str) -> tuple[list[Any], int]:
    """JSON values at the start of a text, lists opened, and where they end."""
    values = list(_scan(text))
    flat = [item for value, _ in values for item in (value if isinstance(value, list) else [value])]
    return flat, values[-1][1] if values else 0


def _scan(text: str) -> Iterator[tuple[Any, int]]:
    end = 0
    while True:
        between = _BETWEEN.match(text, end)
        assert between is not None  # it matches nothing at all, too
        try:
            value, end = _DECODER.raw_decode(text, between.end())
        except json.JSONDecodeError:
            return
        yield value, end


def _unwrapped(value: object) -> object:
    """A call as OpenAI writes it holds the call proper under ``function``."""
    return value["function"] if isinstance(value, dict) and isinstance(value.get("function"), dict) else value


def _add_call(found: ToolCalls, value: object, is_cut: bool) -> None:
    raw = _raw_call(value)
    call: Any = None
    if isinstance(value, _Unreadable):
        reason = "this is no JSON object with a name and arguments"
        reason += "; the answer was cut off at max_tokens" if is_cut else ""
    elif not raw["function"]["name"]:
        reason = "the call names no tool"
    else:
        reason = "the arguments are no JSON object"
        try:
            call = parse_tool_call(raw)
        except OutputParserException as error:
            reason += f": {error.__cause__}"
    if call is not None and isinstance(call["args"], dict):
        found.calls.append(call)
    else:
        found.invalid.append(make_invalid_tool_call(raw, reason))


def _raw_call(value: object) -> dict[str, Any]:
    """A call in OpenAI's form: its arguments are text."""
    name, arguments = None, json.dumps(value, ensure_ascii=False) if not isinstance(value, _Unreadable) else value.text
    value = _unwrapped(value)
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        name, given = value["name"], _given(value)
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    # Nine letters or digits: templates of Mistral refuse other ids.
    return {"id": uuid.uuid4().hex[:9], "function": {"name": name, "arguments": arguments}}


def _given(call: dict[str, Any]) -> Any:
    return next((call[key] for key in _ARGUMENTS if call.get(key) is not None), {})
