"""How texts that pass by get to the engines."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from cachecraft_rag import CacheCraftEngine, ChunkFeed
from tests.conftest import EngineMaker, passage
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level


@pytest.fixture
def engine(make_engine: EngineMaker) -> CacheCraftEngine:
    return make_engine()


def known(engine: CacheCraftEngine, namespace: str = "default") -> list[int]:
    """Numbers of the passages that are looked for in a namespace's prompts."""
    return [n for n in range(1, 6) if engine.library.registry.find(passage(n), namespace)]


def test_a_subscriber_gets_what_is_added(engine: CacheCraftEngine) -> None:
    feed = ChunkFeed()
    feed.subscribe(engine)
    feed.add(passage(n) for n in (1, 2))
    feed.add([passage(3)])
    assert known(engine) == [1, 2, 3]


def test_a_late_subscriber_gets_the_latest_texts(engine: CacheCraftEngine) -> None:
    feed = ChunkFeed(max_texts=2)
    feed.add([passage(1), passage(2)])
    feed.add([passage(1), passage(3)])
    feed.subscribe(engine)
    assert known(engine) == [1, 3]


def test_every_namespace_that_subscribed_gets_the_texts_and_no_other(make_engine: EngineMaker) -> None:
    feed, engine, other = ChunkFeed(), make_engine(namespace="own"), make_engine()
    feed.add([passage(1)])
    feed.subscribe(engine)
    feed.subscribe(engine, "a")
    feed.subscribe(other, "b")
    feed.add([passage(2)])
    feed.subscribe(other, "late")
    assert [known(engine, name) for name in ("own", "a", "b", "default")] == [[1, 2], [1, 2], [], []]
    assert [known(other, name) for name in ("b", "late", "a", "default")] == [[1, 2], [1, 2], [], []]


def test_subscribing_again_brings_back_nothing_that_was_forgotten(engine: CacheCraftEngine) -> None:
    feed = ChunkFeed()
    feed.add([passage(1), passage(2)])
    feed.subscribe(engine)
    engine.invalidate([passage(1)])
    feed.subscribe(engine)
    feed.subscribe(engine, "default")
    assert known(engine) == [2]


def test_beyond_the_limit_whoever_asked_longest_ago_waits_for_its_next_turn(engine: CacheCraftEngine) -> None:
    feed = ChunkFeed(max_subscribers=2)
    for namespace in ("a", "b", "a", "c"):
        feed.subscribe(engine, namespace)
    feed.add([passage(1)])
    assert [known(engine, namespace) for namespace in ("a", "b", "c")] == [[1], [], [1]]
    feed.subscribe(engine, "b")
    assert known(engine, "b") == [1]


def test_a_feed_does_not_keep_an_engine_alive(make_engine: EngineMaker) -> None:
    feed, other = ChunkFeed(max_subscribers=2), make_engine()
    engine = CacheCraftEngine(make("llama"), byte_level())
    feed.subscribe(other)
    feed.subscribe(engine)
    gone = ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    feed.add([passage(1)])
    feed.subscribe(other, "a")  # takes the free place and not that of the first
    feed.add([passage(2)])
    assert known(other) == known(other, "a") == [1, 2]


def test_a_closed_engine_gets_nothing_more(make_engine: EngineMaker) -> None:
    feed, engine, other = ChunkFeed(), make_engine(), make_engine()
    feed.subscribe(engine)
    feed.subscribe(other)
    engine.close()
    feed.add([passage(1)])
    assert (known(engine), known(other)) == ([], [1])
    feed.subscribe(engine)  # harmless
    feed.add([passage(2)])
    assert 2 not in known(engine)


def test_one_string_is_refused() -> None:
    with pytest.raises(ValueError, match="texts: 'a text' is one string; give a list of strings"):
        ChunkFeed().add("a text")


@pytest.mark.parametrize("field", ["max_texts", "max_subscribers"])
def test_a_feed_for_nothing_is_refused(field: str) -> None:
    limits = {field: 0}
    with pytest.raises(ValueError, match=f"{field}: 0 is too small; give at least 1"):
        ChunkFeed(**limits)
