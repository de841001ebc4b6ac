"""Batches of chats: drawn together, a run for each."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import ChatPromptTemplate

from cachecraft_rag import CacheCraftEngine, PromptTooLongError
from langchain_cachecraft import ChatCacheCraft
from tests.conftest import passage

QUESTIONS = ["What ends first?", "Which garden is named?", "Who pays?"]
TOO_LONG = passage(1, num_sentences=200)


@pytest.fixture
def sizes(engine: CacheCraftEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts the engine was given together, each time."""
    sizes: list[int] = []
    generate_batch = engine.generate_batch

    def counting(prompts: Any, **options: Any) -> Any:
        sizes.append(len(prompts))
        return generate_batch(prompts, **options)

    monkeypatch.setattr(engine, "generate_batch", counting)
    return sizes


@pytest.fixture
def chat(engine: CacheCraftEngine) -> ChatCacheCraft:
    return ChatCacheCraft(engine=engine, model="tiny", max_tokens=6)


class Runs(BaseCallbackHandler):
    def __init__(self, during: Any = None) -> None:
        self.events: list[str] = []
        self.during = during

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("start")
        if self.during is not None:
            self.during()

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("end")

    def on_llm_error(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("error")


def test_a_batch_is_given_to_the_engine_together(chat: ChatCacheCraft, sizes: list[int]) -> None:
    answers = chat.batch(QUESTIONS)  # type: ignore[arg-type]
    assert sizes == [3]
    singles = [chat.invoke(question) for question in QUESTIONS]
    assert [answer.text for answer in answers] == [answer.text for answer in singles]
    assert [answer.usage_metadata for answer in answers] == [answer.usage_metadata for answer in singles]


def test_a_chain_passes_its_batch_on(chat: ChatCacheCraft, sizes: list[int]) -> None:
    chain = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "{input}")]) | chat
    chain.batch([{"input": question} for question in QUESTIONS])
    assert sizes == [3]


def test_every_input_has_a_run_and_callbacks_of_its_own(chat: ChatCacheCraft) -> None:
    handlers = [Runs(), Runs(), Runs()]
    chat.batch(QUESTIONS, [{"callbacks": [handler]} for handler in handlers])  # type: ignore[arg-type]
    assert [handler.events for handler in handlers] == [["start", "end"]] * 3


def test_an_error_stays_with_its_input(chat: ChatCacheCraft, sizes: list[int]) -> None:
    handlers = [Runs(), Runs(), Runs()]
    config: Any = [{"callbacks": [handler]} for handler in handlers]
    inputs: Any = [QUESTIONS[0], TOO_LONG, QUESTIONS[2]]
    first, error, last = chat.batch(inputs, config, return_exceptions=True)
    assert isinstance(error, PromptTooLongError)
    assert [first.text, last.text] == [chat.invoke(QUESTIONS[0]).text, chat.invoke(QUESTIONS[2]).text]
    assert [handler.events for handler in handlers] == [["start", "end"], ["start", "error"], ["start", "end"]]
    with pytest.raises(PromptTooLongError):
        chat.batch(inputs)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_input_that_is_none_spoils_no_other(chat: ChatCacheCraft, sizes: list[int], place: int) -> None:
    inputs: Any = [*QUESTIONS[:place], 42, *QUESTIONS[place:]]
    answers = chat.batch(inputs, return_exceptions=True)
    assert sizes == [3]
    assert isinstance(answers.pop(place), ValueError)
    assert [answer.text for answer in answers] == [chat.invoke(question).text for question in QUESTIONS]
    with pytest.raises(ValueError, match="Invalid input type"):
        chat.batch(inputs)


def test_what_the_response_cache_knows_is_not_drawn(engine: CacheCraftEngine, sizes: list[int]) -> None:
    chat = ChatCacheCraft(engine=engine, max_tokens=6, cache=InMemoryCache())
    chat.invoke(QUESTIONS[0])
    chat.batch(QUESTIONS)  # type: ignore[arg-type]
    chat.batch(QUESTIONS)  # type: ignore[arg-type]
    assert sizes == [2]


def test_options_of_the_batch_hold_for_every_input(chat: ChatCacheCraft, sizes: list[int]) -> None:
    answers = chat.batch(QUESTIONS, max_tokens=2, stop=["zzz"])  # type: ignore[arg-type]
    assert [answer.response_metadata["cachecraft"]["output_tokens"] for answer in answers] == [2] * 3
    assert sizes == [3]


@pytest.mark.parametrize("option", [{"timeout": 600.0}, {"streaming": True}])
def test_what_looks_between_the_tokens_is_drawn_one_by_one(
    engine: CacheCraftEngine, sizes: list[int], option: dict[str, Any]
) -> None:
    chat = ChatCacheCraft(engine=engine, max_tokens=6, **option)
    assert len(chat.batch(QUESTIONS)) == 3  # type: ignore[arg-type]
    assert sizes == []


def test_what_a_callback_asks_meanwhile_gets_its_own_answer(chat: ChatCacheCraft, engine: CacheCraftEngine) -> None:
    other = ChatCacheCraft(engine=engine, model="other", max_tokens=3)
    answers: list[Any] = []

    def ask() -> None:
        answers.append(other.invoke(QUESTIONS[0]))
        answers.append(chat.invoke("hi"))

    expected = [other.invoke(QUESTIONS[0]).text, chat.invoke("hi").text]
    texts = [answer.text for answer in chat.batch(QUESTIONS[:2], {"callbacks": [Runs(ask)]})]  # type: ignore[arg-type]
    assert texts == [chat.invoke(question).text for question in QUESTIONS[:2]]
    assert [answer.text for answer in answers] == expected * 2


async def test_asynchronous_batches_give_the_same(chat: ChatCacheCraft) -> None:
    inputs: Any = QUESTIONS
    assert [a.text for a in await chat.abatch(inputs)] == [a.text for a in chat.batch(inputs)]
    assert chat.batch([]) == []
