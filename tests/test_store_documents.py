"""Which chunks a document was cut into."""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cachecraft_rag.store import ChunkStore, DiskStore, MemoryStore, RedisStore, TieredStore
from tests.redis_server import RedisServer, redis_server
from tests.store_entries import ENTRY_BYTES, entry, key

__all__ = ["redis_server"]

Opener = Callable[[], ChunkStore]


@pytest.fixture(params=["memory", "disk", "redis", "tiered"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens the same store again and again."""
    if request.param == "memory":
        store = MemoryStore(1000)
        return lambda: store
    if request.param == "disk":
        return lambda: DiskStore(tmp_path, 1000)
    if request.param == "redis":
        url, prefix = request.getfixturevalue("redis_server").url, f"t{secrets.token_hex(6)}"
        return lambda: RedisStore(url, prefix=prefix)
    return lambda: TieredStore([MemoryStore(1000), DiskStore(tmp_path, 1000)])


def test_a_document_has_the_chunks_that_were_noted_whoever_asks(opener: Opener) -> None:
    opener().documents.add("us", "lease.pdf", ["a", "b/c"])
    opener().documents.add("us", "lease.pdf", ["b/c", "d"])
    opener().documents.add("us", "letter.pdf", ["e"])
    assert opener().documents.chunks("us", "lease.pdf") == {"a", "b/c", "d"}
    assert opener().documents.chunks("us", "nobody's") == set()
    assert opener().documents.chunks("them", "lease.pdf") == set()


def test_a_forgotten_document_has_no_chunks_and_others_keep_theirs(opener: Opener) -> None:
    documents = opener().documents
    documents.add("us", "lease.pdf", ["a"])
    documents.add("us", "letter.pdf", ["e"])
    documents.remove("us", "lease.pdf")
    documents.remove("us", "nobody's")
    assert documents.chunks("us", "lease.pdf") == set()
    assert documents.chunks("us", "letter.pdf") == {"e"}


def test_clearing_a_namespace_forgets_its_documents(opener: Opener) -> None:
    store = opener()
    for namespace in ("us", "them"):
        store.documents.add(namespace, "lease.pdf", ["a"])
    store.clear("us")
    assert store.documents.chunks("us", "lease.pdf") == set()
    assert store.documents.chunks("them", "lease.pdf") == {"a"}
    store.clear()
    assert store.documents.chunks("them", "lease.pdf") == set()


def test_no_name_of_a_document_is_on_the_disk(tmp_path: Path) -> None:
    DiskStore(tmp_path, 1000).documents.add("tenant-seven", "secret-plan.pdf", ["a"])
    paths = " ".join(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert "secret" not in paths
    assert "tenant" not in paths


def test_what_the_file_system_refuses_is_counted(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1000)
    (tmp_path / "cachecraft-v1" / "documents").write_text("a file in the way")
    store.documents.add("us", "lease.pdf", ["a"])
    assert store.documents.chunks("us", "lease.pdf") == set()
    assert store.stats().errors == 1


def test_a_document_in_redis_lives_as_long_as_its_entries(redis_server: RedisServer) -> None:
    prefix = f"t{secrets.token_hex(6)}"
    store = RedisStore(redis_server.url, prefix=prefix, ttl_s=0.2)
    store.put(key("a"), entry(), static=True)
    store.documents.add("default", "lease.pdf", [key("a").chunk])
    with redis_server.client() as client:
        times = [client.pttl(name) for name in client.scan_iter(match=f"{prefix}:links:*")]
    time.sleep(0.4)
    assert store.get(key("a")) is not None
    assert store.documents.chunks("default", "lease.pdf") == {key("a").chunk}
    assert times == [-1]  # whoever goes on using an entry need not know of its document


@pytest.fixture
def short_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links whose chunks are not stored may go at once, when there are more than three."""
    monkeypatch.setattr("cachecraft_rag.store.documents.LINK_LIFE_S", -1.0)
    monkeypatch.setattr("cachecraft_rag.store.documents._SHARED_LINK_LIFE_MS", 0)
    monkeypatch.setattr("cachecraft_rag.store.pruned_documents._FEWEST_ADDED", 3)


@pytest.mark.usefixtures("short_lives")
@pytest.mark.parametrize("slow", ["none", "disk", "redis"])
def test_documents_do_not_outgrow_what_is_stored_of_them(
    slow: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cold = MemoryStore(4 * entry().nbytes)
    store: ChunkStore = cold
    if slow == "disk":
        store = TieredStore([cold, DiskStore(tmp_path, 4 * ENTRY_BYTES + 64)])
    if slow == "redis":
        url, prefix = request.getfixturevalue("redis_server").url, f"t{secrets.token_hex(6)}"
        store = TieredStore([cold, RedisStore(url, prefix=prefix, capacity_bytes=4 * ENTRY_BYTES)])
    names = [f"{number}" for number in range(40)]
    for name in names:
        store.put(key(name), entry())
        store.documents.add("default", name, [key(name).chunk])
        store.flush()
    known = {name for name in names if store.documents.chunks("default", name)}
    assert len(known) <= 12
    assert known >= {name for name in names if store.contains(key(name))}
    if slow == "disk":
        assert len(list(tmp_path.glob("cachecraft-v1/documents/*/*"))) == len(known)
    store.close()


@pytest.mark.usefixtures("short_lives")
def test_a_tier_that_can_not_be_listed_keeps_all_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TieredStore([MemoryStore(1000), DiskStore(tmp_path, 10**6)])

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("cachecraft_rag.store.disk_index.DiskIndex.refresh", fail)
        for name in "abcdef":
            store.documents.add("default", name, [name])
    assert all(store.documents.chunks("default", name) == {name} for name in "abcdef")
    store.close()


def test_what_was_noted_a_short_time_ago_stays_though_it_is_not_stored_yet(opener: Opener) -> None:
    documents = opener().documents
    documents.add("us", "lease.pdf", ["a"])
    assert documents.prune(set()) == 1
    assert documents.chunks("us", "lease.pdf") == {"a"}
