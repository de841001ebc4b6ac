"""What a disk store does about damaged entries, foreign files, leftovers, and a disk that fails."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.store import DiskStore
from cachecraft_rag.store.disk_layout import measure
from cachecraft_rag.store.lazy import LazyKV
from tests.store_entries import ENTRY_BYTES, entry, is_same, key, real_bytes, shards

BUDGET_OF_4 = 4 * ENTRY_BYTES + len("default")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda file: os.truncate(file, file.stat().st_size // 2),
        lambda file: os.truncate(file, 0),
        lambda file: file.write_bytes(b"something else"),
        lambda file: file.unlink(),
        lambda file: file.rename(file.with_name("7.kv")),
        lambda file: (file.parent / "stranger").write_bytes(b"?"),
        lambda file: shutil.copy(file, file.with_name("2.kv")),
    ],
    ids=["flipped", "half", "empty", "foreign", "lost", "renamed", "stranger", "doubled"],
)
def test_a_damaged_entry_is_a_counted_miss_and_is_removed(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    store = DiskStore(tmp_path, 10**6)
    store.put(key("a"), entry(1500))
    store.put(key("b"), entry(of=key("b")))
    damage(next(file for file in shards(tmp_path) if file.name == "1.kv"))
    assert store.get(key("a")) is None
    assert not store.contains(key("a"))
    assert (store.stats().corrupt, store.stats().misses) == (1, 1)
    assert is_same(store.get(key("b")), entry(of=key("b")))
    assert store.nbytes == real_bytes(tmp_path)
    assert store.put(key("a"), entry(1500, of=key("a")))
    assert is_same(store.get(key("a")), entry(1500, of=key("a")))


def test_an_entry_that_somebody_deletes_while_its_files_are_listed_is_a_plain_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, 10**6)
    store.put(key("a"), entry(1500))
    listed = os.listdir

    def delete_then_list(path: Path) -> list[str]:
        if not any(name.endswith(".kv") for name in listed(path)):
            return listed(path)
        DiskStore(tmp_path, 10**6).remove(key("a"))
        return []  # what a folder that was opened before its deletion lists

    monkeypatch.setattr(os, "listdir", delete_then_list)
    assert store.get(key("a")) is None
    stats = store.stats()
    assert (stats.corrupt, stats.misses, stats.errors) == (0, 1, 0)


def open_and_damage(store: DiskStore, path: Path) -> LazyKV:
    """An entry that was opened before its last layer was damaged."""
    store.put(key("a"), entry(1500, of=key("a")))
    opened = store.open(key("a"))
    assert opened is not None
    file = next(file for file in shards(path) if file.name == "1.kv")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)  # in place: the file that is open
    return opened


def test_damage_found_after_opening_is_counted_once_and_the_entry_removed(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10**6)
    opened = open_and_damage(store, tmp_path)
    opened.read(0)
    assert store.stats().corrupt == 0
    for _ in range(2):
        with pytest.raises(CorruptEntryError, match="layer 1"):
            opened.layer(1)
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.corrupt, stats.errors, stats.entries) == (1, 0, 1, 0, 0)
    assert (stats.bytes_loaded, stats.load_s) == (0, 0.0)
    assert not shards(tmp_path)
    assert store.get(key("a")) is None


def test_damage_found_after_opening_leaves_alone_what_was_put_in_its_place(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10**6)
    opened = open_and_damage(store, tmp_path)
    newer = entry(1500, of=key("a"), version=1)
    store.put(key("a"), newer)
    with pytest.raises(CorruptEntryError):
        opened.complete()
    assert store.stats().corrupt == 1
    assert is_same(store.get(key("a")), newer)


def test_an_entry_evicted_while_it_is_open_is_read_to_its_end_and_counted_then(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BUDGET_OF_4)
    store.put(key("a"), entry(of=key("a")))
    opened = store.open(key("a"))
    assert opened is not None
    opened.read(0)
    for chunk in "bcde":
        store.put(key(chunk), entry())
    assert not store.contains(key("a"))
    assert store.stats().bytes_loaded == 0
    assert is_same(opened.complete(), entry(of=key("a")))
    stats = store.stats()
    assert (stats.hits, stats.corrupt, stats.bytes_loaded) == (1, 0, opened.nbytes)
    assert 0 < stats.load_p50_s == stats.load_s
    assert store.counters.pace.s_per_token == stats.load_s / 16


def test_an_entry_under_another_name_is_a_counted_miss(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10**6)
    store.put(key("a"), entry())
    folder = shards(tmp_path)[0].parent
    folder.rename(folder.with_name(folder.name.replace(key("a").context, key("a", "z").context)))
    assert store.get(key("a", "z")) is None
    assert store.stats().corrupt == 1
    assert not shards(tmp_path)


def test_foreign_things_in_its_folder_are_removed_and_others_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    store = DiskStore(tmp_path, 10**6)
    store.put(key("a"), entry())
    bucket = shards(tmp_path)[0].parent.parent
    (bucket / "file").write_text("foreign")
    (bucket / "folder" / "deep").mkdir(parents=True)
    shutil.copytree(bucket.parent, tmp_path / "cachecraft-v1" / ("0" * 32))
    again = DiskStore(tmp_path, 10**6)
    assert again.stats().corrupt == 3
    assert (len(again), again.nbytes) == (1, real_bytes(tmp_path) - 4)
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_leftovers_go_when_their_writer_is_gone_or_they_are_old(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10**6)
    temporary = tmp_path / "cachecraft-v1" / "tmp"
    finished = subprocess.Popen(["true"])
    finished.wait()
    host = store._layout._host
    names = {
        "gone": f"{host}-{finished.pid}-1",
        "alive": f"{host}-{os.getpid()}-2",
        "elsewhere": "other-1-3",
        "elsewhere and old": "other-1-4",
    }
    for name in names.values():
        (temporary / name).mkdir()
        (temporary / name / "0.kv").write_bytes(bytes(100))
    os.utime(temporary / names["elsewhere and old"], (0, 0))
    DiskStore(tmp_path, 10**6)
    assert {path.name for path in temporary.iterdir()} == {names["alive"], names["elsewhere"]}


def test_what_is_being_written_counts_in_the_budget(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BUDGET_OF_4)
    for chunk in "abcd":
        store.put(key(chunk), entry())
    temporary = tmp_path / "cachecraft-v1" / "tmp" / "other-1-1"
    temporary.mkdir()
    (temporary / "0.kv").write_bytes(bytes(ENTRY_BYTES))
    assert store.put(key("e"), entry())
    assert real_bytes(tmp_path) <= BUDGET_OF_4


@contextmanager
def no_larger_files_than(nbytes: int) -> Iterator[None]:
    """Have the system refuse what a full disk would refuse."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_takes_no_more_bytes_is_counted_and_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 10**6)
    store.put(key("a"), entry(of=key("a")))
    with caplog.at_level(logging.WARNING), no_larger_files_than(100):
        assert not any(store.put(key(chunk), entry()) for chunk in "bcd")
    assert is_same(store.get(key("a")), entry(of=key("a")))
    assert store.stats().errors == 3
    assert len(caplog.records) == 1
    assert "writing failed" in caplog.text
    assert store.nbytes == real_bytes(tmp_path)
    assert store.put(key("b"), entry())


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    """A folder outside pytest's own, which only its user may enter; see ``unprivileged``."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777)
    shutil.rmtree(folder)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Without the right to write, root included."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)


def test_a_read_only_disk_still_answers_and_each_failure_is_counted(
    read_only_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(read_only_folder, 10**6)
    for chunk in "abc":
        store.put(key(chunk), entry(of=key(chunk)))
    with caplog.at_level(logging.WARNING), read_only(read_only_folder):
        assert is_same(store.get(key("a")), entry(of=key("a")))
        assert not store.put(key("d"), entry())
        assert not store.remove(key("b"))
        assert store.get(key("b")) is None, "what was to be removed must not come back"
        opened = DiskStore(read_only_folder, 10**6)
        assert is_same(opened.get(key("c")), entry(of=key("c")))
        assert opened.clear() == 0
        assert opened.get(key("c")) is None
    assert store.stats().errors >= 3
    warnings = [record for record in caplog.records if record.name == "cachecraft_rag.store.disk"]
    assert len(warnings) == 2  # one of each store


def test_a_path_that_is_no_folder_is_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = DiskStore(tmp_path / "file", 10**6)
    assert not store.put(key("a"), entry())
    assert store.get(key("a")) is None
    assert (len(store), store.nbytes, store.clear(), store.variants(key("a").chunk)) == (0, 0, 0, [])
    assert not store.contains(key("a"))
    assert store.stats().errors > 3


def test_a_folder_that_vanishes_is_a_miss_and_can_be_written_again(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10**6)
    store.put(key("a"), entry())
    shutil.rmtree(tmp_path / "cachecraft-v1")
    assert store.get(key("a")) is None
    assert (len(store), store.nbytes) == (0, 0)
    assert store.put(key("a"), entry(of=key("a")))
    assert is_same(store.get(key("a")), entry(of=key("a")))


def test_what_is_removed_goes_though_somebody_removed_empty_folders(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10**6)
    for chunk in "abc":
        store.put(key(chunk), entry())
    temporary = tmp_path / "cachecraft-v1" / "tmp"
    temporary.rmdir()
    assert store.remove(key("a"))
    assert not store.remove(key("a"))
    shutil.rmtree(temporary)
    assert store.clear() == 2
    assert not shards(tmp_path)
    assert store.stats().errors == 0


def test_one_failed_read_hides_no_entry_and_breaks_no_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = DiskStore(tmp_path, 10**6)
    keys = [key(f"{number}") for number in range(24)]
    for one in keys:
        first.put(one, entry(of=one))
    budget = first.nbytes
    for folder in tmp_path.glob("cachecraft-v1/*/*"):
        os.utime(folder, (1, 1))  # folders that changed just now are read again in any case
    measured: list[Path] = []

    def measure_but_once(path: Path) -> tuple[int, float]:
        measured.append(path)
        if len(measured) == 15:
            raise OSError(errno.EMFILE, "Too many open files")
        return measure(path)

    monkeypatch.setattr("cachecraft_rag.store.disk_index.measure", measure_but_once)
    store = DiskStore(tmp_path, budget)
    assert store.stats().errors == 1
    assert len(store) == len(keys)
    assert all(is_same(store.get(one), entry(of=one)) for one in keys)
    for number in range(24, 48):
        assert store.put(key(f"{number}"), entry())
        assert real_bytes(tmp_path) <= budget
    assert store.nbytes == real_bytes(tmp_path)
