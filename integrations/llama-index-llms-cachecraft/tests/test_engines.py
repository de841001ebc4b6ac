"""Engines are loaded late, shared between LLM objects, and never copied or pickled."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest

from cachecraft_rag import CacheCraftEngine, EngineConfig
from llama_index.llms.cachecraft import CacheCraftLLM
from tests.conftest import passage
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level


def test_the_model_is_loaded_at_the_first_use(tiny_folder: str) -> None:
    llm = CacheCraftLLM(model=tiny_folder)
    assert not llm.is_loaded
    assert llm.to_payload()["model_name"] == tiny_folder
    assert not llm.is_loaded
    assert llm.metadata.context_window == 2048
    assert llm.is_loaded
    llm.close()


def test_llms_of_the_same_model_and_settings_share_an_engine(tiny_folder: str) -> None:
    first = CacheCraftLLM(model=tiny_folder)
    same = CacheCraftLLM(model=tiny_folder, temperature=0.5, max_new_tokens=3, stop=["x"], namespace="b")
    assert same.engine is first.engine
    for fields in ({"context_window": 100}, {"dtype": "bfloat16"}):
        assert CacheCraftLLM(model=tiny_folder, **fields).engine is not first.engine
    first.close()


def test_llms_on_the_same_objects_share_an_engine() -> None:
    model, tokenizer = make("llama"), byte_level()
    first = CacheCraftLLM(hf_model=model, tokenizer=tokenizer)
    assert CacheCraftLLM(hf_model=model, tokenizer=tokenizer, temperature=1.0).engine is first.engine
    assert CacheCraftLLM(hf_model=make("llama"), tokenizer=tokenizer).engine is not first.engine
    first.close()


def test_threads_that_use_an_llm_first_at_the_same_time_load_it_once(tiny_folder: str) -> None:
    llms = [CacheCraftLLM(model=tiny_folder) for _ in range(4)]
    engines: list[Any] = []
    threads = [threading.Thread(target=lambda llm=llm: engines.append(llm.engine)) for llm in llms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(engines) == 4
    assert len({id(engine) for engine in engines}) == 1
    llms[0].close()


def test_an_engine_goes_with_the_last_llm_that_uses_it(tiny_folder: str) -> None:
    llm = CacheCraftLLM(model=tiny_folder)
    engine = ref(llm.engine)
    del llm
    gc.collect()
    assert engine() is None


def test_an_llm_whose_engine_another_one_closed_loads_it_again(tiny_folder: str) -> None:
    first, second = CacheCraftLLM(model=tiny_folder, max_new_tokens=2), CacheCraftLLM(model=tiny_folder)
    assert second.engine is first.engine
    second.close()
    assert not first.is_loaded
    assert first.complete("Hello").text
    first.close()


def test_a_copy_with_another_namespace_shares_the_engine_and_no_chunk(tiny_folder: str) -> None:
    llm = CacheCraftLLM(model=tiny_folder, max_new_tokens=2)
    other = llm.model_copy(update={"namespace": "b"})
    assert other.engine is llm.engine
    llm.engine.warm([passage(1)])
    assert _hits(llm) == 1
    llm.engine.register([passage(1)], "b")
    assert [_hits(one) for one in (other, other, llm)] == [0, 1, 1]
    assert [llm.engine.invalidate(namespace=name) for name in ("a", "b")] == [0, 1]
    llm.close()


def test_a_given_engine_serves_any_namespace(make_llm: Callable[..., CacheCraftLLM]) -> None:
    engine = make_llm().engine
    llm = make_llm(engine=engine, namespace="b")
    engine.register([passage(1)], "b")
    assert [_hits(llm), _hits(llm)] == [0, 1]
    llm.namespace = "c"
    engine.register([passage(1)], "c")
    assert _hits(llm) == 0
    config = EngineConfig(namespace="own")
    assert CacheCraftLLM(engine=CacheCraftEngine(engine.model, engine.tokenizer, config)).namespace == "own"


def _hits(llm: CacheCraftLLM) -> int:
    """Chunks that one answer takes from the store."""
    hits: int = llm.complete(f"{passage(1)} Why?").raw["cachecraft"]["chunk_hits"]
    return hits


def test_a_deep_copy_shares_the_engine(llm: CacheCraftLLM) -> None:
    other = copy.deepcopy(llm)
    assert other is not llm
    assert other.engine is llm.engine


def test_a_dictionary_has_the_fields_and_no_weights(llm: CacheCraftLLM, tiny_folder: str) -> None:
    data = llm.to_dict()
    assert data["class_name"] == "CacheCraftLLM"
    assert data["max_new_tokens"] == 8
    assert len(json.dumps(data)) < 1000
    named = CacheCraftLLM(model=tiny_folder, stop=["x"], policy="none", namespace="b")
    assert CacheCraftLLM.from_dict(named.to_dict()).to_dict() == named.to_dict()


def test_a_pickle_has_the_fields_and_no_weights(tiny_folder: str) -> None:
    llm = CacheCraftLLM(model=tiny_folder, temperature=0.5, completion_to_prompt=lambda prompt: prompt)
    assert llm.engine is not None
    data = pickle.dumps(llm)
    assert len(data) < 10_000
    restored = pickle.loads(data)
    assert restored.temperature == 0.5
    assert restored.engine is llm.engine
    # LlamaIndex drops what can't be pickled; the object itself keeps it.
    assert llm.completion_to_prompt("x") == "x"
    llm.close()


def test_an_llm_on_ready_objects_refuses_to_be_pickled(llm: CacheCraftLLM) -> None:
    with pytest.raises(TypeError, match="made from ready objects"):
        pickle.dumps(llm)


def test_a_closed_llm_loads_its_model_again(tiny_folder: str) -> None:
    llm = CacheCraftLLM(model=tiny_folder, max_new_tokens=2)
    engine, text = llm.engine, llm.complete("Hello").text
    llm.close()
    assert llm.complete("Hello").text == text
    assert llm.engine is not engine
    llm.close()


def test_a_closed_llm_on_ready_objects_says_so(make_llm: Callable[..., CacheCraftLLM]) -> None:
    llm = make_llm()
    llm.close()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        llm.complete("Hello")
