"""Computing a whole prompt in the ordinary way: the reference, and what is done where chunks can't be reused."""

from __future__ import annotations

from typing import Any

import torch

from cachecraft_rag.decode import PlainDecoder, buffer_decoder
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.request import Request


def full_prefill(
    adapter: ModelAdapter, request: Request, reason: str, in_buffer: bool, soft_prompted: Any | None = None
) -> None:
    """Fill in what a request knows before its first token.

    Args:
        adapter: The model.
        request: The request.
        reason: Why nothing is reused.
        in_buffer: Whether the prompt's KV may be kept in our own buffer; a model of another kind makes its own cache.
        soft_prompted: The model with its soft prompt, where one is active: it puts that before whatever it reads, so
            everything is read again for every token.
    """
    token_ids = request.encoded.token_ids
    request.figures |= {"fallback_reason": reason, "policy": "full_prefill"}
    request.figures |= {"reused_tokens": 0, "recomputed_tokens": 0, "prefilled_tokens": request.num_tokens}
    with request.timed("prefill_s"):
        if in_buffer and soft_prompted is None:
            request.release()  # a buffer that was filled with chunks
            request.kv = adapter.request_kv(request.capacity)
            request.logits = adapter.forward_plain(torch.tensor(token_ids), request.kv)
            request.next_logits = buffer_decoder(adapter, request.kv)
        else:
            model = adapter.model if soft_prompted is None else soft_prompted
            plain = PlainDecoder(model, adapter.device, keeps_cache=soft_prompted is None)
            request.logits, request.next_logits = plain.prefill(list(token_ids)), plain.next_logits
