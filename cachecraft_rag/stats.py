"""What a request did and cost, returned with every answer."""

from __future__ import annotations

from html import escape

from pydantic import BaseModel, ConfigDict, Field


class RequestStats(BaseModel):
    """Figures of one request. Times are wall-clock seconds, sizes are bytes, counts are tokens unless named otherwise.

    ``prompt_tokens`` is the sum of ``reused_tokens``, ``recomputed_tokens`` and ``prefilled_tokens``.

    Attributes:
        prompt_tokens: Length of the prompt.
        reused_tokens: Prompt tokens whose stored KV was used as it is, those before the first chunk included.
        recomputed_tokens: Prompt tokens of stored chunks that were computed again in their new context.
        prefilled_tokens: Prompt tokens computed because nothing was stored for them.
        charged_ratio: Token-layers computed before the first token (selection passes included) over those of a full
            prefill.
        chunk_hits: Chunks of the prompt that were found in the store.
        chunk_misses: Chunks of the prompt that were not.
        hits_by_tier: Chunks found, by the name of the tier that held them.
        loads_declined: Chunks among the misses that a slow tier has, but that were computed because that is quicker.
        stored_tokens: Tokens of chunks whose KV this request put into the store.
        bytes_loaded: Bytes of KV taken from the store.
        queue_s: Time waited in line before anything was done, because other requests ran.
        load_s: Time to look up, move and place stored KV; what is read while something computes costs none.
        encode_s: Time to compute the KV of chunks that were not stored, before the first token.
        select_s: Time to choose the tokens to recompute, selection passes included.
        prefill_s: Time of the forward pass that computes the selected and the new tokens.
        ttft_s: Time from the call to the first token: everything above, the tokenisation, and steps of other requests.
        decode_s: Time from the first token to the last; tokens of other requests are drawn in it too.
        store_s: Time spent after the last token on storing and measuring new chunks.
        output_tokens: Length of the answer.
        policy: The selection policy that ran.
        ratio: The recompute ratio: the one asked for, or the one that a target led to; 1.0 after full prefill for it.
        residual: What the policy's scores add up to over the tokens that were not recomputed; ``None`` without scores.
        predicted_divergence: Mean KL divergence from full prefill per token of the answer in nats, as predicted from
            ``residual``; ``None`` without a calibration for it.
        similarity: Cosine of the earlier question whose scores were used; ``None`` where none was.
        fallback_reason: Why the whole prompt was prefilled; ``None`` when reuse was possible.
    """

    model_config = ConfigDict(frozen=True)

    prompt_tokens: int
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    prefilled_tokens: int = 0
    charged_ratio: float = 1.0
    chunk_hits: int = 0
    chunk_misses: int = 0
    hits_by_tier: dict[str, int] = Field(default_factory=dict)
    loads_declined: int = 0
    stored_tokens: int = 0
    bytes_loaded: int = 0
    queue_s: float = 0.0
    load_s: float = 0.0
    encode_s: float = 0.0
    select_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    store_s: float = 0.0
    output_tokens: int = 0
    policy: str = "none"
    ratio: float = 0.0
    residual: float | None = None
    predicted_divergence: float | None = None
    similarity: float | None = None
    fallback_reason: str | None = None

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{name}</td><td>{_shown(value)}</td></tr>" for name, value in self)
        return f"<table><thead><tr><th>RequestStats</th><th></th></tr></thead><tbody>{rows}</tbody></table>"


class RefinementStats(BaseModel):
    """What was computed exactly while no request ran.

    Attributes:
        sequences: Chunk sequences that are counted.
        waiting: Sequences that wait or are being computed.
        refined: Sequences that were computed and stored.
        stored_tokens: Tokens whose exact KV was stored.
        computed_tokens: Tokens that were computed; what was given up halfway is among them.
        forwards: Forward passes that this took.
        errors: Sequences given up because something failed.
    """

    model_config = ConfigDict(frozen=True)

    sequences: int = 0
    waiting: int = 0
    refined: int = 0
    stored_tokens: int = 0
    computed_tokens: int = 0
    forwards: int = 0
    errors: int = 0


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
