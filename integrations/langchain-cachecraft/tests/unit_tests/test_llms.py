"""The text model: the same engine and options as the chat model, strings in and out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.runnables import ConfigurableField

from cachecraft_rag import CacheCraftEngine, RagPrompt
from langchain_cachecraft import CacheCraftLLM, ChatCacheCraft
from tests.conftest import passage

QUESTION = "What ends first?"


@pytest.fixture
def llm(model_folder: str) -> Iterator[CacheCraftLLM]:
    llm = CacheCraftLLM(model=model_folder, max_tokens=12)
    yield llm
    llm.close()


def test_the_model_continues_the_text_as_it_is(llm: CacheCraftLLM) -> None:
    expected = llm.get_engine().generate(RagPrompt.from_text(QUESTION), max_new_tokens=12).text
    assert llm.invoke(QUESTION) == expected


def test_with_the_chat_template_it_answers_like_the_chat_model(llm: CacheCraftLLM, model_folder: str) -> None:
    templated = CacheCraftLLM(model=model_folder, max_tokens=12, chat_template=True)
    chat = ChatCacheCraft(model=model_folder, max_tokens=12)
    assert templated.invoke(QUESTION) == chat.invoke(QUESTION).text != llm.invoke(QUESTION)


def test_text_and_chat_model_share_one_engine(llm: CacheCraftLLM, model_folder: str) -> None:
    assert ChatCacheCraft(model=model_folder).get_engine() is llm.get_engine()


async def test_every_way_of_asking_gives_the_same_text(llm: CacheCraftLLM) -> None:
    expected = llm.invoke(QUESTION)
    chunks = list(llm.stream(QUESTION))
    assert len(chunks) > 2
    assert "".join(chunks) == expected == await llm.ainvoke(QUESTION)
    assert "".join([chunk async for chunk in llm.astream(QUESTION)]) == expected
    assert llm.batch([QUESTION, "hi"]) == [expected, llm.invoke("hi")] == await llm.abatch([QUESTION, "hi"])


def test_the_figures_come_with_every_generation(llm: CacheCraftLLM) -> None:
    engine = llm.get_engine()
    engine.invalidate([passage(61)])
    engine.register([passage(61)])
    results = [llm.generate([f"{passage(61)}\n\n{QUESTION}"] * 2) for _ in range(2)]
    (first,), (second,) = results[0].generations
    assert first.generation_info is not None
    assert second.generation_info is not None
    assert first.generation_info["usage_metadata"]["input_token_details"]["cache_creation"] > 0
    assert second.generation_info["usage_metadata"]["input_token_details"]["cache_read"] > 0
    assert second.generation_info["finish_reason"] == "length"
    assert second.generation_info["cachecraft"]["chunk_hits"] == 1
    assert results[0].llm_output is not None
    usages = [info["usage_metadata"] for info in (first.generation_info, second.generation_info)]
    assert results[0].llm_output["model_name"] == llm.model
    assert results[0].llm_output["token_usage"]["total_tokens"] == sum(usage["total_tokens"] for usage in usages)


def test_a_stream_ends_with_the_figures(llm: CacheCraftLLM) -> None:
    *_, last = llm._stream(QUESTION)
    assert last.generation_info is not None
    assert last.generation_info["usage_metadata"]["output_tokens"] == 12


def test_stop_texts_come_from_the_call_before_the_field(llm: CacheCraftLLM, model_folder: str) -> None:
    full = llm.invoke(QUESTION)
    stop, other = full[len(full) // 2 :], full[2:]
    stopping = CacheCraftLLM(model=model_folder, max_tokens=12, stop=[stop])
    assert stopping.invoke(QUESTION) == full[: full.index(stop)]
    assert (
        stopping.invoke(QUESTION, stop=[other]) == full[: full.index(other)] == llm.bind(stop=[other]).invoke(QUESTION)
    )


def test_a_batch_is_given_to_the_engine_together(engine: CacheCraftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    generate_batch = engine.generate_batch

    def counting(prompts: Any, **options: Any) -> Any:
        sizes.append(len(prompts))
        return generate_batch(prompts, **options)

    monkeypatch.setattr(engine, "generate_batch", counting)
    CacheCraftLLM(engine=engine, max_tokens=2).batch(["a", "b", "c"])
    assert sizes == [3]


def test_options_of_a_call_reach_the_engine(llm: CacheCraftLLM) -> None:
    assert (
        llm.generate([QUESTION], max_tokens=3).generations[0][0].generation_info["usage_metadata"]["output_tokens"] == 3
    )  # type: ignore[index]
    with pytest.raises(ValueError, match="tools: no option of a call"):
        llm.invoke(QUESTION, tools=[])
    with pytest.raises(TimeoutError, match="not complete after"):
        llm.invoke(QUESTION, timeout=1e-9)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda llm: pickle.loads(pickle.dumps(llm))])
def test_a_copy_has_the_same_engine(llm: CacheCraftLLM, copied: Any) -> None:
    assert copied(llm).get_engine() is llm.get_engine()


def test_configurable_fields_keep_the_engine(llm: CacheCraftLLM) -> None:
    configurable = llm.configurable_fields(max_tokens=ConfigurableField(id="max_tokens"))
    made, _ = configurable.prepare({"configurable": {"max_tokens": 3}})  # type: ignore[attr-defined]
    assert isinstance(made, CacheCraftLLM)
    assert made.get_engine() is llm.get_engine()


def test_tokens_are_counted_with_the_models_own_tokenizer(llm: CacheCraftLLM) -> None:
    assert llm.get_token_ids("The garden ends.") == list(llm.get_engine().prompts.encode_text("The garden ends."))
    own = CacheCraftLLM(model="m", custom_get_token_ids=lambda text: [len(text)])
    assert own.get_num_tokens("four") == 1


def test_tracing_parameters_and_identity_tell_models_apart() -> None:
    llm = CacheCraftLLM(model="some/model", stop=["END"])
    params = llm._get_ls_params(model="other/model")
    assert (params["ls_provider"], params["ls_model_name"], params["ls_model_type"]) == (
        "cachecraft",
        "other/model",
        "llm",
    )
    assert params["ls_stop"] == ["END"]
    assert (
        llm._identifying_params
        != CacheCraftLLM(model="some/model", stop=["END"], chat_template=True)._identifying_params
    )
    assert llm.metadata is not None
    assert llm.metadata["lc_versions"]["langchain-cachecraft"]
