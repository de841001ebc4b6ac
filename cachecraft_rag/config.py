"""Settings of the engine: frozen models, every field with a default, unknown options refused."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

PolicyName = Literal[
    "none",
    "all",
    "random",
    "chunk_start",
    "key_deviation",
    "question_attention",
    "question_deviation",
    "question_sensitivity",
]

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(value: object) -> object:
    """Turn a size such as ``"4GiB"`` or ``"500 MB"`` into bytes; other values pass through to pydantic.

    Raises:
        ValueError: The text is not a number with one of the known units.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match.group(2).upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; use bytes or a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RecomputeConfig(_Settings):
    """How much of the reused chunks is recomputed, and which tokens.

    Attributes:
        policy: Which tokens: see ``cachecraft_rag.selection``.
        ratio: Share of the reused chunk tokens to recompute; 0.0 reuses as is, 1.0 equals a full prefill.
        seed: Seed of the ``random`` policy.
    """

    policy: PolicyName = "question_sensitivity"
    ratio: float = Field(default=0.15, ge=0.0, le=1.0)
    seed: int = 0


class EncodeConfig(_Settings):
    """What a chunk's KV is computed behind, so that its first tokens need not become attention sinks.

    Attributes:
        behind: ``"none"``, ``"chat_head"`` (the chat template up to the user's text) or ``"prefix"`` (the chat head and
            ``instruction``). Part of every chunk's key.
        instruction: The instruction of the canonical prefix.
        sensitivity: When a chunk's static sensitivity is measured: ``"deferred"`` after the answer that first used the
            chunk, ``"inline"`` together with its KV. ``warm`` always measures it at once.
    """

    behind: Literal["none", "chat_head", "prefix"] = "prefix"
    instruction: str = "Answer the question using only the passages.\n\n"
    sensitivity: Literal["deferred", "inline"] = "deferred"


class SamplingConfig(_Settings):
    """How the answer is drawn from the logits.

    Attributes:
        max_new_tokens: Longest answer in tokens; cut to what the context window leaves.
        temperature: Below 0.0001 the most likely token is taken; higher values flatten the distribution.
        top_p: Smallest set of tokens whose probabilities reach this sum; 1.0 keeps all.
        top_k: Number of most likely tokens to keep; 0 keeps all.
        repetition_penalty: Factor against tokens that occurred before, prompt included; 1.0 is off.
        seed: Seed of the draw; ``None`` draws a new one.
        stop: Texts that end the answer; they are not part of it.
    """

    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100.0)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()


class TierConfig(_Settings):
    """One tier of the store.

    Attributes:
        size: Byte budget; an integer or text such as ``"4GiB"``.
    """

    size: ByteSize = 4 * 2**30


class StoreConfig(_Settings):
    """The tiers of the chunk store.

    Attributes:
        cold: Host memory.
    """

    cold: TierConfig = TierConfig()


class EngineConfig(_Settings):
    """Settings of a ``CacheCraftEngine``.

    Attributes:
        namespace: Chunks are shared inside a namespace and never across (tenants).
        recompute: Which tokens of reused chunks are recomputed.
        encode: What a chunk's KV is computed behind.
        store: The tiers.
        keep_exact: Whether chunk KV that a request computed in its true context (ratio 1.0) is stored too, for prompts
            that begin alike. It takes the same room as any other entry.
        max_new_tokens: Longest answer, in tokens, where a call names none.
        context_window: Largest prompt plus answer in tokens; ``None`` takes the model's own.
        max_chunks: Largest number of chunk texts the registry remembers.
    """

    namespace: str = Field(default="default", min_length=1)
    recompute: RecomputeConfig = RecomputeConfig()
    encode: EncodeConfig = EncodeConfig()
    store: StoreConfig = StoreConfig()
    keep_exact: bool = True
    max_new_tokens: int = Field(default=256, ge=1)
    context_window: int | None = Field(default=None, ge=2)
    max_chunks: int = Field(default=100_000, ge=1)
