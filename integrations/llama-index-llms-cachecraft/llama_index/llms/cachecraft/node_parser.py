"""Splits documents where chunks stay stable, into sizes that suit chunk reuse."""

from __future__ import annotations

import copy
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, model_validator
from llama_index.core.node_parser.interface import TextSplitter
from llama_index.core.node_parser.node_utils import build_nodes_from_splits, default_id_func
from llama_index.core.schema import BaseNode, Document, MetadataMode, TextNode
from llama_index.core.utils import get_tqdm_iterable

from cachecraft_rag.headings import Preset
from cachecraft_rag.keys import digest, tokenizer_fingerprint
from cachecraft_rag.model_loader import load_tokenizer
from cachecraft_rag.prompt import PromptEncoder
from cachecraft_rag.splitting import ChunkSplitter
from llama_index.llms.cachecraft.base import CacheCraftLLM
from llama_index.llms.cachecraft.instrumentation import CHUNKS

TOKENS_KEY = "cachecraft_tokens"
BREADCRUMB_SEPARATOR = " > "


class CacheAlignedNodeParser(TextSplitter):
    """Splits documents by the model's own tokenizer, at headings, clauses and paragraphs.

    Boundaries depend on content only, so an edit of a document changes the chunks around it and no others. Nodes are
    exact slices of their document and don't overlap. Metadata has no influence on the boundaries.

    Instead of an overlap, a node has the headings that it stands under as metadata, such as "ARTICLE 5 FEES > 5.2 Late
    payment". The embedding reads them; the LLM doesn't, so that a new title of a section changes no chunk.

    Args:
        **fields: The fields below and those of every node parser. ``model`` is needed, except through ``from_llm`` and
            ``from_tokenizer``; only its tokenizer is loaded, at the first use.

    Examples:
        >>> Settings.node_parser = CacheAlignedNodeParser.from_llm(llm)
    """

    model_config = ConfigDict(extra="forbid")

    model: str = Field(default="", description="Whose tokenizer counts: a local folder, an alias, or a hub id.")
    min_tokens: int = Field(default=512, ge=1, description="Least tokens of a chunk, where the text allows it.")
    max_tokens: int = Field(default=768, ge=2, description="Most tokens of a chunk.")
    region_tokens: int | None = Field(
        default=None, ge=2, description="Distance within which an edit may move boundaries; None for 3 * max_tokens."
    )
    preset: Preset = Field(
        default="contract", description="Which headings are known: of contracts and Markdown, of Markdown, or none."
    )
    breadcrumb_key: str | None = Field(
        default="breadcrumb",
        min_length=1,
        description="Metadata key of the headings, unless documents have it; None leaves them out.",
    )
    stable_ids: bool = Field(
        default=True, description="Node ids follow from the document's id and the text, unless id_func is given."
    )
    tokenizer_fingerprint: str = Field(
        default="", description="Identifies a tokenizer that was given; keeps ingestion caches apart."
    )

    _tokenizer: Any = PrivateAttr(default=None)
    _prompts: PromptEncoder | None = PrivateAttr(default=None)
    _made: tuple[dict[str, Any], ChunkSplitter] | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check(self) -> CacheAlignedNodeParser:
        if not self.model and not self.tokenizer_fingerprint:
            raise ValueError("model: '' names no tokenizer; give a model, or use from_llm or from_tokenizer")
        ChunkSplitter(len, **self._options)  # the splitter knows which sizes go together
        return self

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialisation."""
        return "CacheAlignedNodeParser"

    @classmethod
    def from_llm(cls, llm: CacheCraftLLM, **fields: Any) -> CacheAlignedNodeParser:
        """A parser for the chunks of an LLM; doesn't load its weights.

        Args:
            llm: The LLM whose tokenizer counts, and whose engine is set for chunks of a size.
            **fields: The parser's fields.
        """
        if not fields.keys() & {"min_tokens", "max_tokens"}:
            fields = {**llm.chunk_limits, **fields}
        if llm.is_loaded:
            return cls.from_tokenizer(llm.engine.tokenizer, model=llm.model, **fields)
        return cls(model=llm.model, **fields)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, **fields: Any) -> CacheAlignedNodeParser:
        """A parser that counts with a Hugging Face tokenizer.

        Args:
            tokenizer: The tokenizer; copied, so that others may use it at the same time.
            **fields: The parser's fields.

        Raises:
            ValueError: It is no tokenizer, or a field has a value that is not allowed.
        """
        if not callable(getattr(tokenizer, "encode", None)):
            raise ValueError(f"tokenizer: {type(tokenizer).__name__} has no encode; give a Hugging Face tokenizer")
        parser = cls(tokenizer_fingerprint=tokenizer_fingerprint(tokenizer), **fields)
        parser._tokenizer = copy.deepcopy(tokenizer)
        return parser

    def split_text(self, text: str) -> list[str]:
        """Chunks of a text, in order; their join is the text."""
        return self._splitter.split(text)

    def _parse_nodes(self, nodes: Sequence[BaseNode], show_progress: bool = False, **kwargs: Any) -> list[BaseNode]:
        parsed: list[BaseNode] = []
        for document in get_tqdm_iterable(nodes, show_progress, "Parsing nodes"):
            text = document.get_content(metadata_mode=MetadataMode.NONE)
            spans = [(start, end) for start, end in self._splitter.split_spans(text) if text[start:end].strip()]
            texts = [text[start:end] for start, end in spans]
            breadcrumbs = self._splitter.breadcrumbs(text, spans) if self.breadcrumb_key else [()] * len(spans)
            ids = self._stable_ids(document, texts) if self._has_stable_ids else None
            id_func = self.id_func if ids is None else lambda index, _, ids=ids: ids[index]
            built = build_nodes_from_splits(texts, document, id_func=id_func)
            for node, (start, end), breadcrumb in zip(built, spans, breadcrumbs, strict=True):
                node.start_char_idx, node.end_char_idx = start, end
                node.metadata[TOKENS_KEY] = self._num_tokens(node.text)
                node.excluded_llm_metadata_keys = [*node.excluded_llm_metadata_keys, TOKENS_KEY]
                node.excluded_embed_metadata_keys = [*node.excluded_embed_metadata_keys, TOKENS_KEY]
                if breadcrumb and self.breadcrumb_key and self.breadcrumb_key not in document.metadata:
                    node.metadata[self.breadcrumb_key] = BREADCRUMB_SEPARATOR.join(breadcrumb)
                    node.excluded_llm_metadata_keys = [*node.excluded_llm_metadata_keys, self.breadcrumb_key]
                parsed.append(node)
            CHUNKS.add(texts, document.node_id)
        return parsed

    def _postprocess_parsed_nodes(self, nodes: list[BaseNode], parent_doc_map: dict[str, Document]) -> list[BaseNode]:
        # The base class looks for a node's text in the document, which finds the wrong place of text that repeats.
        known = [(node, node.start_char_idx, node.end_char_idx) for node in nodes if isinstance(node, TextNode)]
        nodes = super()._postprocess_parsed_nodes(nodes, parent_doc_map)
        for node, start, end in known:
            node.start_char_idx, node.end_char_idx = start, end
        return nodes

    @property
    def _has_stable_ids(self) -> bool:
        return self.stable_ids and self.id_func in (None, default_id_func)

    def _stable_ids(self, document: BaseNode, texts: Sequence[str]) -> list[str]:
        """One id per text, from the document's id, the text, and how often the text stood before in the document."""
        seen: Counter[str] = Counter()
        ids = []
        for text in texts:
            ids.append(str(uuid.UUID(digest("node", document.node_id, str(seen[text]), text))))
            seen[text] += 1
        return ids

    def _num_tokens(self, text: str) -> int:
        """Tokens of a chunk, as the engine counts them."""
        if self._prompts is None:
            self._prompts = PromptEncoder(self._load_tokenizer())
        return len(self._prompts.encode_chunk(text.strip()))

    @property
    def _options(self) -> dict[str, Any]:
        names = ("min_tokens", "max_tokens", "region_tokens", "preset")
        return {name: getattr(self, name) for name in names}

    @property
    def _splitter(self) -> ChunkSplitter:
        if self._made is None or self._made[0] != self._options:
            self._made = (self._options, ChunkSplitter.from_tokenizer(self._load_tokenizer(), **self._options))
        return self._made[1]

    def _load_tokenizer(self) -> Any:
        if self._tokenizer is None:
            if not self.model:
                raise ValueError(
                    "model: '' names no tokenizer; the one that was given is lost, use from_tokenizer again"
                )
            tokenizer = load_tokenizer(self.model)
            if self.tokenizer_fingerprint not in ("", tokenizer_fingerprint(tokenizer)):
                raise ValueError(f"model: {self.model!r} has another tokenizer than the one this parser was made with")
            self._tokenizer = tokenizer
        return self._tokenizer

    def __getstate__(self) -> dict[str, Any]:
        clean = self.model_copy()
        clean._made, clean._prompts = None, None  # locks and functions, made again where they are needed
        state: dict[str, Any] = TextSplitter.__getstate__(clean)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tokenizer = (state["__pydantic_private__"] or {}).get("_tokenizer")
