"""Whole engines on tiers that fail: requests before, during and after get the answers of an engine without the tier."""

from __future__ import annotations

import logging
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachecraft_rag import CacheCraftEngine
from tests.conftest import EngineMaker
from tests.redis_server import RedisServer, own_redis_server
from tests.store_answers import SETTINGS, Answer, ask, requests, tiers, tiers_of

__all__ = ["own_redis_server"]

Expected = Callable[[Sequence[tuple[int, ...]]], list[Answer]]
Kinds = Callable[[], list[str]]


@pytest.fixture
def warnings_of_stores(caplog: pytest.LogCaptureFixture) -> Iterator[Kinds]:
    """What kinds of failures were logged so far, by tier: one for every record."""
    with caplog.at_level(logging.WARNING, "cachecraft_rag.store"):

        def kinds() -> list[str]:
            found = []
            for record in caplog.records:
                if record.name.startswith("cachecraft_rag.store"):
                    assert isinstance(record.args, tuple)
                    tier, _, kind, error = record.args
                    found.append(f"{tier} {kind} {getattr(error, 'errno', '')}")
            return found

        yield kinds


@pytest.fixture
def expected(make_engine: EngineMaker) -> Expected:
    return lambda wanted: [ask(make_engine(**SETTINGS), request) for request in wanted]


def check(engine: CacheCraftEngine, wanted: Sequence[tuple[int, ...]], expected: Sequence[Answer]) -> None:
    for request, answer in zip(wanted, expected, strict=True):
        assert ask(engine, request).is_same(answer), request
    engine.store.flush()


def test_a_server_killed_and_started_again(
    make_engine: EngineMaker, expected: Expected, own_redis_server: RedisServer, warnings_of_stores: Kinds
) -> None:
    wanted = requests(12)
    answers = expected(wanted)
    engine = make_engine(store=tiers(remote={"url": own_redis_server.url}), **SETTINGS)
    check(engine, wanted, answers)
    healthy = tiers_of(engine)["remote"]
    assert healthy.hits > 0
    assert healthy.errors == 0
    own_redis_server.kill()
    check(engine, wanted, answers)
    failed = tiers_of(engine)["remote"]
    assert failed.errors > 0
    assert failed.hits == healthy.hits
    assert len(warnings_of_stores()) == 1
    own_redis_server.start()
    deadline = time.monotonic() + 60
    while tiers_of(engine)["remote"].hits == failed.hits:  # the tier rests for a while before it tries again
        assert time.monotonic() < deadline, "the server is not used again"
        check(engine, wanted, answers)
    assert len(warnings_of_stores()) == 1


def test_a_disk_that_becomes_read_only(
    make_engine: EngineMaker, expected: Expected, tmp_path: Path, warnings_of_stores: Kinds
) -> None:
    known, new = [(0, 1), (2,), (1, 0)], [(3, 4), (0, 5), (4,)]
    answers = expected(known + new)
    store = tiers(disk={"path": str(tmp_path)})
    with mounted(tmp_path, "size=64m"):
        with make_engine(store=store, **SETTINGS) as engine:
            check(engine, known, answers[:3])
            healthy = tiers_of(engine)["disk"]
            subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
            check(engine, known + new, answers)
            failed = tiers_of(engine)["disk"]
            assert healthy.errors == 0
            assert failed.errors > 0
            assert failed.hits > healthy.hits, "what is there can still be read"
            assert failed.entries == healthy.entries == 3
            assert_one_warning_of_each_kind(warnings_of_stores())
        logged = len(warnings_of_stores())
        with make_engine(store=store, **SETTINGS) as engine:  # one that finds the disk like this
            check(engine, known + new, answers)
            assert tiers_of(engine)["disk"].hits > 0
            assert_one_warning_of_each_kind(warnings_of_stores()[logged:])


def test_a_folder_that_is_replaced_by_a_file(
    make_engine: EngineMaker, expected: Expected, tmp_path: Path, warnings_of_stores: Kinds
) -> None:
    wanted = [(0, 1), (2,), (1, 0), (3, 2)]
    answers = expected(wanted)
    engine = make_engine(store=tiers(disk={"path": str(tmp_path / "kv")}), **SETTINGS)
    check(engine, wanted, answers)
    assert tiers_of(engine)["disk"].errors == 0
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").write_text("a file")
    check(engine, wanted, answers)
    assert tiers_of(engine)["disk"].errors > 0
    assert_one_warning_of_each_kind(warnings_of_stores())


def test_a_full_disk(make_engine: EngineMaker, expected: Expected, tmp_path: Path, warnings_of_stores: Kinds) -> None:
    wanted = [(0, 1), (2,), (1, 0), (3, 4), (5, 2, 0)]
    answers = expected(wanted)
    with mounted(tmp_path, "size=128k"):  # far below the budget that was given
        with make_engine(store=tiers(disk={"path": str(tmp_path)}), **SETTINGS) as engine:
            check(engine, wanted, answers)
            check(engine, wanted, answers)
            stats = tiers_of(engine)["disk"]
            assert stats.errors > 0
            assert stats.corrupt == 0
            assert stats.hits > 0
        assert warnings_of_stores() == ["disk OSError 28"]


def test_a_disk_that_takes_no_more_bytes(
    make_engine: EngineMaker, expected: Expected, tmp_path: Path, warnings_of_stores: Kinds
) -> None:
    known, new = [(0, 1), (2,)], [(1, 0), (3, 4), (5, 2, 0)]
    answers = expected(known + new)
    engine = make_engine(store=tiers(disk={"path": str(tmp_path)}), **SETTINGS)
    check(engine, known, answers[:2])
    with no_larger_files_than(1000):
        check(engine, known + new, answers)
    stats = tiers_of(engine)["disk"]
    assert stats.errors > 0
    assert stats.entries == 3
    assert warnings_of_stores() == ["disk OSError 27"]


def assert_one_warning_of_each_kind(kinds: Sequence[str]) -> None:
    assert kinds
    assert sorted(kinds) == sorted(set(kinds))


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small file system of its own; the test is skipped where mounting is not permitted."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def no_larger_files_than(nbytes: int) -> Iterator[None]:
    """Have the system refuse what a full disk would refuse."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
