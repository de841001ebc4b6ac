"""Retriever awareness without wiring: LlamaIndex's instrumentation tells which chunks are on their way to the LLM."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterable
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]  # not in an __all__
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.response_synthesizers import BaseSynthesizer

from cachecraft_rag import ChunkFeed, RequestStats
from llama_index.llms.cachecraft.nodes import texts_by_document

logger = logging.getLogger(__name__)

_dispatcher = get_dispatcher("llama_index.llms.cachecraft")
_install_lock = threading.Lock()

CHUNKS = ChunkFeed()
"""Every chunk text that passes through LlamaIndex in this process, for the engines of the LLMs that want them."""


class CacheCraftPrefillEvent(BaseEvent):
    """What one prompt cost; sent once per answer, before the LLM's own end event and with the same span.

    Attributes:
        model: Name of the model.
        stats: The fields of ``RequestStats``.
    """

    model: str
    stats: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialisation."""
        return "CacheCraftPrefillEvent"


def report(model: str, stats: RequestStats, span_id: str | None) -> None:
    """Send the statistics of a request to whoever listens."""
    _dispatcher.event(CacheCraftPrefillEvent(model=model, stats=stats.model_dump(mode="json"), span_id=span_id))


class CacheCraftSpanHandler(BaseSpanHandler[BaseSpan]):
    """Registers the text of every node that a synthesizer is given or a retriever returns. Keeps no spans.

    Only a node's own text is registered: metadata, which templates print in front of it, stays ordinary prompt text,
    so that a changed page label never costs a chunk.
    """

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialisation."""
        return "CacheCraftSpanHandler"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Before a synthesizer runs: its nodes, as postprocessors and citation splitting left them."""
        if isinstance(instance, BaseSynthesizer):
            _register(bound_args.arguments.get("nodes"))

    def prepare_to_exit_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **kwargs: Any,
    ) -> None:
        """After a retriever ran: its nodes, for tools and pipelines that build their prompts without a synthesizer."""
        if isinstance(instance, BaseRetriever) and isinstance(result, list):
            _register(result)

    def prepare_to_drop_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        err: BaseException | None = None,
        **kwargs: Any,
    ) -> None:
        """A failed call leaves nothing to register."""


def install() -> None:
    """Put the handler on the root dispatcher, unless it is there."""
    root = get_dispatcher()
    with _install_lock:
        if not any(isinstance(handler, CacheCraftSpanHandler) for handler in root.span_handlers):
            root.add_span_handler(CacheCraftSpanHandler())


def _register(nodes: Iterable[Any] | None) -> None:
    """Register nodes with their documents; the dispatcher drops exceptions without a word, so they are logged here."""
    try:
        for document_id, texts in texts_by_document(nodes or ()).items():
            CHUNKS.add(texts, document_id)
    except Exception:
        logger.exception("chunks could not be registered; prompts that hold them are prefilled in full")
