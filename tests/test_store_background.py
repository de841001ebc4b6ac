"""The thread that writes to slower tiers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from weakref import ref

import pytest

from cachecraft_rag.store import DiskStore, MemoryStore, TieredStore
from tests.store_entries import entry, held, key

WAIT_S = 20


def in_time(is_done: Callable[[], bool]) -> bool:
    """Whether something comes true soon."""
    for _ in range(WAIT_S * 20):
        if is_done():
            return True
        threading.Event().wait(0.05)
    return False


@pytest.fixture(autouse=True)
def _short_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachecraft_rag.store.background._IDLE_S", 0.05)


def test_a_store_that_nobody_closed_is_let_go_when_it_is_idle(tmp_path: Path) -> None:
    store = TieredStore([MemoryStore(10**6), DiskStore(tmp_path, 10**6)])
    store.put(key("a"), entry())
    store.flush()
    gone = ref(store.tiers[0])
    del store

    def is_gone() -> bool:
        gc.collect()
        return gone() is None

    assert in_time(is_gone)


def test_what_is_put_after_an_idle_time_is_written_too(tmp_path: Path) -> None:
    store = TieredStore([MemoryStore(10**6), DiskStore(tmp_path, 10**6)])
    for chunk in "abc":
        store.put(key(chunk), entry())
        store.flush()
        assert in_time(lambda: store._behind._writer._thread is None)
    assert held(store.tiers[1], *"abc") == ["a", "b", "c"]
    store.put(key("d"), entry())
    store.close()
    assert held(DiskStore(tmp_path, 10**6), "d") == ["d"]
