"""Tool calls in the text that a model writes, in the forms that models were taught.

- ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, several of them, with text around them (Hermes, Qwen);
  a tag inside of JSON, or one that a text speaks of without a call behind it, is text
- such objects from some place to the end of the answer, perhaps in a list or in a Markdown block, with ``parameters``
  instead of ``arguments`` (Llama 3), or below ``function`` or ``tool_calls`` (OpenAI)
- these behind ``<|python_tag|>`` or ``[TOOL_CALLS]``, where the marks are left in the text (Llama 3, Mistral)
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKS = ("<|python_tag|>", "[TOOL_CALLS]")
_TAG = re.compile(f"{_OPEN}|{_CLOSE}")
_FENCE = "```"
# Every character that the beginning of a call can begin with.
_FIRST = re.compile(r"[<\[{`]")
_BEFORE_AN_OBJECT = re.compile(r"(?:```\w*\s*)?(?:\[\s*)?")
_BLOCK = re.compile(r"```\w*\s*(.*?)\s*(?:```\s*)?", re.DOTALL)
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s;,]*")
_ARGUMENTS = ("arguments", "parameters")
_OF_A_CALL = {"name", "type", "id", *_ARGUMENTS}
_FIRST_KEYS = tuple(f'"{key}"' for key in sorted({*_OF_A_CALL, "function", "tool_calls"}))
# Models break lines inside strings; only that is forgiven.
_DECODER = json.JSONDecoder(strict=False)


def _new_id() -> str:
    return uuid.uuid4().hex[:9]  # templates of Mistral refuse ids that are not nine letters and digits


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote.

    Attributes:
        name: Of the tool.
        arguments: By name.
        id: Nine letters and digits, unlike those of all other calls.
    """

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=_new_id, compare=False)


def written_call(name: str, arguments: object) -> str:
    """A call in the form that most models were taught, and that is read here.

    Args:
        name: Of the tool.
        arguments: By name, or as the JSON of that.
    """
    if isinstance(arguments, str):
        # What is no JSON is shown to the model as the text that it wrote.
        with suppress(json.JSONDecodeError, RecursionError):
            arguments = _DECODER.decode(arguments.strip() or "{}")
    return f"{_OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{_CLOSE}"


@dataclass(frozen=True)
class BrokenCall:
    """Something that should be a call and can't be read as one.

    Attributes:
        text: What the model wrote.
        reason: Why it is no call.
        name: Of the tool, where there is one.
        id: As that of a call.
    """

    text: str
    reason: str
    name: str | None = None
    id: str = field(default_factory=_new_id, compare=False)


@dataclass(frozen=True)
class ToolAnswer:
    """What became of a model's text.

    Attributes:
        text: The text without its calls; begins with all that was shown before.
        calls: Calls with arguments. Their tools need not exist.
        broken: Calls that can't be read.
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[BrokenCall, ...] = ()


class ToolCallReader:
    """Tells text from tool calls while the text comes in.

    Args:
        names: Names of the tools that were offered; without any, all is text.
        opened: What the prompt already holds of the answer, which then is a call or broken.
        several: Whether an answer may call more than once; if not, the first call is all that it says.
    """

    def __init__(self, names: Sequence[str] = (), opened: str = "", several: bool = True) -> None:
        self._names, self._opened, self._text, self._several = tuple(names), opened, opened, several
        self._num_shown = 0

    @property
    def shown(self) -> str:
        """All that was shown."""
        return self._text[: self._num_shown]

    def take(self, delta: str) -> str:
        """Add text; returns what can be shown of all that came, since it can't be part of a call any more."""
        self._text += delta
        before, self._num_shown = self._num_shown, max(self._num_shown, self._num_certain())
        return self._text[before : self._num_shown]

    def finish(self, is_cut: bool = False) -> ToolAnswer:
        """The whole answer, once all text is there.

        Args:
            is_cut: Whether the model was not done, but out of tokens.
        """
        if not self._names:
            return ToolAnswer(self._text)
        tag = _next_tag(self._text, 0)
        found = self._bare(len(self._text) if tag is None else tag)
        if found is None and tag is not None:
            found = self._tagged(tag)
        if found is None:
            found = ("", [_Unreadable(self._text)]) if self._opened else (self._text, [])
        text, values = found
        read = [_read(value, is_cut) for value in values]
        calls = tuple(one for one in read if isinstance(one, ToolCall))
        if not calls and (call := self._continued()) is not None:
            return ToolAnswer("", (call,))
        calls = calls if self._several else calls[:1]
        return ToolAnswer(text, calls, tuple(one for one in read if isinstance(one, BrokenCall)))

    def _num_certain(self) -> int:
        """How many characters are text whatever follows; white space at the end may still stand before a call."""
        if not self._names:
            return len(self._text)
        if self._opened:
            return 0
        end = len(self._text)
        for match in _FIRST.finditer(self._text, self._num_shown):
            if _may_begin(self._text[match.start() :]):
                end = match.start()
                break
        return len(self._text[:end].rstrip())

    def _tagged(self, tag: int) -> tuple[str, list[Any]]:
        """The text around the tags, of which the first stands at a place, and the values between them."""
        values: list[Any] = []
        texts: list[str] = []
        place: int | None = tag
        end = len(self._opened)
        while place is not None:
            texts.append(self._text[end:place])
            found, end = _values_behind(self._text, place)
            values += found
            place = _next_tag(self._text, end)
        return "".join([*texts, self._text[end:]]).rstrip(), values

    def _bare(self, limit: int) -> tuple[str, list[Any]] | None:
        """The text before the calls, and the values from there to the end of the answer; none begin from a place on."""
        for match in _FIRST.finditer(self._text, 0, limit):
            body = self._text[match.start() :]
            if not _may_begin(body):
                continue
            for mark in _MARKS:
                body = body.removeprefix(mark).lstrip()
            if (block := _BLOCK.fullmatch(body)) is not None:
                body = block.group(1)
            if not body.startswith("{", _start_of_object(body)):
                continue
            values, end = _json_values(body)
            if values and not body[end:].strip() and all(self._is_call(value) for value in values):
                return self._text[len(self._opened) : match.start()].rstrip(), values
        return None

    def _continued(self) -> ToolCall | None:
        """The call whose name was given, when its arguments are complete, but what should follow them is not."""
        if not self._opened or len(self._names) != 1:
            return None
        values, _ = _json_values(self._text[len(self._opened) :])
        if not values or not isinstance(values[0], dict):
            return None
        call = _read(values[0] if self._is_call(values[0]) else {"name": self._names[0], "arguments": values[0]}, False)
        return call if isinstance(call, ToolCall) else None

    def _is_call(self, value: object) -> bool:
        """Whether an object without a tag is a call; an answer in JSON is one too, but of no tool."""
        value = _unwrapped(value)
        return isinstance(value, dict) and value.get("name") in self._names and set(value) <= _OF_A_CALL


