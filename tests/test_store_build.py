"""Tiers from settings, and an engine on top of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from cachecraft_rag import CacheCraftEngine, EngineConfig, RecomputeConfig, StoreConfig
from cachecraft_rag.store import DiskStore, MemoryStore, TieredStore
from cachecraft_rag.store.build import open_store
from cachecraft_rag.store_config import DiskTierConfig, MemoryTierConfig, RemoteTierConfig
from tests.conftest import rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level


def engine_on(store: StoreConfig, **changes: object) -> CacheCraftEngine:
    config = EngineConfig(store=store, max_new_tokens=4, recompute=RecomputeConfig(ratio=0.2))
    return CacheCraftEngine(make("llama", **changes), byte_level(), config)


def on_disk(folder: Path, **options: object) -> StoreConfig:
    return StoreConfig.model_validate({"disk": {"path": str(folder), "size": "64MiB"}, **options})


def test_memory_alone_is_one_tier() -> None:
    store = open_store(StoreConfig(cold=MemoryTierConfig(size=1000)))
    assert isinstance(store, MemoryStore)
    assert (store.name, store.capacity) == ("cold", 1000)


def test_a_disk_or_a_server_of_no_bytes_is_left_out(tmp_path: Path) -> None:
    none = {"disk": {"path": str(tmp_path / "kv"), "size": 0}, "remote": {"url": "redis://localhost", "size": 0}}
    assert isinstance(open_store(StoreConfig.model_validate(none)), MemoryStore)
    assert not (tmp_path / "kv").exists()


def test_a_disk_tier_stands_behind_memory(tmp_path: Path) -> None:
    store = open_store(on_disk(tmp_path / "kv"))
    assert isinstance(store, TieredStore)
    assert [type(tier) for tier in store.tiers] == [MemoryStore, DiskStore]
    assert store.tiers[1].capacity == 64 * 2**20
    store.close()


def test_a_new_engine_finds_on_disk_what_an_old_one_stored(tmp_path: Path) -> None:
    with engine_on(on_disk(tmp_path)) as first:
        first.warm(rag_prompt(1, 2).chunks)
        expected = first.generate(rag_prompt(2, 1))
        assert expected.stats.hits_by_tier == {"cold": 2}
    with engine_on(on_disk(tmp_path)) as second:
        found = second.generate(rag_prompt(2, 1))
        assert found.stats.hits_by_tier == {"disk": 2}
        assert found.token_ids == expected.token_ids
        assert second.generate(rag_prompt(1, 2)).stats.hits_by_tier == {"cold": 2}  # promoted


def test_another_model_finds_nothing_on_the_same_disk(tmp_path: Path) -> None:
    with engine_on(on_disk(tmp_path)) as first:
        first.warm(rag_prompt(1, 2).chunks)
    for changes in ({"num_hidden_layers": 2}, {"rms_norm_eps": 1e-3}):
        with engine_on(on_disk(tmp_path), **changes) as other:
            assert other.generate(rag_prompt(1, 2)).stats.chunk_hits == 0


def test_entries_at_rest_are_encrypted_and_useless_with_another_key(tmp_path: Path) -> None:
    with engine_on(on_disk(tmp_path, master_key=b"0123456789abcdef")) as first:
        first.warm(rag_prompt(1).chunks)
    with engine_on(on_disk(tmp_path, master_key=b"0123456789abcdef")) as same:
        assert same.generate(rag_prompt(1)).stats.hits_by_tier == {"disk": 1}
    with engine_on(on_disk(tmp_path, master_key=b"another-key-of-16")) as other:
        assert other.generate(rag_prompt(1)).stats.chunk_hits == 0


@pytest.mark.parametrize("precision", ["k16v8", "int8", "int4"])
def test_lower_precision_takes_less_room_and_still_hits(precision: str, tmp_path: Path) -> None:
    plain, lower = (
        StoreConfig.model_validate({"cold": {"precision": p}, "disk": {"path": str(tmp_path / p), "precision": p}})
        for p in ("model", precision)
    )
    sizes = []
    for config in (plain, lower):
        with engine_on(config) as engine:
            engine.warm(rag_prompt(1, 2).chunks)
            assert engine.generate(rag_prompt(2, 1)).stats.chunk_hits == 2
            engine.store.flush()
            sizes.append(engine.store.nbytes)
    assert sizes[1] < 0.8 * sizes[0]


def test_invalidated_chunks_are_gone_from_disk(tmp_path: Path) -> None:
    with engine_on(on_disk(tmp_path)) as engine:
        for number in (1, 2):  # the first is computed behind nothing that is forgotten
            engine.warm(rag_prompt(number).chunks)
        engine.invalidate(texts=rag_prompt(2).chunks)
    with engine_on(on_disk(tmp_path)) as again:
        assert again.generate(rag_prompt(1, 2)).stats.chunk_hits == 1


def test_bad_settings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="precision"):
        DiskTierConfig(path=str(tmp_path), precision="int3")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="path"):
        DiskTierConfig(path="")
    for seconds in (math.inf, math.nan, 0.0005):
        with pytest.raises(ValidationError, match="ttl_s"):
            RemoteTierConfig(url="redis://localhost", ttl_s=seconds)
    with pytest.raises(ValueError, match="master_key"):
        open_store(on_disk(tmp_path, master_key=b"short"))
