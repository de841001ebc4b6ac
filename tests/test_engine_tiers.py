"""The engine on several tiers: layers that are read while others compute, and what can go wrong meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig, StoreConfig
from cachecraft_rag.config import EncodeConfig
from cachecraft_rag.store import TieredStore
from tests.conftest import passage, rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

WAIT_S = 20


def engine_on(folder: Path, **store: Any) -> CacheCraftEngine:
    config = EngineConfig(
        store=StoreConfig.model_validate({"disk": {"path": str(folder)}, **store}),
        encode=EncodeConfig(sensitivity="inline"),
        recompute=RecomputeConfig(ratio=0.3),
        max_new_tokens=6,
    )
    return CacheCraftEngine(make("llama"), byte_level(), config)


def only_on_disk(engine: CacheCraftEngine) -> None:
    """Leave nothing in memory."""
    assert isinstance(engine.store, TieredStore)
    engine.store.flush()
    for tier in engine.store.tiers.memory:
        tier.clear()


@pytest.mark.parametrize("load_ahead", [0, 1, 4])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_chunks_read_layer_by_layer_answer_as_chunks_in_memory(tmp_path: Path, load_ahead: int, ratio: float) -> None:
    recompute = RecomputeConfig(ratio=ratio)
    with engine_on(tmp_path, load_ahead=load_ahead) as engine:
        engine.warm(rag_prompt(1, 2, 3).chunks)
        expected = engine.generate(rag_prompt(3, 1, 2), recompute=RecomputeConfig(ratio=0.3))
        if ratio != 0.3:
            engine.invalidate()
            engine.warm(rag_prompt(1, 2, 3).chunks)
            expected = engine.generate(rag_prompt(3, 1, 2), recompute=recompute)
            engine.invalidate()
            engine.warm(rag_prompt(1, 2, 3).chunks)
        only_on_disk(engine)
        found = engine.generate(rag_prompt(3, 1, 2), recompute=recompute)
        assert found.stats.hits_by_tier == {"disk": 3}
        assert found.stats.bytes_loaded > 0
        assert found.token_ids == expected.token_ids
        again = engine.generate(rag_prompt(2, 3, 1), recompute=RecomputeConfig(ratio=0.3))
        assert again.stats.hits_by_tier == {"cold": 3}  # settled in memory


def test_an_entry_damaged_behind_its_header_is_a_miss_and_the_answer_stays_right(tmp_path: Path) -> None:
    with engine_on(tmp_path) as engine:
        expected = engine.generate(rag_prompt(1, 2)).token_ids
        only_on_disk(engine)
        path = max(tmp_path.rglob("*.kv"), key=lambda file: file.stat().st_mtime)
        shard = bytearray(path.read_bytes())
        shard[-100] ^= 8  # in the last layer, which is read when the others have computed
        path.write_bytes(shard)
        result = engine.generate(rag_prompt(1, 2))
        assert result.token_ids == expected
        assert (result.stats.chunk_hits, result.stats.chunk_misses) == (1, 1)
        engine.store.flush()
        assert engine.store.stats().tiers[1].corrupt == 1
        assert engine.generate(rag_prompt(1, 2)).stats.chunk_hits == 2


def test_an_abandoned_answer_leaves_its_chunks_in_memory(tmp_path: Path) -> None:
    with engine_on(tmp_path) as engine:
        engine.warm(rag_prompt(1).chunks)
        only_on_disk(engine)
        stream = engine.stream(rag_prompt(1))
        next(stream)
        stream.close()
        assert engine.generate(rag_prompt(1)).stats.hits_by_tier == {"cold": 1}


def test_chunks_are_computed_where_loading_would_take_longer(tmp_path: Path) -> None:
    with engine_on(tmp_path) as engine:
        expected = engine.generate(rag_prompt(1, 2))
        only_on_disk(engine)
        engine.generate(rag_prompt(1))  # measures the disk
        only_on_disk(engine)
        engine.store.computed(10**9, 1e-9)
        result = engine.generate(rag_prompt(1, 2))
        assert (result.stats.loads_declined, result.stats.chunk_misses) == (2, 2)
        assert result.token_ids == expected.token_ids
        assert engine.store.stats().tiers[1].declined >= 2
        assert engine.generate(rag_prompt(2, 1)).stats.hits_by_tier == {"cold": 2}
    with engine_on(tmp_path, compute_if_faster=False) as patient:
        patient.generate(rag_prompt(1))
        patient.store.computed(10**9, 1e-9)
        assert patient.generate(rag_prompt(2)).stats.hits_by_tier == {"disk": 1}


def test_prefetched_chunks_are_in_memory_when_the_question_comes(tmp_path: Path) -> None:
    with engine_on(tmp_path) as engine:
        engine.warm(rag_prompt(1, 2).chunks)
        only_on_disk(engine)
        assert engine.prefetch([*rag_prompt(1, 2).chunks, passage(9)]) == 2
        assert isinstance(engine.store, TieredStore)
        for _ in range(WAIT_S * 100):
            if len(engine.store.tiers[0]) == 2:
                break
            threading.Event().wait(0.01)
        assert engine.generate(rag_prompt(1, 2)).stats.hits_by_tier == {"cold": 2}
        assert engine.prefetch(rag_prompt(1, 2).chunks) == 0


def test_pins_are_gone_after_an_answer_and_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_on(tmp_path) as engine:
        engine.generate(rag_prompt(1))
        (key,) = engine.store.variants(engine.library.keys("default").chunk(engine.prompts.encode_chunk(passage(1))))
        assert engine.store.pin_count(key) == 0
        held: list[int] = []

        def fail(*args: object) -> None:
            held.append(engine.store.pin_count(key))
            raise RuntimeError("no memory")

        monkeypatch.setattr("cachecraft_rag.prefiller.assemble", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.generate(rag_prompt(1))
        assert held == [1]
        assert engine.store.pin_count(key) == 0


def test_static_chunks_outlive_their_time(tmp_path: Path) -> None:
    with engine_on(tmp_path, hot={"size": "1MiB", "ttl_s": 1e-9}, warm={"size": "1MiB", "ttl_s": 1e-9}) as engine:
        engine.warm([passage(1)], static=True)
        engine.warm([passage(2)])
        engine.store.flush()
        tiers = engine.generate(rag_prompt(1, 2)).stats.hits_by_tier
        assert tiers["hot"] == 1
        assert "warm" not in tiers


def test_many_requests_at_once_read_a_chunk_once(tmp_path: Path) -> None:
    with engine_on(tmp_path) as engine:
        expected = engine.generate(rag_prompt(1, 2)).token_ids
        only_on_disk(engine)
        answers: list[tuple[int, ...]] = []
        threads = [
            threading.Thread(target=lambda: answers.append(engine.generate(rag_prompt(1, 2)).token_ids))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [expected] * 8
        disk = engine.store.stats().tiers[1]
        once = sum(info.nbytes for info in engine.store.entries() if info.tier == "disk")
        assert 0 < disk.bytes_loaded <= once


def test_a_prompt_may_name_a_chunk_twice(tmp_path: Path) -> None:
    prompt = RagPrompt(system="Be brief.", chunks=(passage(1), passage(2), passage(1)), question="Which?")
    with engine_on(tmp_path) as engine:
        expected = engine.generate(prompt).token_ids
        only_on_disk(engine)
        result = engine.generate(prompt)
        assert result.stats.hits_by_tier == {"disk": 3}
        assert result.token_ids == expected


@pytest.mark.parametrize("precision", ["model", "k16v8", "int8", "int4"])
def test_only_entries_that_kept_every_bit_are_exact(tmp_path: Path, precision: str) -> None:
    prompt, everything = rag_prompt(1, 2), RecomputeConfig(ratio=1.0)
    disk = {"path": str(tmp_path), "precision": precision}
    with engine_on(tmp_path, disk=disk) as engine:
        reference = engine.generate(prompt, reuse=False)
        assert engine.generate(prompt, recompute=everything).token_ids == reference.token_ids
        for _ in range(2):  # from disk, and from the memory it was brought to
            again = engine.generate(prompt, recompute=everything)
            assert again.token_ids == reference.token_ids
            only_on_disk(engine)
        found = engine.generate(prompt, recompute=RecomputeConfig(ratio=0.0))
        assert found.stats.chunk_hits == 2
    with engine_on(tmp_path, disk=disk) as other:
        first = other.generate(prompt, recompute=everything)
        assert first.token_ids == reference.token_ids
        assert (first.stats.recomputed_tokens > 0) == (precision != "model")


def test_a_document_is_forgotten_with_all_its_chunks_by_any_process_that_shares_the_disk(tmp_path: Path) -> None:
    lease, letter = [passage(1), passage(2)], [passage(3)]
    with engine_on(tmp_path) as first:
        first.warm(lease, document_id="lease.pdf")
        first.warm(letter, document_id="letter.pdf")
        first.register([passage(4)], document_id="lease.pdf")
        first.generate(rag_prompt(4))
    with engine_on(tmp_path) as second:
        # Its three chunks, and the letter's, which was computed behind two of them.
        assert second.invalidate(document_ids=["nobody's", "lease.pdf"]) == 4
        assert second.invalidate(document_ids=["lease.pdf"]) == 0
        stats = second.generate(rag_prompt(1, 2, 3, 4)).stats
        assert (stats.chunk_hits, stats.chunk_misses) == (0, 4)
        second.register(letter, document_id="letter.pdf", namespace="other tenant")
        assert second.invalidate(document_ids=["letter.pdf"], namespace="other tenant") == 0
        assert second.generate(rag_prompt(3)).stats.chunk_hits == 1


def test_invalidating_a_document_without_a_shared_tier_works_within_the_process(make_engine: Any) -> None:
    engine = make_engine(encode={"behind": "passages"})
    engine.warm([passage(1)], document_id="a")
    engine.warm([passage(2)])
    assert engine.invalidate(document_ids=["a"]) == 1
    assert engine.generate(rag_prompt(1, 2)).stats.chunk_hits == 1
    with pytest.raises(ValueError, match="one string"):
        engine.invalidate(document_ids="a")
