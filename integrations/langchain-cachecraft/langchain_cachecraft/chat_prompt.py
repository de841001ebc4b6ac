"""From a call of the chat model to a prompt of the engine: messages, tools, and the form of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from cachecraft_rag import CacheCraftEngine, RagPrompt
from cachecraft_rag.tool_calls import ToolCallReader
from cachecraft_rag.tools import CallFormat, OfferedTools
from langchain_cachecraft.messages import chat_messages

OPTIONS = ("tools", "tool_choice", "response_format")
"""Options of a call that are read here."""

_SCHEMA = "Answer with one JSON value and nothing else. It must follow this JSON schema, which you must not repeat:\n{}"


@dataclass(frozen=True)
class ChatPrompt:
    """What the engine is asked.

    Attributes:
        prompt: The messages, with what the answer begins with.
        tools: The tools that are offered.
        opened: The beginning of an answer in JSON, where it was demanded; part of the prompt.
    """

    prompt: RagPrompt
    tools: OfferedTools | None = None
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
        offered = OfferedTools.of(tools, given.get("tool_choice"), engine.prompts)
        opening = "" if schema is None or offered is not None else _beginning(schema)
        prompt = RagPrompt.from_messages(chat, answer_start=opening)
        if offered is not None:
            if not CallFormat.of(engine.prompts).shows_tools:
                raise ValueError(
                    f"tools: the chat template of {model!r} has no place for tools, so it can't be told of them; "
                    "take a model that was trained to call tools, or with_structured_output(method='json_schema')"
                )
            return cls(offered.put_into(prompt), offered)
        return cls(prompt, None, opening)

    def reader(self) -> ToolCallReader:
        """Tells text from tool calls in the answer."""
        return ToolCallReader(opened=self.opened) if self.tools is None else self.tools.reader()


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
