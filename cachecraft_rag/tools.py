"""The tools that a call offers to a model: what its chat template shows of them, and how a demanded call is begun."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from cachecraft_rag.chat_template import prints_calls
from cachecraft_rag.prompt import PromptEncoder, RagPrompt
from cachecraft_rag.tool_calls import ToolCall, ToolCallReader

Tool = Mapping[str, Any]
"""A tool in OpenAI's form: its ``function`` holds ``name``, ``description`` and ``parameters``, a JSON schema."""

_ANY = ("any", "required", True)
_FREE = (None, "auto", False)
_PROBE = ToolCall("probe_the_lease", {"clause": "alpha"}, "probe1234")
_PROBE_AFTER = ToolCall("probe_the_lease", {"clause": "omega"}, "probe5678")
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE.name,
        "description": "Reads a clause.",
        "parameters": {
            "type": "object",
            "properties": {"clause": {"type": "string", "description": "Its number."}},
            "required": ["clause"],
        },
    },
}
_PROBE_TEXT = "probe of the end"


@dataclass(frozen=True)
class CallFormat:
    """What a chat template makes of tools and of their calls.

    Attributes:
        shows_tools: Whether the model is told of tools at all.
        shows_calls: Whether calls in earlier messages are printed, in a form that is read here.
        opening: What an answer begins with that is a call, up to the arguments, with a probe's name in it.
        several_calls: Whether one message may hold several calls. Llama's templates refuse the chat then.
    """

    shows_tools: bool = False
    shows_calls: bool = False
    opening: str = ""
    several_calls: bool = True

    @classmethod
    def of(cls, prompts: PromptEncoder) -> CallFormat:
        """The format of a model, found by rendering a chat with a call; kept until its template changes.

        Args:
            prompts: Renders the template.
        """
        template = prompts.tokenizer.chat_template
        with _formats_lock:
            known = _formats.get(prompts)
        if known is None or known[0] != template:
            known = template, cls._probed(prompts)
            with _formats_lock:
                _formats[prompts] = known
        return known[1]

    @classmethod
    def _probed(cls, prompts: PromptEncoder) -> CallFormat:
        if not prompts.has_chat_template:
            return cls()
        asked = _rendered(prompts)
        if asked is None or _PROBE.name not in asked:
            return cls()
        opening = _opening_as_told(asked)
        said = _rendered(prompts, {"content": _PROBE_TEXT})
        called = _rendered(prompts, {"content": "", "tool_calls": [_in_message(_PROBE)]})
        both = _rendered(prompts, {"content": "", "tool_calls": [_in_message(_PROBE), _in_message(_PROBE_AFTER)]})
        several = both is not None and str(_PROBE_AFTER.arguments["clause"]) in both
        if said is None or called is None or not prints_calls(prompts.tokenizer, has_tools=True):
            return cls(True, False, opening, several)
        differs = (index for index, pair in enumerate(zip(asked, called, strict=False)) if pair[0] != pair[1])
        written = called[next(differs, len(asked)) :].removesuffix(said.partition(_PROBE_TEXT)[2])
        reader = ToolCallReader([_PROBE.name])
        reader.take(written)
        if reader.finish().calls != (_PROBE,):
            return cls(True, False, opening, several)
        shown = written[: max(0, written.rfind("{", 0, written.find('"clause"')))].rstrip()
        return cls(True, True, shown if called.startswith(asked) and _PROBE.name in shown else opening, several)

    def opening_of(self, names: Sequence[str]) -> str:
        """What makes an answer a call of one of some tools: up to the arguments of one, or up to the name of many."""
        before, _, after = self.opening.partition(_PROBE.name)
        return f"{before}{names[0]}{after}" if len(names) == 1 else before


_formats: WeakKeyDictionary[PromptEncoder, tuple[Any, CallFormat]] = WeakKeyDictionary()
_formats_lock = threading.Lock()


@dataclass(frozen=True)
class OfferedTools:
    """The tools of one call.

    Attributes:
        tools: Those that the model is shown.
        opening: What its answer begins with where a tool must be called; the model continues it.
        several_calls: Whether its answer may hold several calls; if not, the first is read.
    """

    tools: tuple[Tool, ...]
    opening: str = ""
    several_calls: bool = True

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: object, prompts: PromptEncoder) -> OfferedTools | None:
        """What a call asks for; ``None`` without tools.

        Args:
            tools: Those that there are.
            choice: ``"auto"`` or nothing leaves it to the model, ``"none"`` shows no tool, ``"any"`` or
                ``"required"`` demands a call, and the name of a tool a call of that one. OpenAI's nested form is
                understood.
            prompts: Renders the model's template.

        Raises:
            ValueError: There is no such tool, or one has no name.
        """
        names = [name_of(tool) for tool in tools]
        choice = normalized_choice(choice, names)
        if not tools or choice == "none":
            return None
        form = CallFormat.of(prompts)
        if choice == "auto":
            return cls(tuple(tools), several_calls=form.several_calls)
        shown = tuple(tool for tool in tools if choice in ("any", name_of(tool)))
        return cls(shown, form.opening_of([name_of(tool) for tool in shown]), form.several_calls)

    @property
    def names(self) -> list[str]:
        """Names of the tools that the model is shown."""
        return [name_of(tool) for tool in self.tools]

    def put_into(self, prompt: RagPrompt) -> RagPrompt:
        """A prompt of messages with these tools in it, and with the beginning of the answer behind it."""
        return replace(prompt, tools=self.tools, answer_start=self.opening)

    def reader(self) -> ToolCallReader:
        """Tells text from calls in the answer."""
        return ToolCallReader(self.names, self.opening, self.several_calls)


def name_of(tool: Tool) -> str:
    """Name of a tool in OpenAI's form.

    Raises:
        ValueError: It has none, as tools that a provider runs itself.
    """
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"tools: {dict(tool)!r} has no function with a name; a local model calls functions only")
    return name


def normalized_choice(choice: object, names: Sequence[str]) -> str:
    """A choice of tools as ``"auto"``, ``"none"``, ``"any"`` or the name of one.

    Raises:
        ValueError: There is no such tool.
    """
    given = choice
    if isinstance(given, Mapping):
        function = given.get("function")
        given = function.get("name") if isinstance(function, Mapping) else given.get("name", given.get("type"))
    if isinstance(given, str) and given in names:
        return given
    if given in _FREE or given == "none":
        return "none" if given == "none" else "auto"
    if given in _ANY and names:
        return "any"
    raise ValueError(f"tool_choice: {choice!r} is not allowed; give 'auto', 'none', 'any' or one of {list(names)}")


def _rendered(prompts: PromptEncoder, answer: Mapping[str, Any] | None = None) -> str | None:
    """A question, perhaps with its answer, beside the probe's tool; ``None`` where the template can't print it."""
    messages = [{"role": "user", "content": "?"}, *([] if answer is None else [{"role": "assistant", **answer}])]
    try:
        return prompts.render(RagPrompt.from_messages(messages, tools=[_PROBE_TOOL]))
    except (ValueError, TypeError, KeyError):  # a template of another kind
        return None


def _in_message(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _opening_as_told(asked: str) -> str:
    """The beginning of a call in the form that a prompt asks for in words."""
    key = "parameters" if '"parameters": dictionary' in asked else "arguments"
    call = f'{{"name": "{_PROBE.name}", "{key}":'
    return f"<tool_call>\n{call}" if "<tool_call>" in asked else call
