"""Loading from slow tiers: ahead of need, once, and only where it is quicker than computing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store import DiskStore, MemoryStore, TieredStore
from cachecraft_rag.store.loads import Loads
from cachecraft_rag.store.pace import Pace
from tests.store_entries import entry, held, is_same, key

WAIT_S = 20


def memory_before_disk(folder: Path, room: int = 10, **options: object) -> TieredStore:
    return TieredStore([MemoryStore(room * entry().nbytes), DiskStore(folder, 2**20)], **options)  # type: ignore[arg-type]


def only_on_disk(folder: Path, *chunks: str, **options: object) -> TieredStore:
    """A store that has chunks on its disk and nothing in memory."""
    store = memory_before_disk(folder, **options)
    for chunk in chunks:
        store.put(key(chunk), entry(of=key(chunk)))
    store.flush()
    store.tiers[0].clear()
    return store


def test_a_pace_follows_the_latest_measurements() -> None:
    pace = Pace()
    assert pace.s_per_token is None
    pace.add(100, 1.0)
    assert pace.s_per_token == pytest.approx(0.01)
    for _ in range(50):
        pace.add(100, 2.0)
    assert pace.s_per_token == pytest.approx(0.02, rel=0.02)


def test_loading_is_slow_only_when_both_were_measured_and_it_takes_longer() -> None:
    loads, load = Loads(0, compute_if_faster=True), Pace()
    assert not loads.is_slow(load)
    load.add(10, 1.0)
    assert not loads.is_slow(load)
    loads.computed(10, 2.0)
    assert not loads.is_slow(load)
    loads.computed(1000, 2.0)
    assert loads.is_slow(load)
    always = Loads(0, compute_if_faster=False)
    always.computed(1000, 2.0)
    assert not always.is_slow(load)


def test_one_of_sixteen_slow_loads_is_done_after_all() -> None:
    loads = Loads(0, compute_if_faster=True)
    assert [loads.is_declined() for _ in range(32)].count(False) == 2


def test_an_entry_that_is_found_stays_on_disk_until_it_is_settled(tmp_path: Path) -> None:
    store = only_on_disk(tmp_path, "a")
    found = store.find(key("a"))
    assert found is not None
    assert found.tier == "disk"
    assert found.kv is not None
    assert not found.kv.is_read
    assert held(store.tiers[0], "a") == []
    assert is_same(found.kv.complete(), entry(of=key("a")))
    store.settle(key("a"), found.kv, "disk")
    assert held(store.tiers[0], "a") == ["a"]
    again = store.find(key("a"))
    assert again is not None
    assert again.tier == "cold"
    store.close()


def test_what_is_being_read_is_read_by_all_together(tmp_path: Path) -> None:
    store = only_on_disk(tmp_path, "a")
    first, second = store.find(key("a")), store.find(key("a"))
    assert first is not None
    assert second is not None
    assert second.kv is first.kv
    assert first.kv is not None
    first.kv.complete()
    store.settle(key("a"), first.kv, "disk")
    store.settle(key("a"), first.kv, "disk")  # by the second request: nothing left to do
    assert store.tiers[1].stats().bytes_loaded > 0
    assert len(store.tiers[0]) == 1
    store.close()


@pytest.mark.parametrize("how", ["remove", "clear", "put"])
def test_what_was_removed_or_replaced_while_it_was_read_does_not_come_back(tmp_path: Path, how: str) -> None:
    store = only_on_disk(tmp_path, "a")
    found = store.find(key("a"))
    assert found is not None
    assert found.kv is not None
    newer = entry(of=key("a"), version=1)
    if how == "remove":
        store.remove(key("a"))
    elif how == "clear":
        store.clear("default")
    else:
        store.put(key("a"), newer)
    found.kv.complete()
    store.settle(key("a"), found.kv, "disk")
    store.flush()
    assert is_same(store.get(key("a")), newer if how == "put" else None)
    store.close()


def test_where_computing_is_quicker_an_entry_is_left_alone_and_counted(tmp_path: Path) -> None:
    store = only_on_disk(tmp_path, "a", "b")
    store.get(key("b"))  # measures the disk
    store.computed(10**9, 1e-9)
    found = store.find(key("a"))
    assert found is not None
    assert (found.tier, found.kv) == ("disk", None)
    disk = store.stats().tiers[1]
    assert disk.declined == 1
    assert store.find(key("nowhere")) is None
    assert store.get(key("a")) is not None  # who can't compute still gets it
    store.close()


def test_a_slow_computation_leaves_loading_as_it_is(tmp_path: Path) -> None:
    store = only_on_disk(tmp_path, "a", "b")
    store.get(key("b"))
    store.computed(1, 1000.0)
    found = store.find(key("a"))
    assert found is not None
    assert found.kv is not None
    assert store.stats().tiers[1].declined == 0
    store.close()


def test_prefetching_brings_entries_to_memory_and_says_how_many(tmp_path: Path) -> None:
    store = only_on_disk(tmp_path, "a", "b", "c")
    store.get(key("c"))
    assert store.prefetch([key("a"), key("b"), key("a"), key("c"), key("nowhere")]) == 2
    for _ in range(WAIT_S * 100):
        if held(store.tiers[0], "a", "b") == ["a", "b"]:
            break
        threading.Event().wait(0.01)
    assert held(store.tiers[0], "a", "b", "c") == ["a", "b", "c"]
    assert store.prefetch([key("a")]) == 0
    store.close()


def test_without_readers_nothing_is_prefetched(tmp_path: Path) -> None:
    store = only_on_disk(tmp_path, "a", load_ahead=0)
    assert store.readers is None
    assert store.prefetch([key("a")]) == 0
    in_memory = TieredStore([MemoryStore(1000, name="hot"), MemoryStore(1000, name="warm")])
    assert in_memory.readers is None
    store.close()
    in_memory.close()


def prefetch_until_refused(store: TieredStore, chunk: str) -> None:
    for _ in range(WAIT_S * 100):
        store.prefetch([key(chunk)])
        threading.Event().wait(0.01)


def test_a_request_does_not_wait_behind_what_is_prefetched_and_closing_gives_that_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = only_on_disk(tmp_path, *"abcdefgh")
    gate = threading.Event()
    read_by_prefetch: list[ChunkKey] = []
    read = store.tiers[1].get

    def slow_get(of: ChunkKey) -> ChunkKV | None:
        read_by_prefetch.append(of)
        assert gate.wait(WAIT_S), "nobody opened the gate"
        return read(of)

    monkeypatch.setattr(store.tiers[1], "get", slow_get)  # what a request wants is opened
    assert store.prefetch([key(chunk) for chunk in "abcdefg"]) == 7
    assert store.readers is not None
    (found,) = store.readers.map(store.find, [key("h")], timeout=WAIT_S)
    assert found is not None
    assert not gate.is_set()
    closing = threading.Thread(target=store.close)
    closing.start()
    with pytest.raises(RuntimeError, match="after shutdown"):
        prefetch_until_refused(store, "h")
    gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert len(read_by_prefetch) == 1
