"""Answers as objects: the parsers behind ``with_structured_output``, which never take half an answer for a whole."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Literal, cast

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import TBaseModel, is_basemodel_subclass

Schema = dict[str, Any] | type
Method = Literal["json_schema", "json_mode", "function_calling"]
METHODS: tuple[Method, ...] = ("json_schema", "json_mode", "function_calling")


class _WholeJson(JsonOutputParser):
    """JSON of an answer that the model brought to its end."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_whole(result, partial)
        return super().parse_result(result, partial=partial)


class _WholePydantic(PydanticOutputParser[TBaseModel]):
    """A Pydantic object of an answer that the model brought to its end."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_whole(result, partial)
        return super().parse_result(result, partial=partial)


class _CalledJson(JsonOutputKeyToolsParser):
    """The arguments of the call that was demanded."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return _check_called(super().parse_result(result, partial=partial), self.key_name, result, partial)


class _CalledPydantic(PydanticToolsParser):
    """The arguments of the call that was demanded, as a Pydantic object."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return _check_called(super().parse_result(result, partial=partial), self.tools[0].__name__, result, partial)


def bound_to(schema: Schema, method: Method) -> dict[str, Any]:
    """Options of a call that demands an answer of a schema, but for tools.

    Args:
        schema: A JSON schema, a ``TypedDict``, a function in OpenAI's form, or a Pydantic class.
        method: How the model is asked.
    """
    described = {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema}}
    if method == "function_calling":
        return described
    if method == "json_mode":
        return {"response_format": {"type": "json_object"}, **described}
    json_schema = {"name": name_of(schema), "schema": convert_to_json_schema(schema)}
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
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    both = RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
    return cast("Runnable[LanguageModelInput, Any]", both)


def _parser(schema: Schema, method: Method) -> BaseOutputParser[Any]:
    is_pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method == "function_calling":
        if is_pydantic:
            return _CalledPydantic(tools=[cast("Any", schema)], first_tool_only=True)
        return _CalledJson(key_name=name_of(schema), first_tool_only=True)
    return _WholePydantic(pydantic_object=cast("Any", schema)) if is_pydantic else _WholeJson()


def _check_whole(result: list[Generation], partial: bool) -> None:
    """Refuse JSON that was cut off: the parsers close what is open, and the reader would never know."""
    message = _message(result)
    if not partial and message is not None and message.response_metadata.get("finish_reason") == "length":
        raise OutputParserException(
            f"{_model(message)} was cut off before its JSON was complete; raise max_tokens. It wrote: {message.text}",
            llm_output=message.text,
        )


def _check_called(parsed: Any, name: str, result: list[Generation], partial: bool) -> Any:
    """Refuse an answer without the call that was demanded."""
    message = _message(result)
    if parsed is None and not partial and message is not None:
        reasons = "".join(f" ({call['error']}: {call['args']})" for call in message.invalid_tool_calls)
        raise OutputParserException(
            f"{_model(message)} did not call {name}{reasons}; it wrote: {message.text}", llm_output=message.text
        )
    return parsed


def _message(result: list[Generation]) -> AIMessage | None:
    message = result[0].message if isinstance(result[0], ChatGeneration) else None
    return message if isinstance(message, AIMessage) else None


def _model(message: AIMessage) -> str:
    return f"the model {message.response_metadata.get('model_name')!r}"
