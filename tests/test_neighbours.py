"""Which chunks are most alike, and what carries their traces."""

from __future__ import annotations

import math

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig, RecomputeConfig
from cachecraft_rag.config import EncodeConfig
from cachecraft_rag.forgetting import Forgetting
from cachecraft_rag.keys import ChunkKey, KeyMaker
from cachecraft_rag.neighbours import Neighbours, _cosines, _counted
from cachecraft_rag.store import MemoryStore
from tests.conftest import EngineMaker, passage, rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

LEASE, RENT, COOK, SEA = (1, 2, 3, 4), (1, 2, 3, 9), (5, 6, 7, 8), (5, 2, 20, 21)


def add(neighbours: Neighbours, ids: tuple[int, ...], model: str = "model", name: str = "", since: int = 0) -> None:
    neighbours.add(ChunkKey("default", name or str(ids), "canonical"), model, ids, since)


def known(*chunks: tuple[int, ...], max_chunks: int = 100) -> Neighbours:
    neighbours = Neighbours(MemoryStore(10**6), Forgetting(), max_chunks)
    for ids in chunks:
        add(neighbours, ids)
    return neighbours


def test_the_cosine_of_two_chunks_is_that_of_their_weights_by_hand() -> None:
    # Three chunks: 1 is in all of them (ln 4/3), 2 in two (ln 2), 3 and 4 in one each (ln 4). The last has 2 twice.
    own, second, third = _counted((1, 2, 3)), _counted((1, 4)), _counted((1, 2, 2))
    all_, two, one, twice = math.log(4 / 3), math.log(2), math.log(4), 1 + math.log(2)
    length = math.sqrt(all_**2 + two**2 + one**2)
    expected = [
        all_**2 / (length * math.sqrt(all_**2 + one**2)),
        (all_**2 + two * twice * two) / (length * math.sqrt(all_**2 + (twice * two) ** 2)),
    ]
    assert _cosines(own, [second, third]).tolist() == pytest.approx(expected)


def test_the_nearest_are_those_that_share_most_and_rarest_tokens_best_first() -> None:
    neighbours = known(COOK, SEA, RENT, LEASE)
    assert list(neighbours.nearest("default", "model", LEASE, 100)) == [str(RENT), str(SEA)]


def test_no_more_are_given_than_hold_the_tokens_wanted() -> None:
    others = [(1, 2, 3, *range(100 * n, 100 * n + 5 * n)) for n in range(1, 6)]
    neighbours = known(*others)
    assert list(neighbours.nearest("default", "model", LEASE, 8)) == [str(others[0]), str(others[1])]
    assert len(neighbours.nearest("default", "model", LEASE, 10**6)) == 5
    assert neighbours.nearest("default", "model", LEASE, 0) == {}


def test_a_chunk_and_its_other_forms_are_no_neighbours_of_it() -> None:
    long = tuple(range(100))
    neighbours = known(long, (*long, 500), RENT)
    assert list(neighbours.nearest("default", "model", long, 100)) == [str(RENT)]


def test_chunks_of_other_namespaces_and_models_are_no_neighbours() -> None:
    neighbours = known(RENT)
    assert neighbours.nearest("other", "model", LEASE, 100) == {}
    assert neighbours.nearest("default", "another model", LEASE, 100) == {}


def test_the_chunks_used_longest_ago_are_forgotten_first() -> None:
    neighbours = known(RENT, SEA, max_chunks=2)
    add(neighbours, RENT)
    add(neighbours, COOK)
    assert sorted(neighbours.nearest("default", "model", SEA, 100)) == sorted([str(COOK), str(RENT)])
    add(neighbours, SEA)
    assert list(neighbours.nearest("default", "model", LEASE, 100)) == [str(SEA)]


def test_with_room_for_none_nothing_is_remembered() -> None:
    assert known(RENT, SEA, max_chunks=0).nearest("default", "model", LEASE, 100) == {}


def test_a_forgotten_chunk_is_nobodys_neighbour_for_any_model() -> None:
    neighbours = known(RENT, SEA)
    add(neighbours, RENT, "another model", "its name there")
    neighbours.forget("default", {str(RENT)}, "canonical")
    assert list(neighbours.nearest("default", "model", LEASE, 100)) == [str(SEA)]
    assert neighbours.nearest("default", "another model", LEASE, 100) == {}
    neighbours.clear("default")
    assert neighbours.nearest("default", "model", LEASE, 100) == {}


def test_chunks_given_before_something_was_forgotten_are_not_remembered() -> None:
    forgetting = Forgetting()
    neighbours = Neighbours(MemoryStore(10**6), forgetting)
    since = forgetting.count("default")
    with forgetting.forgetting("default"):
        neighbours.forget("default", {str(RENT)}, "canonical")
    add(neighbours, RENT, since=since)
    assert neighbours.nearest("default", "model", LEASE, 100) == {}


def stored_values(engine: CacheCraftEngine, number: int, keys: KeyMaker | None = None) -> torch.Tensor:
    keys = keys or engine.library.keys("default")
    token_ids = engine.prompts.encode_chunk(passage(number))
    stored = engine.store.get(keys.key(token_ids, engine.library._encoder.context))
    assert stored is not None
    return stored.values


