"""From a call of the chat model to a prompt of the engine: messages, tools, and the form of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from cachecraft_rag import CacheCraftEngine, RagPrompt
from langchain_cachecraft.messages import chat_messages
from langchain_cachecraft.tool_calls import ToolCallReader

OPTIONS = ("tools", "tool_choice", "response_format")
"""Options of a call that are read here."""

_ANY = ("any", "required", True)
_FREE = (None, "auto", False)
_SCHEMA = "Answer with one JSON value and nothing else. It must follow this JSON schema, which you must not repeat:\n{}"


@dataclass(frozen=True)
class ChatPrompt:
    """What the engine is asked.

    Attributes:
        prompt: Messages, or the rendered text with the beginning of the answer.
        names: Names of the tools that were offered.
        opened: The beginning of the answer, where its form was demanded; part of the prompt.
    """

    prompt: RagPrompt
    names: tuple[str, ...] = ()
    opened: str = ""

    @classmethod
    def of(
        cls, engine: CacheCraftEngine, model: str, messages: Sequence[BaseMessage], given: Mapping[str, Any]
    ) -> ChatPrompt:
        """The prompt of a call.

        Args:
            engine: Renders it.
            model: Name of the model, for errors.
            messages: The chat.
            given: Options of the call, of which ``OPTIONS`` are read.

        Raises:
            ValueError: The chat template has no place for tools, or an option has a value that is not allowed.
        """
        chat = [*chat_messages(messages)]
        schema = _schema(given.get("response_format"))
        if schema is not None:
            chat = _with_instruction(chat, _SCHEMA.format(json.dumps(schema, ensure_ascii=False)))
        tools = [convert_to_openai_tool(tool) for tool in given.get("tools") or ()]
        choice = normalized_choice(given.get("tool_choice"), [name_of(tool) for tool in tools])
        if not tools or choice == "none":
            prompt = RagPrompt.from_messages(chat)
            return cls(prompt)._opened(engine.prompts.render(prompt), _beginning(schema)) if schema else cls(prompt)
        tools = [tool for tool in tools if choice in ("auto", "any", name_of(tool))]
        prompt = RagPrompt.from_messages(chat, tools=tools)
        text = engine.prompts.render(prompt)
        if text == engine.prompts.render(replace(prompt, tools=None)):
            raise ValueError(
                f"tools: the chat template of {model!r} has no place for tools, so the model can't be told of them; "
                "take a model that was trained to call tools, or with_structured_output(method='json_schema')"
            )
        names = tuple(name_of(tool) for tool in tools)
        if choice == "auto":
            return cls(prompt, names)
        return cls(prompt, names)._opened(text, _opening(text, names))

    def _opened(self, text: str, opened: str) -> ChatPrompt:
        return replace(self, prompt=RagPrompt.from_text(text + opened), opened=opened)

    def reader(self) -> ToolCallReader:
        """Tells text from tool calls in the answer."""
        return ToolCallReader(self.names, self.opened)


def name_of(tool: Mapping[str, Any]) -> str:
    """Name of a tool in OpenAI's form."""
    name: str = tool["function"]["name"]
    return name


def normalized_choice(choice: object, names: Sequence[str]) -> str:
    """A choice of tools as ``"auto"``, ``"none"``, ``"any"`` or the name of one.

    Raises:
        ValueError: No such tool is offered.
    """
    if isinstance(choice, Mapping) and isinstance(choice.get("function"), Mapping):
        choice = choice["function"].get("name")
    if choice in names:
        return str(choice)
    if choice in _FREE or choice == "none":
        return "none" if choice == "none" else "auto"
    if choice in _ANY and names:
        return "any"
    raise ValueError(f"tool_choice: {choice!r} is not allowed; give 'auto', 'none', 'any' or one of {list(names)}")


def _opening(text: str, names: Sequence[str]) -> str:
    """The beginning of a tool call in the form that the chat template teaches."""
    key = "parameters" if '"parameters": dictionary' in text else "arguments"
    name = f'{{"name": "{names[0]}", "{key}": {{' if len(names) == 1 else '{"name": "'
    return f"<tool_call>\n{name}" if "<tool_call>" in text else name


def _schema(response_format: object) -> Mapping[str, Any] | None:
    """The JSON schema that is demanded of the answer.

    Raises:
        ValueError: It is of no known form.
    """
    if isinstance(response_format, Mapping):
        if response_format.get("type") in ("text", "json_object"):
            return None
        described = response_format.get("json_schema")
        if response_format.get("type") == "json_schema" and isinstance(described, Mapping) and "schema" in described:
            schema: Mapping[str, Any] = described["schema"]
            return schema
    elif response_format is None:
        return None
    raise ValueError(
        f"response_format: {response_format!r} is not allowed; give {{'type': 'json_object'}} or "
        "{'type': 'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}"
    )


def _beginning(schema: Mapping[str, Any]) -> str:
    """The beginning of an object that follows a schema: small models rather repeat the schema than fill it in."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return "{" if schema.get("type") == "object" else ""
    first = next((name for name in properties if name in schema.get("required", ())), None)
    return "{" if first is None else f"{{{json.dumps(first, ensure_ascii=False)}: "


def _with_instruction(chat: list[dict[str, Any]], instruction: str) -> list[dict[str, Any]]:
    """Messages with an instruction at the end, behind all chunks: in the user's last message, or in one of its own."""
    if chat and chat[-1]["role"] == "user":
        return [*chat[:-1], {**chat[-1], "content": f"{chat[-1]['content']}\n\n{instruction}"}]
    return [*chat, {"role": "user", "content": instruction}]
