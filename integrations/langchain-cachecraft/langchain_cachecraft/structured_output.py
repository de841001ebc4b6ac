"""Answers as objects: the parsers behind ``with_structured_output``, which never take half an answer for a whole."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal, TypeGuard, cast

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.output_parsers.transform import BaseCumulativeTransformOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import TBaseModel, is_basemodel_subclass

Schema = dict[str, Any] | type
Method = Literal["json_schema", "json_mode", "function_calling"]
METHODS: tuple[Method, ...] = ("json_schema", "json_mode", "function_calling")

# What LangChain's converters take for a function's description, by the key that holds its schema.
_DESCRIPTIONS = {"function", "parameters", "input_schema", "toolSpec"}
_SCHEMA_KEYS = {"type", "anyOf", "oneOf", "allOf", "$ref", "enum", "properties"}
# A Markdown block, perhaps behind some words, but not inside of an object that was cut off.
_FENCE = re.compile(r"[^{\[]*?```\w*\s*")
# Models break lines inside strings; only that is forgiven.
_DECODER = json.JSONDecoder(strict=False)


class _CheckedAtTheEnd(BaseCumulativeTransformOutputParser[Any]):
    """Gives out what can be read of an answer so far, and at the end what ``invoke`` makes of the whole, or its error.

    LangChain's own parsers complete what was cut off and look no more at the end.
    """

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:
        whole: Any = None
        last: Any = None
        for piece in input:
            whole = piece if whole is None else whole + piece
            parsed = self.parse_result([_generation(whole)], partial=True)
            if parsed is not None and parsed != last:
                last = parsed
                yield parsed
        if whole is not None and (parsed := self.parse_result([_generation(whole)])) != last:
            yield parsed

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:
        whole: Any = None
        last: Any = None
        async for piece in input:
            whole = piece if whole is None else whole + piece
            parsed = await self.aparse_result([_generation(whole)], partial=True)
            if parsed is not None and parsed != last:
                last = parsed
                yield parsed
        if whole is not None and (parsed := await self.aparse_result([_generation(whole)])) != last:
            yield parsed


class _WholeJson(_CheckedAtTheEnd, JsonOutputParser):
    """JSON of an answer that the model brought to its end."""

    wants_object: bool

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if partial:
            return super().parse_result(result, partial=True)
        value = _whole_value(result)
        if self.wants_object and not isinstance(value, dict):
            raise _no_answer(result, "wrote JSON that is no object")
        return value


class _WholePydantic(_CheckedAtTheEnd, PydanticOutputParser[TBaseModel]):
    """A Pydantic object of an answer that the model brought to its end."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if partial:
            return super().parse_result(result, partial=True)
        return super().parse_result([Generation(text=json.dumps(_whole_value(result), ensure_ascii=False))])


class _CalledJson(_CheckedAtTheEnd, JsonOutputKeyToolsParser):
    """The arguments of the call that was demanded."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return _check_called(super().parse_result(result, partial=partial), self.key_name, result, partial)


class _CalledPydantic(_CheckedAtTheEnd, PydanticToolsParser):
    """The arguments of the call that was demanded, as a Pydantic object."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        name = self.tools[0].__name__
        try:
            parsed = super().parse_result(result, partial=partial)
        except ValueError as error:  # Pydantic's, and LangChain's for a tool of another name
            message = _message(result)
            called = json.dumps([*message.tool_calls] if message is not None else [], ensure_ascii=False)
            raise OutputParserException(
                f"{_model(message)} called {name} in a way that it can't be: {called}. Got: {error}", llm_output=called
            ) from error
        return _check_called(parsed, name, result, partial)


def bound_to(schema: Schema, method: Method) -> dict[str, Any]:
    """Options of a call that demands an answer of a schema, but for tools.

    Args:
        schema: A JSON schema, a ``TypedDict``, a function in OpenAI's form, or a Pydantic class.
        method: How the model is asked.

    Raises:
        ValueError: Arguments of a tool can't follow the schema, since they are always an object.
    """
    described = {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema}}
    if method == "function_calling":
        if not _wants_object(schema):
            raise ValueError(f"schema: {schema!r} is no object, as arguments of a tool are; give method='json_schema'")
        return described
    if method == "json_mode":
        return {"response_format": {"type": "json_object"}, **described}
    told = schema if _is_json_schema(schema) else convert_to_json_schema(schema)
    json_schema = {"name": told.get("title", "answer"), "schema": told}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}, **described}


