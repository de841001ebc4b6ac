"""Engines shared in a process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from cachecraft_rag import CacheCraftEngine, EngineConfig
from langchain_cachecraft.engines import EngineKey, EngineRegistry


def key(model: str, namespace: str = "default") -> EngineKey:
    return EngineKey(model, "float32", "cpu", EngineConfig(namespace=namespace))


def test_the_same_key_gives_the_same_engine_and_another_key_another(model_folder: str) -> None:
    registry = EngineRegistry()
    engine = registry.get(key(model_folder))
    assert registry.get(key(model_folder)) is engine
    other = registry.get(key(model_folder, namespace="other"))
    assert other is not engine
    assert (engine.config.namespace, other.config.namespace) == ("default", "other")


def test_many_threads_that_ask_at_once_get_one_engine(model_folder: str) -> None:
    registry = EngineRegistry()
    with ThreadPoolExecutor(8) as pool:
        engines = set(pool.map(lambda _: registry.get(key(model_folder)), range(8)))
    assert len(engines) == 1


def test_a_failed_load_is_tried_again(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    registry = EngineRegistry()
    missing = str(tmp_path_factory.mktemp("empty") / "model")
    for _ in range(2):
        with pytest.raises(ValueError, match="does not exist"):
            registry.get(key(missing))
    assert registry.get(key(model_folder)) is not None


def test_after_closing_a_new_engine_is_made(model_folder: str) -> None:
    registry = EngineRegistry()
    engine = registry.get(key(model_folder))
    assert registry.close(key(model_folder))
    assert not registry.close(key(model_folder))
    assert registry.get(key(model_folder)) is not engine


def test_a_token_leads_back_to_its_engine_as_long_as_that_lives(engine: CacheCraftEngine) -> None:
    registry = EngineRegistry()
    token = registry.token_of(engine)
    assert registry.token_of(engine) == token
    assert registry.by_token(token) is engine
    with pytest.raises(ValueError, match="engine: a chat model made with a ready engine can only be unpickled"):
        registry.by_token("of another process")
