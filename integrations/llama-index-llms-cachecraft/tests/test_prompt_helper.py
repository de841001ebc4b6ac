"""``ChunkAlignedPromptHelper``: a node that fits a prompt is never cut, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import TextNode

from llama_index.llms.cachecraft import CacheCraftLLM, CacheCraftPrefillEvent, ChunkAlignedPromptHelper
from tests.conftest import passage

PROMPT = PromptTemplate("Passages: {context_str}\nQuestion: {query_str}")
TEXTS = [passage(number, 4 + number % 5) for number in range(12)]


def words(text: str) -> list[str]:
    return text.split()


def helper(context_window: int, kind: type[PromptHelper] = ChunkAlignedPromptHelper, **fields: Any) -> PromptHelper:
    return kind(context_window=context_window, num_output=10, tokenizer=words, **fields)


def test_no_text_that_fits_is_cut_where_llama_index_cuts_some() -> None:
    packed = helper(120).repack(PROMPT, TEXTS)
    assert len(packed) > 2
    assert "\n\n".join(packed) == "\n\n".join(TEXTS)
    assert all(sum(text in prompt for prompt in packed) == 1 for text in TEXTS)
    assert all(len(words(prompt)) <= 105 for prompt in packed)
    of_llama_index = helper(120, PromptHelper).repack(PROMPT, TEXTS)
    assert not all(any(text in prompt for prompt in of_llama_index) for text in TEXTS)
    assert len(packed) <= len(of_llama_index) + 1


def test_a_text_too_long_for_any_prompt_is_cut_and_its_neighbours_are_not() -> None:
    long = " ".join(f"w{index}" for index in range(250))
    packed = helper(120).repack(PROMPT, [TEXTS[0], long, TEXTS[1]])
    assert packed[0] == TEXTS[0]
    assert any(TEXTS[1] in prompt for prompt in packed)
    assert {word for prompt in packed for word in words(prompt)} >= set(words(long))
    assert all(len(words(prompt)) <= 105 for prompt in packed)


def test_blank_texts_are_left_out_and_edges_stripped() -> None:
    assert helper(1000).repack(PROMPT, ["  ", "\na b\n", ""]) == ["a b"]


@pytest.mark.parametrize("texts", [[], [""], [" ", "\n"]])
def test_without_any_text_there_is_one_empty_prompt_as_in_llama_index(texts: list[str]) -> None:
    assert helper(1000).repack(PROMPT, texts) == helper(1000, PromptHelper).repack(PROMPT, texts) == [""]


@pytest.mark.parametrize(
    "mode", [ResponseMode.TREE_SUMMARIZE, ResponseMode.COMPACT_ACCUMULATE, ResponseMode.COMPACT, ResponseMode.REFINE]
)
def test_a_blank_node_is_answered_in_every_mode(
    mode: ResponseMode, make_llm: Callable[..., CacheCraftLLM], make_retriever: Callable[..., Any]
) -> None:
    llm = make_llm(max_new_tokens=4)
    helper = ChunkAlignedPromptHelper.from_llm(llm)
    synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper, response_mode=mode)
    engine = RetrieverQueryEngine(make_retriever([TextNode(text="\n")]), response_synthesizer=synthesizer)
    assert str(engine.query("What ends first?"))


def test_shortening_takes_from_the_longest_only() -> None:
    long, short = " ".join(f"w{index}" for index in range(200)), "a few words"
    first, kept, last = helper(200).truncate(PROMPT, [long, short, long])
    assert kept == short
    assert long.startswith(first)
    assert long.startswith(last)
    total = sum(len(words(text)) for text in (first, kept, last))
    assert 0.85 * 180 <= total <= 190
    assert helper(1000).truncate(PROMPT, [long, short, long]) == [long, short, long]
    assert helper(1000).truncate(PROMPT, []) == []


def test_the_room_of_the_chat_template_is_left_free() -> None:
    assert len(helper(200, template_tokens=90).repack(PROMPT, TEXTS)) > len(helper(200).repack(PROMPT, TEXTS))
    with pytest.raises(ValueError, match="template_tokens: -1 is negative"):
        helper(200, template_tokens=-1)


def test_prompts_packed_for_an_llm_leave_room_for_its_answer(
    make_llm: Callable[..., CacheCraftLLM], make_retriever: Callable[..., Any], log: Any
) -> None:
    llm = make_llm(context_window=700, max_new_tokens=32)
    helper = ChunkAlignedPromptHelper.from_llm(llm)
    nodes = [TextNode(text=text) for text in TEXTS]
    synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper, response_mode=ResponseMode.COMPACT_ACCUMULATE)
    engine = RetrieverQueryEngine(make_retriever(nodes), response_synthesizer=synthesizer)
    engine.query("What ends first?")
    first = [event.stats for event in log.of(CacheCraftPrefillEvent)]
    assert len(first) > 2
    assert all(stats["prompt_tokens"] + 32 <= 700 for stats in first)
    assert sum(stats["chunk_misses"] for stats in first) == len(TEXTS)
    log.events.clear()
    nodes.reverse()
    engine.query("What ends first?")
    assert sum(event.stats["chunk_hits"] for event in log.of(CacheCraftPrefillEvent)) == len(TEXTS)