@dataclass(frozen=True)
class _Unreadable:
    """Text where a call should be."""

    text: str


def _may_begin(text: str) -> bool:
    """Whether a call may begin where a text begins, whatever follows. Once it may not, no later text changes that."""
    if text.startswith(_OPEN):
        return _is_tag(text, 0, if_nothing_follows=True)
    if any(text.startswith(mark) or mark.startswith(text) for mark in (_OPEN, *_MARKS)) or _FENCE.startswith(text):
        return True
    body = text[_start_of_object(text) :]
    if not body:
        return True  # a block or a list that has only begun
    key = body[1:].lstrip()
    return body[0] == "{" and any(key.startswith(known) or known.startswith(key) for known in _FIRST_KEYS)


def _is_tag(text: str, place: int, if_nothing_follows: bool) -> bool:
    """Whether an opening tag begins a call: JSON follows, or words that a closing tag ends before another one opens.

    Args:
        text: Where it stands.
        place: Where in it.
        if_nothing_follows: What to take words for that no tag follows, since one may still come.
    """
    start = place + len(_OPEN)
    following = _TAG.search(text, start)
    return _begins_json(text, start) or (if_nothing_follows if following is None else following.group() == _CLOSE)


def _begins_json(text: str, start: int) -> bool:
    """Whether an object or a list begins behind white space, or nothing is there yet."""
    space = _SPACE.match(text, start)
    assert space is not None  # it matches nothing at all, too
    return text[space.end() : space.end() + 1] in ("", "{", "[")


def _next_tag(text: str, start: int) -> int | None:
    """The first place of a tag that begins a call."""
    tags = (match.start() for match in _TAG.finditer(text, start) if match.group() == _OPEN)
    return next((place for place in tags if _is_tag(text, place, if_nothing_follows=False)), None)


def _values_behind(text: str, tag: int) -> tuple[list[Any], int]:
    """The values of the call that a tag begins, and where the text goes on."""
    body = text[tag + len(_OPEN) :]
    values, end = _json_values(body)
    after = body[end:].lstrip()
    if values and (not after or after.startswith((_OPEN, _CLOSE))):
        return values, len(text) - len(after.removeprefix(_CLOSE))
    following = _TAG.search(body, end)
    if following is None:
        return [_Unreadable(text[tag:])], len(text)
    end = following.end() if following.group() == _CLOSE else following.start()
    return [_Unreadable(f"{_OPEN}{body[: following.start()]}")], tag + len(_OPEN) + end


def _start_of_object(text: str) -> int:
    """Where the object begins that may stand in a block and in a list."""
    before = _BEFORE_AN_OBJECT.match(text)
    assert before is not None  # it matches nothing at all, too
    return before.end()


def _json_values(text: str) -> tuple[list[Any], int]:
    """JSON values at the start of a text, lists opened, and where they end."""
    values = list(_scan(text))
    return [item for value, _ in values for item in _items(value)], values[-1][1] if values else 0


def _scan(text: str) -> Iterator[tuple[Any, int]]:
    end = 0
    while True:
        between = _BETWEEN.match(text, end)
        assert between is not None  # it matches nothing at all, too
        try:
            value, end = _DECODER.raw_decode(text, between.end())
        except (json.JSONDecodeError, RecursionError):
            return
        yield value, end


def _items(value: object) -> list[Any]:
    """A list of calls, or an object that holds nothing but one, opened."""
    if isinstance(value, dict) and set(value) == {"tool_calls"} and isinstance(value["tool_calls"], list):
        value = value["tool_calls"]
    return value if isinstance(value, list) else [value]


def _unwrapped(value: object) -> object:
    """A call as OpenAI writes it holds the call proper under ``function``."""
    return value["function"] if isinstance(value, dict) and isinstance(value.get("function"), dict) else value


def _read(value: object, is_cut: bool) -> ToolCall | BrokenCall:
    if isinstance(value, _Unreadable):
        reason = "this is no JSON object with a name and arguments"
        return BrokenCall(value.text, f"{reason}; the answer was cut off at the token limit" if is_cut else reason)
    text, call = json.dumps(value, ensure_ascii=False), _unwrapped(value)
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(name, str) or not name:
        return BrokenCall(text, "the call names no tool")
    arguments: Any = next((call[key] for key in _ARGUMENTS if call.get(key) is not None), {})
    why = ""
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments.strip() or "{}")
        except (json.JSONDecodeError, RecursionError) as error:
            why = f": {error}"
    if not isinstance(arguments, dict):
        return BrokenCall(text, f"the arguments are no JSON object{why}", name)
    return ToolCall(name, arguments)
