"""Retrieved documents as an engine takes them: texts, each with the document it was cut from."""

from __future__ import annotations

from collections.abc import Iterable

from langchain_core.documents import Document

DocumentIdKey = str | tuple[str, ...] | None
"""Where metadata name the document that a chunk was cut from: a key, several of which the first counts that is there,
or ``None`` for nowhere."""

DOCUMENT_ID_KEYS = ("source", "id")
"""Where loaders put it."""


def document_id(document: Document, key: DocumentIdKey) -> str | None:
    """What a chunk's metadata call the document that it was cut from; ``None`` when they don't say.

    Args:
        document: A chunk.
        key: The metadata's key, or keys.
    """
    values = (document.metadata.get(one) for one in ((key,) if isinstance(key, str) else key or ()))
    return next((str(value) for value in values if value is not None and value != ""), None)


def texts_by_document(documents: Iterable[Document], key: DocumentIdKey) -> dict[str | None, list[str]]:
    """Texts of chunks under the ids of their documents, in the order in which they came."""
    texts: dict[str | None, list[str]] = {}
    for document in documents:
        texts.setdefault(document_id(document, key), []).append(document.page_content)
    return texts
