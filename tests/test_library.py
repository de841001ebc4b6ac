"""What the library keeps of chunks, and under which key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig, StoreConfig
from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.encoder import ChunkEncoder
from cachecraft_rag.store import MemoryStore
from tests.conftest import EngineMaker, passage, prefill_logits, rag_prompt
from tests.tiny_models import make, rope
from tests.tiny_tokenizers import byte_level


@pytest.mark.parametrize("precision", ["model", "int8", "k16v8"])
def test_kv_of_its_true_place_is_never_averaged_with_that_of_another(precision: str) -> None:
    store: dict[str, Any] = {"warm": {"size": 2**26, "precision": precision}, "device_size": 2**26}
    config = EngineConfig(store=StoreConfig.model_validate(store), max_new_tokens=4)
    with CacheCraftEngine(make("llama"), byte_level(), config) as engine:
        prompt = rag_prompt(1, 2)
        engine.generate(prompt, recompute=RecomputeConfig(ratio=1.0))
        request = engine._request(prompt, None, None, None, {})
        engine.prefill(request, reuse=False)
        assert request.kv is not None
        true_keys = request.kv.keys[:, 0].clone()
        engine.generate(prompt)
        engine.generate(prompt)
        for chunk, span in zip(
            engine.library.look_up(request.encoded, engine.library.keys("default")), request.encoded.spans, strict=True
        ):
            assert chunk.chunk_kv is not None
            assert chunk.key == chunk.exact_key
            keys, expected = chunk.chunk_kv.complete().keys, true_keys[:, :, span.start : span.end]
            assert (keys - expected).norm() < 0.02 * expected.norm()


def test_a_stored_chunk_can_be_made_static_and_is_measured_then() -> None:
    store = MemoryStore(10**9)
    config = EngineConfig(recompute=RecomputeConfig(policy="chunk_start"), max_new_tokens=1)
    with CacheCraftEngine(make("llama"), byte_level(), config, store) as engine:
        engine.generate(rag_prompt(1))
        (before,) = store.entries()
        assert not before.static
        assert engine.warm([passage(1)], static=True) == 0
        (after,) = store.entries()
        assert after.static
        stored = store.get(after.key)
        assert stored is not None
        assert stored.sensitivity is not None


def test_a_chunk_is_not_computed_beyond_where_the_rotation_is_fixed() -> None:
    model = make("llama", max_position_embeddings=512, **rope("dynamic", factor=4.0))
    config = EngineConfig(max_new_tokens=4, context_window=2048, recompute=RecomputeConfig(policy="none", ratio=0.0))
    with CacheCraftEngine(model, byte_level(), config) as engine:
        longest = 511 - engine.library.capability.context_tokens
        short, long = passage(1, 4), passage(2, 14)
        lengths = [len(engine.prompts.encode_chunk(text)) for text in (short, long)]
        assert lengths[0] < longest < lengths[1] < 511
        assert engine.warm([short, long]) == 1
        assert engine.is_stored([short, long]) == [True, False]
        with pytest.warns(UserWarning, match="what chunks are computed behind"):
            stats = engine.generate(RagPrompt(chunks=(long,), question="What ends first?")).stats
        assert stats.prefilled_tokens == stats.prompt_tokens


def test_a_long_prompt_does_not_make_another_model_of_one_that_stretches_its_rotation() -> None:
    model = make("llama", max_position_embeddings=512, **rope("dynamic", factor=4.0))
    with CacheCraftEngine(model, byte_level(), EngineConfig(max_new_tokens=2, context_window=4096)) as engine:
        engine.warm([passage(1, 4)])
        before = engine.fingerprint
        with pytest.warns(UserWarning, match="rotary frequencies"):
            engine.generate(rag_prompt(*range(2, 9)))
        assert engine.fingerprint == before
        assert engine.is_stored([passage(1, 4)]) == [True]


def test_nothing_is_kept_of_a_warming_that_the_engine_was_closed_in(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    encode = ChunkEncoder.encode

    def close_first(*arguments: Any, **options: Any) -> Any:
        chunk_kv = encode(*arguments, **options)
        engine.close()
        return chunk_kv

    monkeypatch.setattr(ChunkEncoder, "encode", close_first)
    store = engine.store
    assert engine.warm([passage(1), passage(2)]) == 0
    assert store.nbytes == 0


def test_measuring_kv_of_another_place_is_refused(make_engine: EngineMaker) -> None:
    engine = make_engine()
    engine.warm([passage(1)])
    (entry,) = engine.store.entries()
    chunk_kv = engine.store.get(entry.key)
    assert chunk_kv is not None
    moved = type(chunk_kv)(chunk_kv.keys, chunk_kv.values, chunk_kv.token_ids, chunk_kv.base + 1)
    with pytest.raises(ValueError, match="chunk_kv: its base is"):
        engine.library._encoder.measure(moved)
    assert torch.equal(chunk_kv.keys, moved.keys)


def test_warming_chunks_that_fit_leaves_all_of_them_stored(make_engine: EngineMaker) -> None:
    engine = make_engine()
    engine.warm([passage(1)])
    size = engine.store.nbytes
    with CacheCraftEngine(
        make("llama"), byte_level(), EngineConfig.model_validate({"store": {"cold": {"size": 4 * size}}})
    ) as small:
        small.warm([passage(n) for n in (1, 2, 3)])
        wanted = [passage(n) for n in (1, 4, 5)]  # the first is the longest unused, and there already
        small.warm(wanted)
        assert small.is_stored(wanted) == [True] * 3


@pytest.mark.parametrize("by_request", [True, False])
def test_a_chunk_in_whose_computation_the_weights_changed_is_not_stored_as_of_either(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch, by_request: bool
) -> None:
    engine, other = make_engine(ratio=0.0), make_engine(ratio=0.0)
    encode, weight = ChunkEncoder.encode, engine.model.get_input_embeddings().weight
    num_changes = 0

    def changing(encoder: ChunkEncoder, *arguments: Any, **options: Any) -> ChunkKV:
        nonlocal num_changes
        made = encode(encoder, *arguments, **options)
        if num_changes == 0:
            num_changes += 1
            with torch.no_grad():
                weight.mul_(1.5)
        return made

    before = weight.detach().clone()
    monkeypatch.setattr(ChunkEncoder, "encode", changing)
    if by_request:
        engine.generate(rag_prompt(1))
        assert not any(engine.library.is_stored([passage(1)], "default"))
    else:
        engine.register([passage(1)], document_id="lease")
        assert engine.warm([passage(1), passage(2)]) == 2
        assert all(engine.library.is_stored([passage(1), passage(2)], "default"))
        stored = {entry.key.chunk for entry in engine.store.entries()}
        assert len(engine.store.documents.chunks("default", "lease") & stored) == 1
    with torch.no_grad():
        weight.copy_(before)
    assert not any(engine.library.is_stored([passage(1), passage(2)], "default"))
    torch.testing.assert_close(prefill_logits(engine, rag_prompt(1, 2))[0], prefill_logits(other, rag_prompt(1, 2))[0])


def test_a_chunk_in_whose_measurement_the_weights_changed_stays_unmeasured(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, measure = make_engine(ratio=0.2), ChunkEncoder.measure
    weight = engine.model.get_input_embeddings().weight
    num_calls = 0

    def changing(encoder: ChunkEncoder, *arguments: Any) -> ChunkKV:
        nonlocal num_calls
        num_calls += 1
        measured = measure(encoder, *arguments)
        with torch.no_grad():
            weight.mul_(1.01)
        return measured

    monkeypatch.setattr(ChunkEncoder, "measure", changing)
    engine.generate(rag_prompt(1, 2))
    stored = [engine.store.get(entry.key) for entry in engine.store.entries()]
    assert num_calls > 0
    assert len(stored) == 2
    assert all(chunk_kv is not None and chunk_kv.sensitivity is None for chunk_kv in stored)
