"""One decoding step of several requests: in one pass of the model where they allow it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cachecraft_rag.decode import buffer_decoder
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.request import Request

_logger = logging.getLogger(__name__)


class NextRow(NamedTuple):
    """What a request draws its next token from.

    Attributes:
        logits: ``[vocab_size]`` float32.
        likeliest: The token of the highest logit, where it was looked for.
    """

    logits: torch.Tensor
    likeliest: int | None = None


def rows_together(
    adapter: ModelAdapter, requests: Sequence[Request], token_ids: Sequence[int]
) -> list[NextRow | Exception]:
    """Append one token to each of several requests in one forward pass.

    When the pass fails, every request is run by itself, so that an error stays with whom it belongs to.

    Args:
        adapter: The model.
        requests: Requests whose prompts are in buffers, and that nothing forbids to share a pass.
        token_ids: The token drawn last for each.
    """
    kvs = [request.kv for request in requests if request.kv is not None]
    try:
        logits = adapter.forward_batch(token_ids, kvs, [request.watch for request in requests])
        likeliest: list[int] = logits.argmax(dim=-1).tolist()  # one transfer from the device for all rows
        return [NextRow(*row) for row in zip(logits, likeliest, strict=True)]
    except Exception:
        _logger.warning("a pass of %d requests failed; each is run by itself", len(requests), exc_info=True)
    for request, kv in zip(requests, kvs, strict=True):
        request.watch = None  # what it has recorded of the failed pass is of some layers only
        request.next_logits = buffer_decoder(adapter, kv)
    return [row_alone(request, token_id) for request, token_id in zip(requests, token_ids, strict=True)]


def row_alone(request: Request, token_id: int) -> NextRow | Exception:
    """Append one token to a request, in the way of its own; an error is returned."""
    assert request.next_logits is not None
    try:
        return NextRow(request.next_logits(token_id))
    except Exception as error:
        return error
