"""Engines shared in a process."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from cachecraft_rag import CacheCraftEngine, EngineConfig, EngineKey, EnginePool
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

WAIT_S = 20


class GatedKey(EngineKey):
    """Its load waits for a gate."""

    gate, entered = threading.Event(), threading.Event()

    def load(self) -> CacheCraftEngine:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        return super().load()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tiny"))
    make("llama").save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder


@pytest.fixture
def pool() -> EnginePool:
    return EnginePool()


def test_the_same_key_gives_the_same_engine_and_another_key_another(pool: EnginePool, folder: str) -> None:
    config = EngineConfig(context_window=99)
    engine = pool.get(EngineKey(folder, "float32", "cpu", config))
    assert engine.config == config
    assert pool.get(EngineKey(folder, "float32", "cpu", EngineConfig(context_window=99))) is engine
    others = [EngineKey(folder, "bfloat16", "cpu", config), EngineKey(folder, "float32", "cpu")]
    engines = [engine, *map(pool.get, others)]
    assert len({id(one) for one in engines}) == 3


def test_a_bare_name_is_a_key_with_the_defaults_of_the_engine(pool: EnginePool, folder: str) -> None:
    engine = pool.get(EngineKey(folder))
    assert engine.config == EngineConfig()
    assert pool.get(EngineKey(folder, "auto", None, EngineConfig())) is engine


def test_many_threads_that_ask_at_once_get_one_engine(pool: EnginePool, folder: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        engines = list(threads.map(lambda _: pool.get(EngineKey(folder)), range(8)))
    assert len({id(engine) for engine in engines}) == 1


def test_loading_one_engine_does_not_hold_up_another(pool: EnginePool, folder: str) -> None:
    loaded = pool.get(EngineKey(folder))
    slow = GatedKey(folder, "float32")
    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(pool.get, slow)
        assert slow.entered.wait(WAIT_S)
        assert threads.submit(pool.get, EngineKey(folder)).result(WAIT_S) is loaded
        assert not loading.done()
        slow.gate.set()
        assert loading.result(WAIT_S) is not loaded


def test_a_failed_load_is_tried_again(pool: EnginePool, tmp_path: Path) -> None:
    key = EngineKey(str(tmp_path / "model"))
    with pytest.raises(ValueError, match="does not exist"):
        pool.get(key)
    make("llama").save_pretrained(key.model)
    byte_level().save_pretrained(key.model)
    assert not pool.get(key).is_closed


def test_an_engine_goes_with_the_last_who_holds_it(pool: EnginePool, folder: str) -> None:
    engine = pool.get(EngineKey(folder))
    gone = ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def test_an_engine_that_is_to_be_kept_stays_until_it_is_closed(pool: EnginePool, folder: str) -> None:
    kept = ref(pool.get(EngineKey(folder), keep=True))
    gc.collect()
    assert kept() is pool.get(EngineKey(folder))
    assert pool.close(EngineKey(folder))
    gc.collect()
    assert kept() is None


def test_after_closing_a_new_engine_is_made(pool: EnginePool, folder: str) -> None:
    key = EngineKey(folder)
    assert not pool.close(key)
    engine = pool.get(key)
    assert pool.close(key)
    assert engine.is_closed
    assert not pool.close(key)
    assert not pool.get(key).is_closed


@pytest.mark.parametrize("keep", [False, True])
def test_an_engine_closed_by_somebody_else_is_not_handed_out_again(pool: EnginePool, folder: str, keep: bool) -> None:
    engine = pool.get(EngineKey(folder), keep=keep)
    engine.close()
    assert not pool.close(EngineKey(folder))
    again = pool.get(EngineKey(folder), keep=keep)
    again.close()
    assert not pool.get(EngineKey(folder), keep=keep).is_closed


def test_a_kept_engine_that_somebody_closed_is_let_go(pool: EnginePool, folder: str) -> None:
    closed = pool.get(EngineKey(folder), keep=True)
    closed.close()
    gone, _new = ref(closed), pool.get(EngineKey(folder))
    del closed
    gc.collect()
    assert gone() is None


def test_the_same_objects_give_the_same_engine_and_equal_ones_another(pool: EnginePool) -> None:
    model, tokenizer, config = make("llama"), byte_level(), EngineConfig()
    engine = pool.over(model, tokenizer, config)
    assert engine.model is model
    assert pool.over(model, tokenizer, EngineConfig()) is engine
    for other in [(make("llama"), tokenizer, config), (model, byte_level(), config), (model, tokenizer, _narrow())]:
        assert pool.over(*other) is not engine


def test_a_closed_engine_over_ready_objects_is_made_anew(pool: EnginePool) -> None:
    objects: tuple[Any, ...] = (make("llama"), byte_level(), EngineConfig())
    engine = pool.over(*objects)
    engine.close()
    assert not pool.over(*objects).is_closed


def test_an_engine_over_ready_objects_keeps_them_and_the_pool_does_not(pool: EnginePool) -> None:
    tokenizer = byte_level()
    engine = pool.over(make("llama"), tokenizer, EngineConfig())
    known = ref(tokenizer)
    del tokenizer
    gc.collect()
    # The engine reads with a copy. Were the object gone, another tokenizer might get its id, and with it this engine.
    assert known() is not None
    model = ref(engine.model)
    del engine
    gc.collect()
    assert (known(), model()) == (None, None)


def _narrow() -> EngineConfig:
    return EngineConfig(context_window=64)


def test_a_kept_engine_that_somebody_closed_is_let_go_whatever_the_pool_is_asked_next(
    pool: EnginePool, folder: str
) -> None:
    closed = pool.get(EngineKey(folder), keep=True)
    closed.close()
    assert not pool.close(EngineKey("another"))
    gone = ref(closed)
    del closed
    gc.collect()
    assert gone() is None
