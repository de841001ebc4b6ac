"""Answers as objects: what is taken for one, what is an error, in every way of asking."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessageChunk
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.runnables import Runnable, RunnableGenerator
from pydantic import BaseModel, RootModel, field_validator

from langchain_cachecraft.structured_output import Method, Schema, bound_to, structured
from tests.jokes import Joke, JokeDict


class Numbers(RootModel[list[int]]):
    """Some numbers."""


class Unkeyed(BaseModel):
    """One whose validator fails in a way of its own."""

    setup: str

    @field_validator("setup")
    @classmethod
    def _fail(cls, value: str) -> str:
        raise KeyError(value)


WHOLE = '{"setup": "a", "punchline": "b"}'
VALUE: dict[str, Any] = {"setup": "a", "punchline": "b"}
LIST: dict[str, Any] = {"title": "L", "type": "array", "items": {"type": "integer"}}
EITHER: dict[str, Any] = {"title": "E", "anyOf": [{"type": "integer"}, {"type": "object"}]}
WAYS = ("invoke", "ainvoke", "stream", "astream")
every_way = pytest.mark.parametrize("way", WAYS)


def saying(text: str, finish_reason: str = "stop", calls: Any = ()) -> Runnable[Any, Any]:
    """A model that says a text letter by letter, and at the end calls tools."""
    end = AIMessageChunk(
        "",
        chunk_position="last",
        tool_call_chunks=[tool_call_chunk(name=name, args=args, id="1", index=0) for name, args in calls],
        response_metadata={"finish_reason": finish_reason, "model_name": "tiny"},
    )
    pieces = [*map(AIMessageChunk, text), end]

    def say(_: Iterator[Any]) -> Iterator[Any]:
        yield from pieces

    async def asay(_: AsyncIterator[Any]) -> AsyncIterator[Any]:
        for piece in pieces:
            yield piece

    return RunnableGenerator(say, asay)


async def last_of(way: str, chain: Runnable[Any, Any]) -> Any:
    if way == "invoke":
        return chain.invoke("q")
    if way == "ainvoke":
        return await chain.ainvoke("q")
    return (list(chain.stream("q")) if way == "stream" else [item async for item in chain.astream("q")])[-1]


@every_way
@pytest.mark.parametrize(
    "text",
    [
        WHOLE,
        f"{WHOLE}}}",
        f"```json\n{WHOLE}\n```",
        f"Here it is:\n\n```\n{WHOLE}\n``` I hope so.",
        f"{WHOLE}\n\nIt is a joke {{of mine}}.",
        f"\n {WHOLE}{WHOLE}",
    ],
)
@pytest.mark.parametrize("schema", [Joke, JokeDict, Joke.model_json_schema()], ids=["pydantic", "dict", "json"])
async def test_the_first_value_is_the_answer_whatever_follows(way: str, text: str, schema: Schema) -> None:
    found = await last_of(way, structured(saying(text), schema, "json_mode", include_raw=False))
    assert found == (Joke(**VALUE) if schema is Joke else VALUE)


@every_way
@pytest.mark.parametrize(
    "text",
    [
        '{"setup": nonsense',
        '{"setup": "a", "punchl',
        '{"setup": "a ```json {}',
        '```json\n{"setup": "a",',
        "null",
        "[1]",
        "It ends in May.",
        "",
    ],
)
@pytest.mark.parametrize("schema", [Joke, JokeDict], ids=["pydantic", "dict"])
async def test_what_is_no_whole_object_is_an_error_and_never_half_of_one(way: str, text: str, schema: Schema) -> None:
    with pytest.raises(OutputParserException) as raised:
        await last_of(way, structured(saying(text), schema, "json_schema", include_raw=False))
    assert raised.value.llm_output is not None
    if schema is not Joke:
        assert "the model 'tiny'" in str(raised.value)
        assert text in str(raised.value)


@every_way
async def test_an_answer_that_was_cut_off_is_an_error_even_when_it_looks_whole(way: str) -> None:
    with pytest.raises(OutputParserException, match=r"the model 'tiny' was cut off .* raise max_tokens"):
        await last_of(way, structured(saying(WHOLE, "length"), JokeDict, "json_schema", include_raw=False))


def test_a_stream_gives_out_what_there_is_before_its_error() -> None:
    items = structured(saying('{"setup": "a", "punchl'), JokeDict, "json_schema", include_raw=False).stream("q")
    assert next(items) == {}
    with pytest.raises(OutputParserException):
        list(items)


@every_way
@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
@pytest.mark.parametrize("schema", [Joke, JokeDict], ids=["pydantic", "dict"])
async def test_beside_the_raw_message_an_error_is_a_value_in_every_way(
    way: str, method: Method, schema: Schema
) -> None:
    both = await last_of(way, structured(saying('{"setup": '), schema, method, include_raw=True))
    assert set(both) == {"raw", "parsed", "parsing_error"}
    assert both["raw"].content == '{"setup": '
    assert both["parsed"] is None
    assert isinstance(both["parsing_error"], OutputParserException)


@every_way
async def test_beside_the_raw_message_a_validators_own_error_is_a_value_too(way: str) -> None:
    both = await last_of(way, structured(saying(WHOLE), Unkeyed, "json_schema", include_raw=True))
    assert isinstance(both["parsing_error"], KeyError)


@every_way
async def test_beside_the_raw_message_stands_the_object(way: str) -> None:
    both = await last_of(way, structured(saying(WHOLE), Joke, "json_schema", include_raw=True))
    assert (both["parsed"], both["parsing_error"]) == (Joke(**VALUE), None)


@every_way
@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([("Joke", '{"setup": "a"}')], "punchline"),
        ([("Other", WHOLE)], "Unknown tool type"),
        ([("Joke", "<tool_call>{")], "did not call Joke"),
        ([], "did not call Joke"),
    ],
    ids=["missing", "other", "broken", "none"],
)
async def test_a_call_that_can_not_be_an_object_is_an_error_of_the_parser(way: str, calls: Any, why: str) -> None:
    with pytest.raises(OutputParserException, match=f"(?s)the model 'tiny' .*{why}") as raised:
        await last_of(way, structured(saying("", calls=calls), Joke, "function_calling", include_raw=False))
    assert raised.value.llm_output is not None


@every_way
@pytest.mark.parametrize("schema", [Joke, JokeDict], ids=["pydantic", "dict"])
async def test_arguments_of_the_call_are_the_object(way: str, schema: Any) -> None:
    chain = structured(saying("", calls=[(schema.__name__, WHOLE)]), schema, "function_calling", include_raw=False)
    assert await last_of(way, chain) == schema(**VALUE)


@pytest.mark.parametrize("schema", [LIST, EITHER, {"title": "C", "enum": ["a", "b"]}, {"type": "integer"}])
def test_a_json_schema_is_told_to_the_model_as_it_is(schema: dict[str, Any]) -> None:
    assert bound_to(schema, "json_schema")["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize(
    "description",
    [
        {"type": "function", "function": {"name": "Joke", "parameters": Joke.model_json_schema()}},
        {"name": "Joke", "parameters": Joke.model_json_schema()},
        {"name": "Joke", "input_schema": Joke.model_json_schema()},
    ],
    ids=["openai", "openai, flat", "anthropic"],
)
def test_of_a_functions_description_the_model_is_told_the_parameters(description: dict[str, Any]) -> None:
    told = bound_to(description, "json_schema")["response_format"]["json_schema"]
    assert told["name"] == "Joke"
    assert set(told["schema"]["properties"]) == {"setup", "punchline"}


@every_way
@pytest.mark.parametrize(("schema", "text", "value"), [(LIST, "[1, 2]", [1, 2]), (EITHER, "7", 7)])
async def test_a_schema_of_another_kind_takes_values_of_that_kind(
    way: str, schema: dict[str, Any], text: str, value: Any
) -> None:
    assert await last_of(way, structured(saying(text), schema, "json_schema", include_raw=False)) == value


@pytest.mark.parametrize("schema", [LIST, EITHER, Numbers])
def test_a_tool_can_not_be_called_with_what_is_no_object(schema: Schema) -> None:
    with pytest.raises(ValueError, match=r"schema: .* is no object, .*give method='json_schema'"):
        bound_to(schema, "function_calling")