def name_of(schema: Schema) -> str:
    """The name of a schema, as a tool."""
    name: str = convert_to_openai_tool(schema)["function"]["name"]
    return name


def structured(
    llm: Runnable[LanguageModelInput, AIMessage], schema: Schema, method: Method, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """A model whose answers are parsed.

    Args:
        llm: Asked by ``method``.
        schema: What is parsed; only a Pydantic class is checked for its fields and types.
        method: How the model was asked.
        include_raw: Whether to give message, object and error side by side, instead of raising the error.
    """
    parser = _parser(schema, method)
    if not include_raw:
        return llm | parser

    def beside(raw: AIMessage, config: RunnableConfig) -> dict[str, Any]:
        try:
            return {"raw": raw, "parsed": parser.invoke(raw, config), "parsing_error": None}
        except Exception as error:  # a validator of the schema may raise anything; the caller asked for it as a value
            return {"raw": raw, "parsed": None, "parsing_error": error}

    return llm | RunnableLambda(beside)


def _parser(schema: Schema, method: Method) -> BaseOutputParser[Any]:
    is_pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method == "function_calling":
        if is_pydantic:
            return _CalledPydantic(tools=[cast("Any", schema)], first_tool_only=True)
        return _CalledJson(key_name=name_of(schema), first_tool_only=True)
    if is_pydantic:
        return _WholePydantic(pydantic_object=cast("Any", schema))
    return _WholeJson(wants_object=_wants_object(schema))


def _is_json_schema(schema: Schema) -> TypeGuard[dict[str, Any]]:
    """Whether a schema is used as it is; LangChain's conversion keeps nothing of one without ``properties``."""
    return isinstance(schema, dict) and not _DESCRIPTIONS & set(schema) and bool(_SCHEMA_KEYS & set(schema))


def _wants_object(schema: Schema) -> bool:
    """Whether every value that follows a schema is an object."""
    if _is_json_schema(schema):
        return schema.get("type") == "object" or "properties" in schema
    parameters = convert_to_openai_tool(schema)["function"].get("parameters", {})
    return bool(parameters.get("type", "object") == "object")


def _whole_value(result: list[Generation]) -> Any:
    """The first JSON value of an answer, which is never completed: a reader would not know. What follows is ignored.

    Raises:
        OutputParserException: The answer was cut off, or there is none.
    """
    message, text = _message(result), result[0].text.strip()
    if message is not None and message.response_metadata.get("finish_reason") == "length":
        raise _no_answer(result, "was cut off before its JSON was complete; raise max_tokens. It wrote")
    fence = _FENCE.match(text)
    for start in (0, *([] if fence is None else [fence.end()])):
        try:
            return _DECODER.raw_decode(text, start)[0]
        except (json.JSONDecodeError, RecursionError):
            continue  # the value may stand in the Markdown block; at last the error below says what was written
    raise _no_answer(result, "did not write the JSON that was asked for, but")


def _no_answer(result: list[Generation], what: str) -> OutputParserException:
    text = result[0].text
    return OutputParserException(f"{_model(_message(result))} {what}: {text}", llm_output=text)


def _check_called(parsed: Any, name: str, result: list[Generation], partial: bool) -> Any:
    """Refuse an answer without the call that was demanded."""
    message = _message(result)
    if parsed is None and not partial and message is not None:
        reasons = "".join(f" ({call['error']}: {call['args']})" for call in message.invalid_tool_calls)
        raise OutputParserException(
            f"{_model(message)} did not call {name}{reasons}; it wrote: {message.text}",
            llm_output=message.text + "".join(call["args"] or "" for call in message.invalid_tool_calls),
        )
    return parsed


def _generation(said: str | BaseMessage) -> Generation:
    return Generation(text=said) if isinstance(said, str) else ChatGeneration(message=said)


def _message(result: list[Generation]) -> AIMessage | None:
    message = result[0].message if isinstance(result[0], ChatGeneration) else None
    return message if isinstance(message, AIMessage) else None


def _model(message: AIMessage | None) -> str:
    return "the model" if message is None else f"the model {message.response_metadata.get('model_name')!r}"
