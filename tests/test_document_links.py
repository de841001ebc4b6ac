"""Which chunks go when a text or a document is forgotten."""

from __future__ import annotations

from collections.abc import Iterable

from cachecraft_rag.document_links import DocumentLinks
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.request_chunk import RequestChunk, WholeChunk
from cachecraft_rag.store import MemoryStore


def chunks_of(texts: Iterable[str]) -> list[str]:
    return [f"chunk of {text}" for text in texts]


def key_of(text: str) -> ChunkKey:
    return ChunkKey("default", f"chunk of {text}", "canonical")


def test_a_document_takes_its_linked_chunks_and_the_texts_nobody_used_yet() -> None:
    links = DocumentLinks(MemoryStore(10**6), 100)
    links.add(["used", "unused"], "default", "lease")
    links.link("used", key_of("used"))
    texts, chunks = links.take([], ["lease"], "default", chunks_of)
    assert sorted(texts) == ["unused", "used"]
    assert chunks == {"chunk of used", "chunk of unused"}
    assert links.take([], ["lease"], "default", chunks_of) == ([], set())


def test_another_process_finds_the_chunks_that_were_linked() -> None:
    store = MemoryStore(10**6)
    links, other = DocumentLinks(store, 100), DocumentLinks(store, 100)
    links.add(["used", "unused"], "default", "lease")
    links.link("used", key_of("used"))
    assert other.take([], ["lease"], "default", chunks_of) == ([], {"chunk of used"})


def test_the_pieces_of_a_chunk_go_with_it() -> None:
    links = DocumentLinks(MemoryStore(10**6), 100)
    whole = WholeChunk((1, 2, 3), 0, key_of("whole"), key_of("whole"))
    piece = ChunkKey("default", "the piece", "exact")
    links.note_piece(RequestChunk((1, 2), piece, piece, whole=whole))
    links.note_piece(RequestChunk((7,), key_of("another"), key_of("another")))
    _, chunks = links.take(["whole"], [], "default", chunks_of)
    assert chunks == {"chunk of whole", "the piece"}


def test_clearing_a_namespace_forgets_its_texts_only() -> None:
    links = DocumentLinks(MemoryStore(10**6), 100)
    for namespace in ("default", "other"):
        links.add(["text"], namespace, "lease")
    links.clear("default")
    assert links.take([], ["lease"], "default", chunks_of) == ([], set())
    assert links.take([], ["lease"], "other", chunks_of) == (["text"], {"chunk of text"})
