"""The chat model as an object: its fields, its copies, its engine."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, trim_messages
from langchain_core.runnables import ConfigurableField

from cachecraft_rag import CacheCraftEngine, EngineConfig
from langchain_cachecraft import ChatCacheCraft
from tests.conftest import passage
from tests.tiny_tokenizers import strict


def test_making_a_chat_model_loads_nothing() -> None:
    assert ChatCacheCraft(model="/no/such/folder").model == "/no/such/folder"


def test_a_missing_model_is_an_error_of_the_first_call() -> None:
    with pytest.raises(ValueError, match="'/no/such/folder' does not exist"):
        ChatCacheCraft(model="/no/such/folder").invoke("hi")


def test_the_model_may_also_be_called_model_name() -> None:
    fields: dict[str, Any] = {"model_name": "some/model"}
    assert ChatCacheCraft(**fields).model == "some/model"


def test_torch_objects_become_their_names() -> None:
    fields: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    chat = ChatCacheCraft(model="some/model", **fields)
    assert (chat.dtype, chat.device) == ("bfloat16", "cpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "model: '' names no model"),
        ({"model": "m", "temprature": 0.5}, "temprature"),
        ({"model": "m", "temperature": -1.0}, "temperature"),
        ({"model": "m", "recompute_ratio": 1.5}, "recompute_ratio"),
        ({"model": "m", "policy": "best"}, "policy"),
        ({"model": "m", "preset": "best"}, "preset"),
        ({"model": "m", "target_divergence": -0.1}, "target_divergence"),
        ({"model": "m", "max_tokens": 0}, "max_tokens"),
        ({"model": "m", "dtype": "int8"}, "dtype: 'int8' is no floating point dtype"),
        ({"model": "m", "dtype": "nn"}, "dtype: 'nn' is no floating point dtype"),
        ({"model": "m", "namespace": ""}, "namespace"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatCacheCraft(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "float32"}, "dtype: can't be given together with a ready engine"),
        ({"device": "cpu"}, "device: can't be given"),
        ({"engine_config": EngineConfig()}, "engine_config: can't be given"),
    ],
)
def test_what_a_ready_engine_has_already_is_refused(
    engine: CacheCraftEngine, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ChatCacheCraft(engine=engine, **fields)


def test_a_ready_engine_serves_its_own_model_only(engine: CacheCraftEngine) -> None:
    chat = ChatCacheCraft(engine=engine, namespace="default")
    assert chat.model == "LlamaForCausalLM"
    assert chat.get_engine() is engine
    with pytest.raises(ValueError, match="model: 'other' can't be served"):
        chat.invoke("hi", model="other")


def test_a_ready_engine_stays_open(engine: CacheCraftEngine) -> None:
    chat = ChatCacheCraft(engine=engine)
    chat.close()
    assert chat.invoke("hi").content


def test_chat_models_of_several_namespaces_share_one_engine(model_folder: str) -> None:
    config = EngineConfig(namespace="a", max_new_tokens=5)
    chats = [ChatCacheCraft(model=model_folder, engine_config=config, namespace=name) for name in (None, "b", "c")]
    chats.append(chats[0].model_copy(update={"namespace": "d"}))
    engine = chats[0].get_engine()
    assert engine.config == config
    assert all(chat.get_engine() is engine for chat in chats)
    chats[1].close()
    assert engine.is_closed


def test_chunks_are_stored_in_the_namespace_of_the_chat_model(engine: CacheCraftEngine) -> None:
    chat = ChatCacheCraft(engine=engine, namespace="b")
    chat.get_engine().register([passage(1)], "b")
    chat.invoke(f"{passage(1)}\n\nWhat ends first?")
    assert [engine.invalidate(namespace=name) for name in (None, "a", "b")] == [0, 0, 1]


def test_engine_settings_may_be_a_mapping() -> None:
    fields: dict[str, Any] = {"engine_config": {"store": {"cold": {"size": "1MB"}}}}
    chat = ChatCacheCraft(model="some/model", **fields)
    assert chat.engine_config is not None
    assert chat.engine_config.store.cold.size == 10**6


def test_chat_models_with_other_sampling_share_one_engine(model_folder: str) -> None:
    chats = [ChatCacheCraft(model=model_folder), ChatCacheCraft(model=model_folder, temperature=1.0, policy="none")]
    assert chats[0].get_engine() is chats[1].get_engine()
    chats[0].close()


def test_a_closed_chat_model_loads_again(model_folder: str) -> None:
    chat = ChatCacheCraft(model=model_folder, max_tokens=2)
    before = chat.get_engine()
    chat.close()
    assert chat.invoke("hi").usage_metadata is not None
    assert chat.get_engine() is not before
    chat.close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda chat: pickle.loads(pickle.dumps(chat))])
@pytest.mark.parametrize("is_ready", [True, False])
def test_a_copy_has_the_same_engine(engine: CacheCraftEngine, model_folder: str, is_ready: bool, copied: Any) -> None:
    chat = ChatCacheCraft(engine=engine) if is_ready else ChatCacheCraft(model=model_folder)
    twin = copied(chat)
    assert twin is not chat
    assert twin == chat
    assert twin.get_engine() is chat.get_engine()
    chat.close()


def test_a_ready_engine_is_not_pickled_into_another_process(engine: CacheCraftEngine) -> None:
    pickled = pickle.dumps(ChatCacheCraft(engine=engine))
    assert len(pickled) < 10_000
    command = "import pickle, sys; pickle.load(sys.stdin.buffer)"
    child = subprocess.run([sys.executable, "-c", command], input=pickled, capture_output=True, check=False)
    assert b"can only be unpickled in the process that holds the engine" in child.stderr


@pytest.mark.parametrize("is_ready", [True, False])
def test_configurable_fields_keep_the_engine(engine: CacheCraftEngine, model_folder: str, is_ready: bool) -> None:
    chat = ChatCacheCraft(engine=engine) if is_ready else ChatCacheCraft(model=model_folder)
    configurable = chat.configurable_fields(max_tokens=ConfigurableField(id="max_tokens"))
    made, _ = configurable.prepare({"configurable": {"max_tokens": 3}})  # type: ignore[attr-defined]
    assert isinstance(made, ChatCacheCraft)
    assert made.max_tokens == 3
    assert made.get_engine() is chat.get_engine()
    answer = configurable.with_config(configurable={"max_tokens": 3}).invoke("hi")
    assert answer.response_metadata["cachecraft"]["output_tokens"] == 3
    chat.close()


def test_standard_tracing_parameters_name_model_and_stop_texts() -> None:
    chat = ChatCacheCraft(model="some/model", stop=["END"], max_tokens=7)
    params = chat._get_ls_params()
    assert params["ls_provider"] == "cachecraft"
    assert (params["ls_model_name"], params["ls_stop"], params["ls_max_tokens"]) == ("some/model", ["END"], 7)
    params = chat._get_ls_params(stop=["X"], model="other/model")
    assert (params["ls_model_name"], params["ls_stop"]) == ("other/model", ["X"])


def test_whatever_changes_an_answer_changes_the_identity(engine: CacheCraftEngine) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"seed": 3},
        {"stop": ["a"]},
        {"stop": ["b"]},
        {"reuse": False},
        {"policy": "none"},
        {"recompute_ratio": 0.5},
        {"target_divergence": 0.5},
        {"preset": "fast"},
        {"namespace": "a"},
        {"dtype": "float32"},
        {"engine_config": EngineConfig(context_window=64)},
        {"engine": engine},
    ]
    identities = {ChatCacheCraft(model="m", **fields)._get_llm_string(stop=None) for fields in variants}
    assert len(identities) == len(variants)


def test_two_ready_engines_of_one_name_have_two_identities(engine: CacheCraftEngine) -> None:
    with CacheCraftEngine(engine.model, engine.tokenizer) as other:
        chats = [ChatCacheCraft(engine=one, model="m") for one in (engine, other)]
        assert chats[0]._get_llm_string() != chats[1]._get_llm_string()
        assert chats[0]._get_llm_string() == ChatCacheCraft(engine=engine, model="m")._get_llm_string()


def test_the_version_of_the_package_is_in_the_metadata_of_runs() -> None:
    metadata = ChatCacheCraft(model="m").metadata
    assert metadata is not None
    assert metadata["lc_versions"]["langchain-cachecraft"]


def test_tokens_are_counted_with_the_models_own_tokenizer(engine: CacheCraftEngine) -> None:
    chat = ChatCacheCraft(engine=engine)
    text = "The garden ends."
    ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert chat.get_token_ids(text) == ids
    assert chat.get_num_tokens(text) == len(ids)


def test_a_tokenizer_of_the_users_own_comes_first(engine: CacheCraftEngine) -> None:
    chat = ChatCacheCraft(engine=engine, custom_get_token_ids=lambda text: [len(text)])
    assert chat.get_token_ids("four") == [4]


@pytest.mark.parametrize("tools", [None, [{"name": "search", "description": "Search.", "parameters": {}}]])
def test_the_tokens_of_a_chat_are_those_of_its_prompt(engine: CacheCraftEngine, tools: Any) -> None:
    chat = ChatCacheCraft(engine=engine, max_tokens=1)
    messages = [SystemMessage("Be brief."), HumanMessage("hi"), AIMessage("Hello."), HumanMessage("When?")]
    answer = (chat if tools is None else chat.bind_tools(tools)).invoke(messages)
    assert answer.usage_metadata is not None
    assert chat.get_num_tokens_from_messages(messages, tools) == answer.usage_metadata["input_tokens"]


def test_a_chat_is_trimmed_to_the_tokens_of_its_prompt(engine: CacheCraftEngine) -> None:
    with CacheCraftEngine(engine.model, strict()) as other:  # a template that takes no part of a chat but the first
        for chat in (ChatCacheCraft(engine=engine), ChatCacheCraft(engine=other)):
            messages = [HumanMessage(passage(1)), AIMessage("Hello."), HumanMessage("When?")]
            assert trim_messages(messages, max_tokens=1000, token_counter=chat) == messages
            assert trim_messages(messages, max_tokens=60, token_counter=chat, start_on="human") == messages[2:]
    assert ChatCacheCraft(model="m").get_num_tokens_from_messages([]) == 0
