"""From the logits of a prompt's last token to the text of its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence, Set

from cachecraft_rag.decode import decode
from cachecraft_rag.detokenizer import Detokenizer
from cachecraft_rag.request import Request
from cachecraft_rag.result import FinishReason
from cachecraft_rag.sampling import Sampler


def answer(
    request: Request, to_text: Callable[[Sequence[int]], str], eos_ids: Set[int]
) -> Generator[str, None, tuple[str, tuple[int, ...], FinishReason]]:
    """Draw the tokens of a request that has been prefilled, and yield their text as it becomes certain.

    Args:
        request: The request; its figures of time and length are filled in when the answer is complete.
        to_text: Turns token ids into text, special tokens left out.
        eos_ids: Ids that end the answer.

    Returns:
        The text, its tokens, and why it ended.
    """
    assert request.logits is not None
    assert request.next_logits is not None
    sampling = request.sampling
    sampler = Sampler(sampling, request.encoded.token_ids, request.logits.device)
    detokenizer = Detokenizer(to_text, sampling.stop)
    token_ids: list[int] = []
    first_token_at = time.perf_counter()
    for token_id in decode(request.logits, request.next_logits, sampler, eos_ids, sampling.max_new_tokens):
        if not token_ids:
            first_token_at = time.perf_counter()
        token_ids.append(token_id)
        if delta := detokenizer.push(token_id):
            yield delta
        if detokenizer.is_stopped:
            break
    if delta := detokenizer.finish():
        yield delta
    request.figures |= {
        "ttft_s": first_token_at - request.started,
        "decode_s": time.perf_counter() - first_token_at,
        "output_tokens": len(token_ids),
    }
    is_full = len(token_ids) == sampling.max_new_tokens and not detokenizer.is_stopped
    return detokenizer.text, tuple(token_ids), "length" if is_full else "stop"
