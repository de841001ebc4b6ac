"""Single calls: options, streams, what an answer carries."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from cachecraft_rag import CacheCraftEngine, PromptTooLongError, RagPrompt
from langchain_cachecraft import ChatCacheCraft
from tests.conftest import passage

QUESTION = "\n\nWhat ends first?"


@pytest.fixture
def chat(engine: CacheCraftEngine) -> ChatCacheCraft:
    return ChatCacheCraft(engine=engine, model="tiny", max_tokens=12)


def stats(message: BaseMessage) -> dict[str, Any]:
    figures: dict[str, Any] = message.response_metadata["cachecraft"]
    return figures


def joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


def test_the_figures_of_a_cold_and_a_warm_answer(chat: ChatCacheCraft, engine: CacheCraftEngine) -> None:
    engine.register([passage(1), passage(2)])
    first = chat.invoke(f"{passage(1)}\n\n{passage(2)}{QUESTION}")
    second = chat.invoke(f"{passage(2)}\n\n{passage(1)}{QUESTION}")
    third = chat.invoke(f"{passage(2)}\n\n{passage(1)}{QUESTION}", recompute_ratio=0.5)
    chunk_tokens = sum(len(engine.prompts.encode_chunk(passage(number))) for number in (1, 2))

    assert [(stats(m)["chunk_hits"], stats(m)["chunk_misses"]) for m in (first, second, third)] == [
        (0, 2),
        (2, 0),
        (2, 0),
    ]
    for message in (first, second, third):
        figures, usage = stats(message), message.usage_metadata
        assert usage is not None
        assert usage["input_tokens"] == figures["prompt_tokens"]
        assert usage["output_tokens"] == figures["output_tokens"] > 0
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["input_token_details"]["cache_read"] == figures["reused_tokens"]
    created = [m.usage_metadata["input_token_details"]["cache_creation"] for m in (first, second, third)]  # type: ignore[index]
    assert created == [chunk_tokens, 0, 0]
    assert stats(second)["reused_tokens"] + stats(second)["recomputed_tokens"] == chunk_tokens
    assert stats(third)["recomputed_tokens"] > stats(second)["recomputed_tokens"] > 0


def test_only_the_new_chunks_of_a_mixed_prompt_count_as_created(chat: ChatCacheCraft, engine: CacheCraftEngine) -> None:
    engine.warm([passage(1)])
    engine.register([passage(2)])
    message = chat.invoke(f"{passage(1)}\n\n{passage(2)}{QUESTION}")
    assert (stats(message)["chunk_hits"], stats(message)["chunk_misses"]) == (1, 1)
    usage: Any = message.usage_metadata
    assert usage["input_token_details"]["cache_creation"] == len(engine.prompts.encode_chunk(passage(2)))
    assert sum(usage["input_token_details"].values()) <= usage["input_tokens"]


def test_the_metadata_is_plain_data(chat: ChatCacheCraft) -> None:
    message = chat.invoke("hi")
    metadata = message.response_metadata
    assert (metadata["model_name"], metadata["model_provider"]) == ("tiny", "cachecraft")
    assert metadata["finish_reason"] == "length"
    assert json.loads(json.dumps(metadata)) == metadata


@pytest.mark.parametrize("output_version", ["v0", "v1"])
def test_the_parts_of_a_stream_join_to_the_answer(engine: CacheCraftEngine, output_version: str) -> None:
    chat = ChatCacheCraft(engine=engine, max_tokens=12, output_version=output_version)
    engine.warm([passage(1)])
    question = passage(1) + QUESTION
    whole, chunks = chat.invoke(question), list(chat.stream(question))
    assert len(chunks) > 2
    assert joined(chunks).text == whole.text
    assert joined(chunks).usage_metadata == whole.usage_metadata
    assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]
    assert [chunk.usage_metadata is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert joined(chunks).response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    assert joined(chunks).response_metadata["model_name"] == whole.response_metadata["model_name"]


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)


def test_every_part_is_announced_once_and_before_it_is_given_out(chat: ChatCacheCraft) -> None:
    handler = Tokens()
    for count, chunk in enumerate(chat.stream("hi", config={"callbacks": [handler]}), start=1):
        assert len(handler.tokens) == count
        assert handler.tokens[-1] == chunk.content


def test_parts_are_announced_to_a_run_manager_of_the_callers_own(chat: ChatCacheCraft) -> None:
    tokens: list[str] = []

    class Manager:
        def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
            tokens.append(token)

    manager: Any = Manager()
    for count, chunk in enumerate(chat._stream([HumanMessage("hi")], run_manager=manager)):
        assert tokens[count:] == [chunk.text]
    assert len(tokens) > 2


def test_a_streaming_chat_model_answers_invoke_with_the_same_text(engine: CacheCraftEngine) -> None:
    handler = Tokens()
    chat, streaming = (ChatCacheCraft(engine=engine, streaming=flag, max_tokens=12) for flag in (False, True))
    answer = streaming.invoke("hi", config={"callbacks": [handler]})
    assert answer.text == chat.invoke("hi").text == "".join(handler.tokens)
    assert answer.usage_metadata is not None


def test_the_text_is_what_the_engine_gives_for_the_same_messages(
    chat: ChatCacheCraft, engine: CacheCraftEngine
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    expected = engine.generate(RagPrompt.from_messages(messages), max_new_tokens=12).text
    assert chat.invoke([SystemMessage("Be brief."), HumanMessage("hi")]).text == expected


def test_sampling_options_reach_the_engine(chat: ChatCacheCraft) -> None:
    greedy = chat.invoke("hi").text
    drawn = chat.bind(temperature=1.5, seed=3)
    assert drawn.invoke("hi").text == drawn.invoke("hi").text != greedy
    assert drawn.invoke("hi", seed=4).text != drawn.invoke("hi").text
    assert drawn.invoke("hi", top_k=1).text == greedy
    assert drawn.invoke("hi", top_p=1e-6).text == greedy
    assert chat.invoke("hi", repetition_penalty=5.0).text != greedy


def test_stop_texts_come_from_the_call_before_the_field(engine: CacheCraftEngine) -> None:
    full = ChatCacheCraft(engine=engine, max_tokens=12).invoke("hi").text
    stop, other = full[len(full) // 2 :], full[2:]
    chat = ChatCacheCraft(engine=engine, max_tokens=12, stop=[stop])
    expected = full[: full.index(stop)]
    for answer in (chat.invoke("hi"), joined(list(chat.stream("hi")))):
        assert answer.text == expected
        assert answer.response_metadata["finish_reason"] == "stop"
    assert (
        chat.invoke("hi", stop=[other]).text == full[: full.index(other)] == chat.bind(stop=[other]).invoke("hi").text
    )
    assert chat.invoke("hi", stop=[]).text == full


@pytest.mark.parametrize(
    "last", [AIMessage("It is the"), ToolMessage("42", tool_call_id="1"), SystemMessage("Be brief.")]
)
def test_the_last_message_may_have_any_role(chat: ChatCacheCraft, last: BaseMessage) -> None:
    assert chat.invoke([HumanMessage("hi"), last]).text


def test_a_prompt_that_does_not_fit_is_an_error_with_both_numbers(chat: ChatCacheCraft) -> None:
    with pytest.raises(PromptTooLongError, match="2048"):
        chat.invoke(passage(1, num_sentences=200))


def test_a_bad_option_of_a_call_is_refused_by_name(chat: ChatCacheCraft) -> None:
    with pytest.raises(ValueError, match="temprature: no option of a call"):
        chat.invoke("hi", temprature=0.5)
    with pytest.raises(ValueError, match="temperature"):
        chat.invoke("hi", temperature=-1.0)


def test_an_answer_that_takes_too_long_is_ended(chat: ChatCacheCraft) -> None:
    with pytest.raises(TimeoutError, match="not complete after 1e-09 s"):
        chat.invoke("hi", timeout=1e-9)
    assert chat.invoke("hi", timeout=600).text


def test_documents_on_a_tool_message_are_chunks(chat: ChatCacheCraft) -> None:
    messages = [
        HumanMessage("What ends first?"),
        AIMessage("", tool_calls=[{"name": "search", "args": {"query": "ends"}, "id": "1"}]),
        ToolMessage(
            f"Found:\n\n{passage(21)}\n\n{passage(22)}",
            tool_call_id="1",
            artifact=[Document(passage(21)), Document(passage(22))],
        ),
    ]
    assert stats(chat.invoke(messages))["chunk_misses"] == 2
    assert stats(chat.invoke(messages))["chunk_hits"] == 2


def test_without_automatic_registration_artifacts_are_only_text(engine: CacheCraftEngine) -> None:
    chat = ChatCacheCraft(engine=engine, auto_register=False)
    message = ToolMessage(passage(23), tool_call_id="1", artifact=[Document(passage(23))])
    answer = chat.invoke([HumanMessage("What ends first?"), message])
    assert (stats(answer)["chunk_hits"], stats(answer)["chunk_misses"]) == (0, 0)
    assert stats(answer)["fallback_reason"] == "no known chunk in the prompt"


def test_the_response_cache_of_langchain_keeps_answers_apart(engine: CacheCraftEngine) -> None:
    cache = InMemoryCache()
    full = ChatCacheCraft(engine=engine, max_tokens=12, cache=cache)
    short = ChatCacheCraft(engine=engine, max_tokens=2, cache=cache)
    texts = [chat.invoke("hi").text for chat in (full, short, full, short)]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]
