"""Which chunks a document was cut into."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from cachecraft_rag.store import ChunkStore, DiskStore, MemoryStore, RedisStore, TieredStore
from tests.redis_server import redis_server

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
