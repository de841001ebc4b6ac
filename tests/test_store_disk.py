"""The tier on a disk: whole entries or none, within the budget, whoever else writes and whatever breaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachecraft_rag.store import DiskStore, EntryCodec
from tests.store_entries import ENTRY_BYTES, FakeClock, entry, held, is_same, key, real_bytes, shards

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE_BYTES = len("default")
KILLS = 50


def room(num_entries: int) -> int:
    """Budget for so many entries."""
    return num_entries * ENTRY_BYTES + NAMESPACE_BYTES


def run(hash_seed: int, *arguments: object) -> subprocess.Popen[str]:
    """Start ``tests.store_process``."""
    command = [sys.executable, "-m", "tests.store_process", *map(str, arguments)]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> int:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return int(output)


@contextmanager
def stopped(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Have processes stand still wherever they are, so that what they share can be measured."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGSTOP)
    for process in running:
        state = Path(f"/proc/{process.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] not in "TZ":
            time.sleep(0.0005)
    try:
        yield
    finally:
        for process in running:
            process.send_signal(signal.SIGCONT)


def test_entries_are_still_there_after_a_restart(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, room(10))
    for chunk in "abc":
        store.put(key(chunk), entry(of=key(chunk)))
    store.close()
    again = DiskStore(tmp_path, room(10))
    assert all(is_same(again.get(key(chunk)), entry(of=key(chunk))) for chunk in "abc")
    assert (len(again), again.nbytes) == (3, real_bytes(tmp_path))
    assert again.variants(key("a").chunk) == [key("a")]


def test_the_budget_holds_after_a_restart_with_a_smaller_one(tmp_path: Path) -> None:
    clock = FakeClock()
    store = DiskStore(tmp_path, room(8), clock=clock)
    for chunk in "abcdefgh":
        clock.now += 1
        store.put(key(chunk), entry())
    clock.now += 1
    assert store.get(key("b")) is not None
    again = DiskStore(tmp_path, room(3), clock=clock)
    assert held(again, *"abcdefgh") == ["b", "g", "h"]
    assert again.nbytes == real_bytes(tmp_path) <= room(3)
    clock.now += 1
    again.put(key("i"), entry())
    assert real_bytes(tmp_path) <= room(3)
    assert held(again, *"bghi") == ["b", "h", "i"]


def test_sizes_are_measured_not_remembered(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, room(10))
    store.put(key("a"), entry())
    with open(shards(tmp_path)[0], "ab") as file:
        file.write(bytes(1000))
    assert DiskStore(tmp_path, room(10)).nbytes == real_bytes(tmp_path) == room(1) + 1000


def test_stores_on_one_path_see_each_other(tmp_path: Path) -> None:
    one, other = DiskStore(tmp_path, room(4)), DiskStore(tmp_path, room(4))
    one.put(key("a"), entry(of=key("a")))
    assert is_same(other.get(key("a")), entry(of=key("a")))
    assert other.remove(key("a"))
    assert one.get(key("a")) is None
    assert not one.contains(key("a"))
    for number in range(8):
        (one, other)[number % 2].put(key(str(number)), entry())
        assert one.nbytes == other.nbytes == real_bytes(tmp_path) <= room(4)
    assert other.clear() == 4
    assert len(one) == 0


def test_an_entry_that_another_process_used_is_not_the_next_to_go(tmp_path: Path) -> None:
    clock = FakeClock()
    one, other = (DiskStore(tmp_path, room(3), clock=clock) for _ in range(2))
    for chunk in "abc":
        clock.now += 1
        one.put(key(chunk), entry())
    clock.now += 1
    assert other.get(key("a")) is not None
    one.put(key("d"), entry())
    assert held(one, *"abcd") == ["a", "c", "d"]


def test_what_another_process_used_does_not_expire(tmp_path: Path) -> None:
    clock = FakeClock()
    one, other = (DiskStore(tmp_path, room(3), clock=clock, ttl_s=60) for _ in range(2))
    for chunk in "ab":
        one.put(key(chunk), entry())
    clock.now += 40
    assert other.get(key("a")) is not None
    clock.now += 40
    assert held(one, "a", "b") == ["a"]
    assert one.stats().expired == 1


@pytest.mark.parametrize("first", [1, 2])
def test_two_processes_with_different_hash_seeds_hit_each_others_entries(tmp_path: Path, first: int) -> None:
    assert result(run(first, "put", "disk", tmp_path, 10**8, "one", 10)) == 10
    assert result(run(3 - first, "get", "disk", tmp_path, 10**8, "one", 10)) == 10


def test_processes_that_write_at_once_stay_within_the_budget(tmp_path: Path) -> None:
    writers = [run(seed, "put", "disk", tmp_path, room(6), f"writer {seed}", 60) for seed in range(2)]
    largest = 0
    while any(writer.poll() is None for writer in writers):
        with stopped(writers):
            largest = max(largest, real_bytes(tmp_path))
        time.sleep(0.003)
    assert [result(writer) for writer in writers] == [60, 60]
    assert room(3) < largest <= room(6)
    store = DiskStore(tmp_path, room(6))
    assert len(store) == 6
    assert store.nbytes == real_bytes(tmp_path)


def test_a_store_survives_writers_killed_at_any_moment_and_does_not_grow(tmp_path: Path) -> None:
    budget = 8 * sum(len(shard) for shard in EntryCodec().encode(key("a"), entry(1500)))
    assert result(run(0, "be_killed", "disk", tmp_path, budget, "nobody", KILLS)) == KILLS
    store = DiskStore(tmp_path, budget)
    assert store.nbytes == real_bytes(tmp_path) <= budget
    assert not list((tmp_path / "cachecraft-v1" / "tmp").iterdir())
    names = [key(f"{time_number} {number}") for time_number in range(KILLS) for number in range(40)]
    there = [name for name in names if store.contains(name)]
    assert len(there) == len(store) > 0
    assert all(is_same(store.get(name), entry(1500, of=name)) for name in there)
    assert store.stats().corrupt == 0
    assert store.put(key("after"), entry(of=key("after")))
    assert is_same(store.get(key("after")), entry(of=key("after")))


def test_readers_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path, 10**6), DiskStore(tmp_path, 10**6)
    store.put(key("a"), entry(of=key("a")))
    with store._writing, store._file_lock:
        waiting = threading.Thread(target=other.put, args=(key("b"), entry()))
        waiting.start()
        assert is_same(store.get(key("a")), entry(of=key("a")))
        assert is_same(other.get(key("a")), entry(of=key("a")))
        assert not other.contains(key("b"))
    waiting.join()
    assert other.contains(key("b"))


def test_names_of_any_kind_are_kept_apart(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10**6)
    names = [key("a", namespace=namespace) for namespace in ("", "..", "a/b", "ä+*", "x" * 300)]
    for name in names:
        assert store.put(name, entry(of=name))
    again = DiskStore(tmp_path, 10**6)
    assert all(is_same(again.get(name), entry(of=name)) for name in names)
    assert again.clear("a/b") == 1
    assert len(again) == 4


@pytest.mark.parametrize(("option", "value"), [("capacity_bytes", -1), ("ttl_s", 0.0)])
def test_a_useless_setting_is_refused(tmp_path: Path, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}: {value} is"):
        DiskStore(tmp_path, **{"capacity_bytes": 1, option: value})  # type: ignore[arg-type]