def test_a_chunk_warmed_with_others_is_computed_behind_those_most_like_it(make_engine: EngineMaker) -> None:
    engine = make_engine()
    encoder, texts = engine.library._encoder, [passage(number) for number in range(1, 6)]
    ids = [engine.prompts.encode_chunk(text) for text in texts]
    engine.warm(texts)
    model = engine.fingerprint
    for number, own in enumerate(ids, 1):
        nearest = engine.library._neighbours.nearest("default", model, own, encoder.neighbour_tokens)
        assert 1 < len(nearest) < len(texts)
        expected = encoder.encode(own, True, list(nearest.values())).values
        torch.testing.assert_close(stored_values(engine, number), expected)
        alone = encoder.encode(own, True).values
        assert not torch.allclose(alone, expected, atol=1e-3)


def test_after_an_answer_a_new_chunk_is_measured_behind_those_it_was_asked_with(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.2)
    engine.generate(rag_prompt(1, 2, 3))
    encoder = engine.library._encoder
    own, *others = (engine.prompts.encode_chunk(passage(number)) for number in (1, 2, 3))
    expected = [encoder.encode(own, True, order).values for order in (others, others[::-1])]
    found = stored_values(engine, 1)
    assert any(torch.allclose(found, values, atol=1e-5) for values in expected)


@pytest.mark.parametrize("behind", ["none", "chat_head", "prefix", "passages"])
def test_behind_anything_else_chunks_do_not_depend_on_each_other(make_engine: EngineMaker, behind: str) -> None:
    encode = EncodeConfig.model_validate({"behind": behind})
    together, apart = make_engine(encode=encode), make_engine(encode=encode)
    together.warm([passage(1), passage(2)])
    apart.warm([passage(1)])
    assert torch.equal(stored_values(together, 1), stored_values(apart, 1))


def test_forgetting_a_chunk_drops_what_was_computed_behind_it() -> None:
    store = MemoryStore(10**9)
    model, config = make("llama"), EngineConfig(max_new_tokens=1)
    with CacheCraftEngine(model, byte_level(), config, store) as engine:
        engine.warm([passage(1), passage(2)])
        engine.warm([passage(3)], namespace="other")
        assert engine.is_stored([passage(1), passage(2)]) == [True, True]
        assert engine.invalidate([passage(1)]) == 2
        assert engine.is_stored([passage(1), passage(2)]) == [False, False]
        assert engine.is_stored([passage(3)], namespace="other") == [True]
        engine.warm([passage(2)])
        alone = engine.library._encoder.encode(engine.prompts.encode_chunk(passage(2)), True).values
        assert torch.equal(stored_values(engine, 2), alone)


def test_another_process_that_forgets_a_document_drops_what_was_computed_behind_it() -> None:
    store = MemoryStore(10**9)
    model, config = make("llama"), EngineConfig(max_new_tokens=1)
    first = CacheCraftEngine(model, byte_level(), config, store)
    first.warm([passage(1)], document_id="lease")
    first.warm([passage(2)], document_id="manual")
    second = CacheCraftEngine(model, byte_level(), config, store)
    assert second.invalidate(document_ids=["lease"]) == 2
    assert first.is_stored([passage(1), passage(2)]) == [False, False]
    first.close()


def test_the_document_of_a_chunk_that_others_are_computed_behind_before_its_turn_is_known() -> None:
    store = MemoryStore(10**9)
    with CacheCraftEngine(make("llama"), byte_level(), EngineConfig(max_new_tokens=1), store) as engine:
        engine.register([passage(2)], document_id="manual")
        engine.library.introduce([passage(2)], "default")  # as while a window of texts is being warmed
        engine.warm([passage(1)])
        other = CacheCraftEngine(engine.model, byte_level(), EngineConfig(max_new_tokens=1), store)
        assert other.invalidate(document_ids=["manual"]) == 1
        assert engine.is_stored([passage(1)]) == [False]


def test_entries_computed_behind_a_chunk_are_found_under_their_context_alone() -> None:
    store = MemoryStore(10**6)
    neighbours = Neighbours(store, Forgetting())
    neighbours.note(ChunkKey("default", "a", "canonical"), ["b"])
    assert store.documents.chunks("default", "\0alike b canonical") == {"a"}
    assert neighbours.forget("default", {"b"}, "another") == 0
    assert store.documents.chunks("default", "\0alike b canonical") == {"a"}
    assert neighbours.forget("default", {"b"}, "canonical") == 0  # noted, and never stored
    assert store.documents.chunks("default", "\0alike b canonical") == set()


def test_kv_behind_chunks_that_stand_before_it_is_nearer_to_that_of_the_prompt(make_engine: EngineMaker) -> None:
    errors = {}
    for behind in ("passages", "neighbours"):
        engine = make_engine(encode=EncodeConfig.model_validate({"behind": behind}))
        engine.warm([passage(number) for number in (1, 2, 3)])
        request = engine._request(rag_prompt(1, 2, 3), RecomputeConfig(ratio=0.0), None, None, {})
        engine.prefill(request, reuse=False)
        assert request.kv is not None
        spans = request.encoded.spans[1:]
        true = [request.kv.slice(span.start, span.end)[1] for span in spans]
        stored = [stored_values(engine, number) for number in (2, 3)]
        errors[behind] = sum(float((a - b).square().sum()) for a, b in zip(true, stored, strict=True))
    assert errors["neighbours"] < 0.9 * errors["passages"]
