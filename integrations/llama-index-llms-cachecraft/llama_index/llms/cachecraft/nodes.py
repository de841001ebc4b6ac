"""What of a node is a chunk: its own text, and the document that it was cut from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from llama_index.core.schema import MetadataMode

# CitationQueryEngine numbers its nodes inside their text, so the label depends on the rank and not on the chunk.
_CITATION_LABEL = re.compile(r"\ASource \d+:\s*\n")


def chunk_text(node: Any) -> str:
    """The text of a node, scored or not, without the metadata that templates print in front of it."""
    content = getattr(node, "node", node).get_content(metadata_mode=MetadataMode.NONE)
    return _CITATION_LABEL.sub("", content, count=1)


def texts_by_document(nodes: Iterable[Any]) -> dict[str | None, list[str]]:
    """Texts of nodes by the id of the document they were cut from, blank ones left out; ``None`` for no document."""
    texts: dict[str | None, list[str]] = {}
    for node in nodes:
        if (text := chunk_text(node)).strip():
            texts.setdefault(getattr(node, "node", node).ref_doc_id, []).append(text)
    return texts
