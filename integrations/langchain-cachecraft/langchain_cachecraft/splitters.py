"""``CacheAlignedTextSplitter``: chunks that stay the same when another part of their document is edited."""

from __future__ import annotations

import copy
from typing import Any

from langchain_core.documents import Document
from langchain_text_splitters import TextSplitter
from typing_extensions import Self

from cachecraft_rag import ChunkSplitter
from cachecraft_rag.model_loader import load_tokenizer
from langchain_cachecraft.callbacks import RETRIEVED
from langchain_cachecraft.documents import DOCUMENT_ID_KEYS, DocumentIdKey, texts_by_document

BREADCRUMB_SEPARATOR = " > "

_OWN = ("add_start_index", "auto_register", "breadcrumb_key", "document_id_key")


class CacheAlignedTextSplitter(TextSplitter):
    """Splits at headings, clauses, paragraphs and sentences; boundaries depend on content only, never on position.

    Chunks are exact slices of their text, white space included, don't overlap, and join to the text again. Instead of
    an overlap, a chunk has the headings that it stands under in its metadata, such as "ARTICLE 5 FEES > 5.2 Late
    payment"; its ``page_content`` doesn't hold them, so that a new title of a section changes no chunk.

    Args:
        splitter: Sizes and headings. ``from_model`` and ``from_huggingface_tokenizer`` make one that counts as the
            model does that will read the chunks.
        add_start_index: Whether chunks get the place of their first character as ``start_index`` in their metadata.
        auto_register: Whether the models of this process look for the chunks in their prompts from now on.
        breadcrumb_key: Where metadata name the headings, the highest first; ``None`` for nowhere. A chunk under no
            heading has no such key, and a document's own value stays.
        document_id_key: Where metadata name the document, for the engine's ``invalidate(document_ids=...)``: the first
            of these keys that is there, or ``None`` for nowhere.

    Example:
        ```python
        from langchain_cachecraft import CacheAlignedTextSplitter

        splitter = CacheAlignedTextSplitter.from_model("Qwen/Qwen2.5-0.5B-Instruct", add_start_index=True)
        chunks = splitter.split_documents(documents)
        ```
    """

    def __init__(
        self,
        splitter: ChunkSplitter,
        *,
        add_start_index: bool = False,
        auto_register: bool = True,
        breadcrumb_key: str | None = "breadcrumb",
        document_id_key: DocumentIdKey = DOCUMENT_ID_KEYS,
    ) -> None:
        if breadcrumb_key == "":
            raise ValueError("breadcrumb_key='': must be a metadata key, or None for no headings")
        super().__init__(
            chunk_size=splitter.max_tokens,
            chunk_overlap=0,
            keep_separator=True,
            add_start_index=add_start_index,
            strip_whitespace=False,
        )
        self._splitter = splitter
        self._auto_register = auto_register
        self._breadcrumb_key, self._document_id_key = breadcrumb_key, document_id_key

    @classmethod
    def from_huggingface_tokenizer(cls, tokenizer: Any, **kwargs: Any) -> Self:
        """A splitter that counts with a Hugging Face tokenizer, without special tokens.

        Args:
            tokenizer: The tokenizer of the model that will read the chunks.
            **kwargs: The constructor's options and those of ``ChunkSplitter``: ``min_tokens``, ``max_tokens``,
                ``region_tokens``, and ``preset`` with the headings that are known: of a ``"contract"`` (also
                Markdown's), of ``"markdown"``, or none (``"plain"``).

        Raises:
            ValueError: It is no tokenizer, or an option has a value that is not allowed.
        """
        own = {name: kwargs.pop(name) for name in _OWN if name in kwargs}
        return cls(ChunkSplitter.from_tokenizer(tokenizer, **kwargs), **own)

    @classmethod
    def from_model(cls, model: str, **kwargs: Any) -> Self:
        """A splitter that counts with a model's tokenizer; its weights are not loaded.

        Args:
            model: A local folder, an alias, or a hub id.
            **kwargs: As for ``from_huggingface_tokenizer``.

        Raises:
            ValueError: There is no such model, or an option has a value that is not allowed.
        """
        return cls.from_huggingface_tokenizer(load_tokenizer(model), **kwargs)

    def split_text(self, text: str) -> list[str]:
        """Chunks of a text, in order; their join is the text."""
        return self._splitter.split(text)

    def create_documents(self, texts: list[str], metadatas: list[dict[Any, Any]] | None = None) -> list[Document]:
        """Chunks of several texts as documents, each with a copy of the metadata of its text.

        Chunks of white space are left out.

        Args:
            texts: The texts.
            metadatas: Metadata of each; none by default.

        Raises:
            ValueError: The lists differ in length.
        """
        if metadatas is not None and len(metadatas) != len(texts):
            raise ValueError(f"metadatas: {len(metadatas)} for {len(texts)} texts; give one for each")
        documents = []
        for text, metadata in zip(texts, metadatas or [{}] * len(texts), strict=True):
            spans = [(start, end) for start, end in self._splitter.split_spans(text) if text[start:end].strip()]
            for (start, end), breadcrumb in zip(spans, self._breadcrumbs(text, spans), strict=True):
                place = {"start_index": start} if self._add_start_index else {}
                own = copy.deepcopy(metadata)
                documents.append(Document(text[start:end], metadata={**breadcrumb, **own, **place}))
        if self._auto_register:
            for document_id, chunks in texts_by_document(documents, self._document_id_key).items():
                RETRIEVED.feed.add(chunks, document_id)
        return documents

    def _breadcrumbs(self, text: str, spans: list[tuple[int, int]]) -> list[dict[str, str]]:
        """Metadata with the headings of each chunk; empty where there are none."""
        if self._breadcrumb_key is None:
            return [{} for _ in spans]
        paths = self._splitter.breadcrumbs(text, spans)
        return [{self._breadcrumb_key: BREADCRUMB_SEPARATOR.join(path)} if path else {} for path in paths]
