"""Retrieved documents as an engine takes them: texts, each with the document it was cut from."""

from __future__ import annotations

from collections.abc import Iterable

from langchain_core.documents import Document


def document_id(document: Document, key: str | None) -> str | None:
    """What a chunk's metadata call the document that it was cut from; ``None`` when they don't say.

    Args:
        document: A chunk.
        key: The metadata's key; ``None`` for none.
    """
    value = None if key is None else document.metadata.get(key)
    return None if value is None or value == "" else str(value)


def texts_by_document(documents: Iterable[Document], key: str | None) -> dict[str | None, list[str]]:
    """Texts of chunks under the ids of their documents, in the order in which they came."""
    texts: dict[str | None, list[str]] = {}
    for document in documents:
        texts.setdefault(document_id(document, key), []).append(document.page_content)
    return texts
