"""Several tiers as one store."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.errors import StoreUnavailableError
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store import ChunkStore, DiskStore, EntryCodec, MemoryStore, TieredStore
from cachecraft_rag.store_config import Precision
from tests.store_entries import FakeClock, entry, held, is_same, key

WAIT_S = 20


def memory(room: int, name: str, **options: Any) -> MemoryStore:
    """A tier with room for so many entries."""
    return MemoryStore(room * entry().nbytes, name=name, **options)


def found_in(store: ChunkStore, chunk: str) -> str | None:
    """Name of the tier that has a chunk."""
    found = store.get_with_tier(key(chunk))
    return None if found is None else found[1]


def wide_entry() -> ChunkKV:
    """An entry large enough for lower precision to pay."""
    return ChunkKV(torch.randn(2, 2, 128, 64), torch.randn(2, 2, 128, 64), tuple(range(128)), 0)


class GatedStore(MemoryStore):
    """A slow persistent tier: what it does waits until the gate is opened."""

    is_persistent: ClassVar[bool] = True

    def __init__(self, room: int = 100) -> None:
        super().__init__(room * entry().nbytes, name="gated")
        self.gate, self.entered = threading.Event(), threading.Event()
        self.puts: list[ChunkKey] = []

    def put(self, key: ChunkKey, chunk_kv: ChunkKV, *, static: bool = False, cfo: float = 0.0) -> bool:
        self.entered.set()
        assert self.gate.wait(WAIT_S), "nobody opened the gate"
        self.puts.append(key)
        return super().put(key, chunk_kv, static=static, cfo=cfo)


class BrokenStore(MemoryStore):
    """A tier that raises whatever is asked of it."""

    is_persistent: ClassVar[bool] = True

    def get(self, key: ChunkKey) -> ChunkKV | None:
        raise StoreUnavailableError("broken")

    def put(self, key: ChunkKey, chunk_kv: ChunkKV, *, static: bool = False, cfo: float = 0.0) -> bool:
        raise OSError(28, "no space left")


def test_an_entry_is_demoted_tier_by_tier_and_promoted_when_it_is_used() -> None:
    store = TieredStore([memory(1, "hot"), memory(1, "warm"), memory(1, "cold")])
    for chunk in "abc":
        store.put(key(chunk), entry(of=key(chunk)))
        store.flush()
    assert [held(tier, *"abc") for tier in store.tiers] == [["c"], ["b"], ["a"]]
    assert found_in(store, "a") == "cold"
    store.flush()
    assert [held(tier, *"abc") for tier in store.tiers] == [["a"], ["c"], ["b"]]
    assert is_same(store.get(key("b")), entry(of=key("b")))
    store.put(key("d"), entry())
    store.flush()
    assert held(store, *"abcd") == ["a", "b", "d"]
    hot, warm, cold = store.stats().tiers
    assert (hot.demotions, warm.demotions, cold.demotions, cold.evictions) == (5, 4, 0, 1)
    assert cold.hits == 2


def test_precision_falls_with_the_tier() -> None:
    sizes = {}
    precisions: Sequence[Precision] = ("model", "k16v8", "int8", "int4")
    for precision in precisions:
        wide = wide_entry()
        store = TieredStore([MemoryStore(wide.nbytes, name="warm"), MemoryStore(10**7, "cold", precision=precision)])
        store.put(key("a"), wide)
        store.put(key("b"), wide)
        store.flush()
        sizes[precision] = store.tiers[1].nbytes
        again = store.get(key("a"))
        assert again is not None
        error = float((again.keys - wide.keys).abs().max())
        assert error == 0 if precision in ("model", "k16v8") else 0 < error < 0.5
    assert sizes["model"] > sizes["k16v8"] > sizes["int8"] > sizes["int4"]


def test_an_entry_is_lowered_where_it_is_when_it_is_old_and_memory_is_short() -> None:
    clock = FakeClock()
    wide = wide_entry()
    tier = MemoryStore(4 * wide.nbytes, "cold", demote_after_s=60, demote_to="int4", clock=clock)
    store = TieredStore([tier])
    for chunk in "abcd":
        clock.now += 20
        store.put(key(chunk), wide)
    store.flush()
    assert tier.stats().lowered == 1  # "a", in the background, because little was left
    clock.now += 20
    store.put(key("e"), wide)
    store.flush()
    assert tier.stats().lowered == 2
    assert held(store, *"abcde") == list("abcde")
    assert tier.nbytes <= tier.capacity_bytes
    lowered, whole = store.get(key("b")), store.get(key("c"))
    assert lowered is not None
    assert whole is not None
    assert not torch.equal(lowered.keys, wide.keys)
    assert torch.equal(whole.keys, wide.keys)
    store.close()


def test_entries_are_lowered_before_any_is_pushed_out() -> None:
    clock = FakeClock()
    wide = wide_entry()
    tier = MemoryStore(3 * wide.nbytes, "cold", demote_after_s=60, demote_to="int4", clock=clock)
    for chunk in "abc":
        tier.put(key(chunk), wide)
    tier.put(key("static"), wide, static=True)
    assert held(tier, *"abc", "static") == ["b", "c", "static"], "nothing is old yet"
    clock.now += 61
    tier.put(key("d"), wide)
    assert held(tier, *"bcd", "static") == ["b", "c", "d", "static"]
    assert tier.stats().lowered == 2
    static = tier.get(key("static"))
    assert static is not None
    assert torch.equal(static.keys, wide.keys)


def test_a_put_waits_for_no_slow_tier_and_what_waits_is_found() -> None:
    slow = GatedStore()
    store = TieredStore([memory(1, "hot"), slow])
    for chunk in "abc":
        assert store.put(key(chunk), entry(of=key(chunk)))
    assert slow.entered.wait(WAIT_S)
    assert len(slow) == 0
    for chunk in "abc":
        assert is_same(store.get(key(chunk)), entry(of=key(chunk)))
        assert store.contains(key(chunk))
    slow.gate.set()
    store.flush()
    assert held(slow, *"abc") == ["a", "b", "c"]


def test_closing_writes_what_is_waiting(tmp_path: Path) -> None:
    store = TieredStore([memory(100, "hot"), DiskStore(tmp_path, 10**7)])
    for number in range(30):
        store.put(key(str(number)), entry(of=key(str(number))))
    store.close()
    again = TieredStore([memory(100, "hot"), DiskStore(tmp_path, 10**7)])
    assert all(is_same(again.get(key(str(number))), entry(of=key(str(number)))) for number in range(30))
    assert again.stats().tiers[1].hits == 30
    assert found_in(again, "7") == "hot"


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_what_was_removed_on_its_way_does_not_come_back(how: str) -> None:
    slow = GatedStore()
    store = TieredStore([memory(1, "hot"), slow])
    for chunk in "ab":
        store.put(key(chunk), entry())
    assert slow.entered.wait(WAIT_S)  # "a" is being written, "b" waits
    remove: Callable[[], object] = store.clear
    if how == "remove":
        remove = lambda: [store.remove(key(chunk)) for chunk in "ab"]  # noqa: E731
    removing = threading.Thread(target=remove)
    removing.start()
    time.sleep(0.05)
    slow.gate.set()
    removing.join()
    store.flush()
    assert held(store, "a", "b") == []
    assert [store.get(key(chunk)) for chunk in "ab"] == [None, None]
    assert len(slow) == 0


def test_what_is_removed_while_it_is_promoted_does_not_come_back(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 10**7)
    disk.put(key("a"), entry())
    reading, removed = threading.Event(), threading.Event()
    original = disk.get

    def slow_get(key: ChunkKey) -> ChunkKV | None:
        found = original(key)
        reading.set()
        removed.wait(0.1)  # the removal must wait for this, so this cannot wait for the removal
        return found

    disk.get = slow_get  # type: ignore[method-assign]
    store = TieredStore([memory(5, "hot"), disk])
    getting = threading.Thread(target=store.get, args=(key("a"),))
    getting.start()
    assert reading.wait(WAIT_S)
    assert store.remove(key("a"))
    removed.set()
    getting.join()
    assert not store.contains(key("a"))
    assert store.get(key("a")) is None


def test_a_failing_tier_is_a_miss_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    broken, slow = BrokenStore(10**6, name="broken"), GatedStore()
    slow.gate.set()
    store = TieredStore([memory(1, "hot"), broken, slow])
    for chunk in "ab":
        assert store.put(key(chunk), entry(of=key(chunk)))
    store.flush()
    assert is_same(store.get(key("a")), entry(of=key("a")))
    assert store.get(key("z")) is None
    assert broken.stats().errors >= 3
    assert len(caplog.records) == 2  # one kind of failure for reading, one for writing


@pytest.mark.parametrize("admit_after", [1, 2, 3])
def test_persistent_tiers_get_what_was_used_often_enough(tmp_path: Path, admit_after: int) -> None:
    store = TieredStore([memory(10, "hot"), DiskStore(tmp_path, 10**7)], admit_after=admit_after)
    store.put(key("once"), entry())
    store.put(key("often"), entry())
    for use in range(2, 5):
        store.flush()
        assert store.tiers[1].contains(key("often")) == (use > admit_after)
        store.get(key("often"))
    store.flush()
    assert store.tiers[1].contains(key("often"))
    assert store.tiers[1].contains(key("once")) == (admit_after == 1)


def test_what_was_not_used_often_enough_is_dropped_when_it_is_pushed_out(tmp_path: Path) -> None:
    store = TieredStore([memory(1, "hot"), DiskStore(tmp_path, 10**7)], admit_after=2)
    for chunk in "ab":
        store.put(key(chunk), entry())
    store.flush()
    assert held(store, "a", "b") == ["b"]
    assert store.stats().tiers[0].demotions == 0


def test_what_only_a_remote_tier_has_is_written_to_the_disk_too(tmp_path: Path) -> None:
    disk, remote = DiskStore(tmp_path / "disk", 10**7), DiskStore(tmp_path / "remote", 10**7, name="remote")
    remote.put(key("a"), entry(of=key("a")))
    store = TieredStore([memory(2, "hot"), disk, remote])
    assert found_in(store, "a") == "remote"
    store.flush()
    assert is_same(disk.get(key("a")), entry(of=key("a")))


def test_more_than_may_wait_is_dropped_and_counted() -> None:
    slow = GatedStore()
    store = TieredStore([memory(100, "hot"), slow], max_waiting_bytes=2 * entry().nbytes)
    for number in range(6):
        store.put(key(str(number)), entry())
        assert slow.entered.wait(WAIT_S)
    slow.gate.set()
    store.flush()
    assert len(slow) == 3  # one that was being written, and two that waited
    assert slow.stats().dropped == 3
    assert len(held(store, *"012345")) == 6


def test_an_entry_too_large_for_memory_goes_to_the_disk(tmp_path: Path) -> None:
    store = TieredStore([memory(1, "hot"), memory(2, "cold"), DiskStore(tmp_path, 10**7)])
    assert store.put(key("a"), entry(20, of=key("a")))
    assert held(store.tiers[1], "a") == ["a"]
    assert store.put(key("b"), entry(100, of=key("b")))
    store.flush()
    assert is_same(store.get(key("b")), entry(100, of=key("b")))
    assert found_in(store, "b") == "disk"


def test_the_disk_holds_what_its_codec_says(tmp_path: Path) -> None:
    wide = wide_entry()
    disk = DiskStore(tmp_path, 10**7, EntryCodec(precision="int8", compression="zstd"))
    store = TieredStore([MemoryStore(10**7, "hot"), disk])
    store.put(key("a"), wide)
    store.flush()
    assert disk.nbytes < 0.4 * wide.nbytes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: TieredStore([]), "tiers: .* at least one"),
        (lambda path: TieredStore([memory(1, "a"), memory(1, "a")]), "with different names"),
        (lambda path: TieredStore([DiskStore(path, 1), memory(1, "a")]), "persistent ones last"),
        (lambda path: TieredStore([memory(1, "a")], admit_after=0), "admit_after: 0 is below 1"),
        (lambda path: TieredStore([memory(1, "a")], max_waiting_bytes=-1), "max_waiting_bytes: -1 is below 0"),
    ],
)
def test_a_useless_setting_is_refused(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path)


def test_statistics_show_a_row_for_every_tier() -> None:
    store = TieredStore([memory(2, "hot"), memory(2, "<warm>")])
    store.put(key("a"), entry())
    html = store.stats()._repr_html_()
    assert html.count("<tr>") == 4  # head, two tiers, the whole
    assert "<td>hot</td><td>1</td>" in html
    assert "&lt;warm&gt;" in html


def test_a_removal_does_not_look_through_all_keys_that_are_remembered() -> None:
    store = TieredStore([memory(2, "hot"), memory(2, "cold")])

    class Unlisted(OrderedDict[ChunkKey, Any]):
        def __iter__(self) -> Iterator[ChunkKey]:
            raise AssertionError("looked through")

    store._traits._traits = Unlisted()
    store.put(key("a"), entry(), static=True)
    assert store.remove(key("a"))
    assert not store._traits.of(key("a")).static
