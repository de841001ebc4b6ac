"""Which chunks go when a text or a document is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cachecraft_rag.chunk_forms import forms_of
from cachecraft_rag.document_texts import DocumentTexts
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.request_chunk import RequestChunk
from cachecraft_rag.store import ChunkStore


class DocumentLinks:
    """Links documents to chunks, and chunks to pieces of them, where every process that shares the store finds them.

    Args:
        store: Where KV is kept.
        max_texts: How many texts are remembered that are not linked yet.
    """

    def __init__(self, store: ChunkStore, max_texts: int) -> None:
        self._store, self._texts = store, DocumentTexts(max_texts)

    def add(self, texts: Iterable[str], namespace: str, document_id: str) -> None:
        """Note that texts are of a document; they are linked to it once they are used."""
        self._texts.add(texts, namespace, document_id)

    def link(self, text: str, key: ChunkKey) -> None:
        """Link a text that is used to its documents."""
        for document in self._texts.to_link(text, key.namespace, key.chunk):
            self._store.documents.add(key.namespace, document, [key.chunk])

    def note_piece(self, chunk: RequestChunk) -> None:
        """Before anything is stored of a piece: note it beside its whole chunk, with which it must go."""
        if chunk.whole is not None:
            key = chunk.whole.key
            self._store.documents.add(key.namespace, _pieces_of(key.chunk), [chunk.exact_key.chunk])

    def take(
        self,
        texts: Sequence[str],
        document_ids: Sequence[str],
        namespace: str,
        chunks_of: Callable[[Iterable[str]], Iterable[str]],
    ) -> tuple[list[str], set[str]]:
        """Remove the links of texts and documents.

        Args:
            texts: Chunk texts.
            document_ids: Documents.
            namespace: Whose.
            chunks_of: ``ChunkKey.chunk`` of texts.

        Returns:
            The texts that go, those of the documents included, and the chunks (``ChunkKey.chunk``), pieces included.
        """
        documents, gone = self._store.documents, list(texts)
        chunks = set(chunks_of([form for text in texts for form in forms_of(text.strip())]))
        for document_id in document_ids:
            unlinked = self._texts.take(namespace, document_id)
            gone += unlinked
            chunks |= documents.chunks(namespace, document_id).union(chunks_of(unlinked))
            documents.remove(namespace, document_id)
        for chunk in list(chunks):
            chunks |= documents.chunks(namespace, _pieces_of(chunk))
            documents.remove(namespace, _pieces_of(chunk))
        return gone, chunks

    def clear(self, namespace: str) -> None:
        """Forget the texts of a namespace; the store forgets the links."""
        self._texts.clear(namespace)


def _pieces_of(chunk: str) -> str:
    """Name under which the pieces of a chunk that were stored by themselves are kept among the documents."""
    return f"\0pieces {chunk}"
