"""Tools and structured output, on a model that calls tools and writes JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from langchain_cachecraft import ChatCacheCraft
from tests.conftest import passage
from tests.jokes import Joke, JokeDict

QUESTION = "When does the lease end?"
CALL = ("search", {"query": "lease"})


@tool
def search(query: str) -> str:
    """Search the contracts."""
    return f"Found: {query}"


@tool
def get_weather(location: str) -> str:
    """Get the weather."""
    return location


class Unwritten(BaseModel):
    """What the model does not write."""

    setup: int
    rating: int


@pytest.fixture
def chat(scripted_folder: str) -> Iterator[ChatCacheCraft]:
    chat = ChatCacheCraft(model=scripted_folder, max_tokens=12)
    yield chat
    chat.close()


def joined(chunks: list[Any]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert isinstance(whole, AIMessageChunk)
    return whole


def calls(message: AIMessage) -> list[Any]:
    return [(call["name"], call["args"]) for call in message.tool_calls]


@pytest.mark.parametrize("tool_choice", [None, "auto", "any", "required", "search", True])
async def test_a_call_comes_out_in_every_way_of_asking(chat: ChatCacheCraft, tool_choice: Any) -> None:
    bound = chat.bind_tools([search], tool_choice=tool_choice)
    messages = [
        bound.invoke(QUESTION),
        joined(list(bound.stream(QUESTION))),
        await bound.ainvoke(QUESTION),
        joined([chunk async for chunk in bound.astream(QUESTION)]),
        *bound.batch([QUESTION, QUESTION]),
    ]
    for message in messages:
        assert calls(message) == [CALL]
        assert message.text == ""
        assert message.response_metadata["finish_reason"] == "stop"
        assert message.usage_metadata is not None


def test_a_named_tool_is_the_only_one_that_is_offered(chat: ChatCacheCraft) -> None:
    bound = chat.bind_tools(
        [search, get_weather], tool_choice={"type": "function", "function": {"name": "get_weather"}}
    )
    assert calls(bound.invoke(QUESTION)) == [("get_weather", {"location": "San Francisco, CA"})]


def test_none_offers_no_tool(chat: ChatCacheCraft) -> None:
    message = chat.bind_tools([search], tool_choice="none").invoke(QUESTION)
    assert (message.tool_calls, message.text) == ([], "It ends on the 9th of May.")


def test_a_tool_that_is_not_there_can_not_be_chosen(chat: ChatCacheCraft) -> None:
    with pytest.raises(ValueError, match=r"tool_choice: 'find' is not allowed; .* \['search'\]"):
        chat.bind_tools([search], tool_choice="find")
    with pytest.raises(ValueError, match="tool_choice: 'any'"):
        chat.bind_tools([], tool_choice="any")


def test_a_tool_that_a_provider_would_run_is_refused_by_name(chat: ChatCacheCraft) -> None:
    with pytest.raises(ValueError, match=r"tools: \{'type': 'web_search'\} has no function with a name"):
        chat.bind_tools([{"type": "web_search"}])


@pytest.mark.parametrize("tool_choice", [None, "search"])
def test_chunks_are_reused_beside_tools(chat: ChatCacheCraft, tool_choice: str | None) -> None:
    engine = chat.get_engine()
    engine.invalidate([passage(51)])
    engine.warm([passage(51)])
    bound = chat.bind_tools([search], tool_choice=tool_choice)
    message = bound.invoke(f"{passage(51)}\n\n{QUESTION}")
    assert message.response_metadata["cachecraft"]["chunk_hits"] == 1
    assert calls(message) == [CALL]


def test_the_prompt_of_a_demanded_call_is_the_chat_and_the_beginning_of_the_call(chat: ChatCacheCraft) -> None:
    free, demanded = (chat.bind_tools([search], tool_choice=choice).invoke(QUESTION) for choice in (None, "search"))
    # The scripted tokenizer has one token for the beginning of this call, behind the cue of the template.
    lengths = [message.usage_metadata["input_tokens"] for message in (free, demanded) if message.usage_metadata]
    assert lengths[1] == lengths[0] + 1


def test_a_template_without_tools_is_an_error_that_names_the_model(model_folder: str) -> None:
    chat = ChatCacheCraft(model=model_folder, max_tokens=2)
    tokenizer = chat.get_engine().tokenizer
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match=f"tools: the chat template of '{model_folder}' has no place for tools"):
        chat.bind_tools([search]).invoke(QUESTION)
    chat.close()


def test_results_of_tools_are_answered_in_text(chat: ChatCacheCraft) -> None:
    bound = chat.bind_tools([search])
    asked = bound.invoke(QUESTION)
    answer = bound.invoke([HumanMessage(QUESTION), asked, search.invoke(asked.tool_calls[0])])
    assert (answer.tool_calls, answer.text) == ([], "It ends on the 9th of May.")


@pytest.mark.parametrize("tool_choice", [None, "any"])
def test_a_call_that_is_cut_off_is_invalid_in_a_stream_too(chat: ChatCacheCraft, tool_choice: str | None) -> None:
    bound = chat.bind_tools([search], tool_choice=tool_choice, max_tokens=1)
    for message in (bound.invoke(QUESTION), joined(list(bound.stream(QUESTION)))):
        assert message.tool_calls == []
        assert len(message.invalid_tool_calls) == 1


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
@pytest.mark.parametrize("schema", [Joke, JokeDict, Joke.model_json_schema()], ids=["pydantic", "dict", "json"])
async def test_objects_come_out_by_every_method(chat: ChatCacheCraft, method: Any, schema: Any) -> None:
    structured = chat.with_structured_output(schema, method=method)
    question = "Tell a joke with setup and punchline as JSON."
    expected: Any = {"setup": "Why?", "punchline": "Because."}
    expected = Joke(**expected) if schema is Joke else expected
    assert structured.invoke(question) == expected
    assert await structured.ainvoke(question) == expected
    assert list(structured.stream(question))[-1] == expected
    assert structured.batch([question] * 2) == [expected] * 2


def test_the_schema_is_written_behind_the_question(chat: ChatCacheCraft) -> None:
    bare = chat.invoke(QUESTION)
    raw = chat.with_structured_output(Joke, include_raw=True).invoke(QUESTION)["raw"]
    assert raw.usage_metadata["input_tokens"] > bare.usage_metadata["input_tokens"] + 20  # type: ignore[index]
    after_a_tool = [HumanMessage(QUESTION), AIMessage("", tool_calls=[]), ToolMessage("9 May", tool_call_id="1")]
    assert chat.with_structured_output(Joke).invoke(after_a_tool) == Joke(setup="Why?", punchline="Because.")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_that_is_cut_off_is_an_error(chat: ChatCacheCraft, method: Any) -> None:
    structured = chat.with_structured_output(Joke, method=method, max_tokens=1)
    with pytest.raises(OutputParserException, match=r"the model '.*' (was cut off|did not call Joke)"):
        structured.invoke(QUESTION)


def test_an_answer_of_another_form_is_an_error(chat: ChatCacheCraft) -> None:
    with pytest.raises(OutputParserException, match="Failed to parse Unwritten from completion"):
        chat.with_structured_output(Unwritten).invoke(QUESTION)
    with pytest.raises(OutputParserException, match=r"the model '.*' did not write the JSON .*: It ends"):
        chat.with_structured_output(Unwritten, method="json_mode").invoke(QUESTION)


def test_with_the_raw_message_an_error_is_a_value(chat: ChatCacheCraft) -> None:
    both = chat.with_structured_output(Unwritten, include_raw=True).invoke(QUESTION)
    assert isinstance(both["raw"], AIMessage)
    assert both["parsed"] is None
    assert isinstance(both["parsing_error"], OutputParserException)
    both = chat.with_structured_output(Joke, include_raw=True).invoke(QUESTION)
    assert (both["parsed"], both["parsing_error"]) == (Joke(setup="Why?", punchline="Because."), None)


def test_bad_arguments_are_refused_by_name(chat: ChatCacheCraft) -> None:
    method: Any = "xml"
    with pytest.raises(ValueError, match="method: 'xml' is not allowed; give one of 'json_schema'"):
        chat.with_structured_output(Joke, method=method)
    with pytest.raises(ValueError, match="response_format: 'json' is not allowed"):
        chat.invoke(QUESTION, response_format="json")
