"""How a model writes the call of a tool, as its own chat template prints one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from cachecraft_rag import RagPrompt
from cachecraft_rag.prompt import PromptEncoder

_DECODER = json.JSONDecoder()
# What models put around a call: tags, fences, the brackets of a list.
_MARKUP_BEFORE = re.compile(r"(?:\s|\[TOOL_CALLS\]|\[|```\w*|<\|?\w*\|?>)+\Z")
# Where a call may begin in text that is still being written. Once a place is ruled out, no later text brings it back.
_MAY_BEGIN = re.compile(
    r"""
      <\|?(?:\w*\Z|tool|function|python)  # a tag
    | \[(?:T?O?O?L?\Z|TOOL|\s*(?:\{|\Z))  # [TOOL_CALLS], or a list of objects
    | `{1,2}\Z|```\w*\s*(?:\{|\Z)        # a fence around an object
    | \{\s*(?:"|\Z)                       # an object
    """,
    re.VERBOSE,
)
_PROBE_NAME, _PROBE_ARGUMENTS = "probe_the_lease", {"clause": "alpha"}
_PROBE = {
    "type": "function",
    "function": {
        "name": _PROBE_NAME,
        "description": "Reads a clause.",
        "parameters": {
            "type": "object",
            "properties": {"clause": {"type": "string", "description": "Its number."}},
            "required": ["clause"],
        },
    },
}


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote.

    Attributes:
        name: Of the tool.
        arguments: By name.
        start: Where the call begins in the text.
    """

    name: str
    arguments: dict[str, Any]
    start: int = 0


@dataclass(frozen=True)
class ToolFormat:
    """What is known of a template that supports tools.

    Attributes:
        opening: What an answer that is a call begins with, up to the arguments, with the probe's name in it; empty
            where the template doesn't show it.
    """

    opening: str

    @classmethod
    def of(cls, prompts: PromptEncoder) -> ToolFormat | None:
        """The format of a model; ``None`` when its template doesn't print tools, or prints calls that can't be read.

        Args:
            prompts: Renders the template.
        """
        if not prompts.has_chat_template:
            return None
        question = {"role": "user", "content": "?"}
        call = {"id": "probe1234", "type": "function"}
        call["function"] = {"name": _PROBE_NAME, "arguments": _PROBE_ARGUMENTS}  # type: ignore[assignment]
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            asked = prompts.render(RagPrompt.from_messages([question], tools=[_PROBE]))
            answered = prompts.render(RagPrompt.from_messages([question, answer], tools=[_PROBE]))
        except (ValueError, TypeError, KeyError):  # a template that can't print a call
            return None
        differs = (index for index, pair in enumerate(zip(asked, answered, strict=False)) if pair[0] != pair[1])
        written = answered[next(differs, len(asked)) :]
        calls = find_calls(written, [_PROBE_NAME])
        if _PROBE_NAME not in asked or [found.arguments for found in calls] != [_PROBE_ARGUMENTS]:
            return None
        opening = written[: max(0, written.rfind("{", 0, written.find('"clause"')))].rstrip()
        return cls(opening if answered.startswith(asked) and _PROBE_NAME in opening else "")

    def opening_of(self, names: Collection[str]) -> str:
        """What makes an answer a call of one of some tools: up to the arguments of one, or up to the name of many."""
        before, _, after = self.opening.partition(_PROBE_NAME)
        if len(names) > 1:
            return before
        [name] = names
        return f"{before}{name}{after}" if after else ""


def find_calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """Calls of some tools in a text, whatever stands around them.

    Args:
        text: The answer of a model.
        names: Tools that there are; JSON that names no tool is text.
    """
    calls: list[ToolCall] = []
    cursor = 0
    while (start := text.find("{", cursor)) >= 0:
        cursor = start + 1
        decoded = decode_object(text, start)
        call = None if decoded is None else _as_call(decoded[0], names, start)
        if decoded is not None and call is not None:
            calls.append(call)
            cursor = decoded[1]
    return calls


def decode_object(text: str, start: int) -> tuple[dict[str, Any], int] | None:
    """The JSON object that begins at a place, and where it ends; ``None`` when none does."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return (value, end) if isinstance(value, dict) else None


def text_before(text: str, start: int) -> str:
    """What a model said before a call that begins at ``start``."""
    return _MARKUP_BEFORE.sub("", text[:start])


def settled(text: str) -> str:
    """The part of an unfinished answer that is text, whatever follows; without white space at its end."""
    match = _MAY_BEGIN.search(text)
    return (text if match is None else text[: match.start()]).rstrip()


def _as_call(value: dict[str, Any], names: Collection[str], start: int) -> ToolCall | None:
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    name = inner.get("name")
    if not isinstance(name, str) or name not in names:
        return None
    arguments = inner.get("arguments", inner.get("parameters", {}))
    if isinstance(arguments, str):
        decoded = decode_object(arguments.strip(), 0)
        arguments = None if decoded is None else decoded[0]
    return ToolCall(name, arguments, start) if isinstance(arguments, dict) else None
