"""Settings of the engine: frozen models, every field with a default, unknown options refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

PolicyName = Literal[
    "none",
    "all",
    "random",
    "chunk_start",
    "key_deviation",
    "question_attention",
    "question_deviation",
    "question_sensitivity",
    "inter_attention",
    "history",
    "predicted",
]

Preset = Literal["exact", "high", "balanced", "fast"]
"""How close answers come to full prefill's, by name; see ``RecomputeConfig``."""

_PRESET_TARGETS: dict[str, float | None] = {"exact": None, "high": 0.03, "balanced": 0.06, "fast": 0.15}
_PRESET_RATIOS = {"exact": 1.0, "high": 0.3, "balanced": 0.15, "fast": 0.05}
_DEFAULT_RATIO = 0.15

Precision = Literal["model", "k16v8", "int8", "int4"]
Compression = Literal["none", "zstd"]
EvictionPolicyName = Literal["lru", "lfu", "saving"]

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
        ratio: Share of the reused chunk tokens to recompute; 0.0 reuses as is, 1.0 equals a full prefill. With a
            preset it is the preset's; with ``target_divergence`` every request has its own.
        target_divergence: How far answers may be from full prefill's: mean KL divergence per token in nats, where 0.05
            means that the tokens of full prefill's answer become 5 % less likely. Every request recomputes the
            smallest share whose predicted divergence is at most this, and is prefilled in full when that share is
            above ``max_ratio``. Needs ``EngineConfig.calibration``. A chunk whose sensitivity has not been measured
            yet counts as if it depended on its context entirely: ``warm`` chunks, or expect full prefill the first
            time.
        preset: A target by name: ``"high"`` 0.03, ``"balanced"`` 0.06, ``"fast"`` 0.15; ``"exact"`` recomputes
            everything. Where no calibration fits model and policy, the ratio is fixed instead: 0.3, 0.15 and 0.05.
        max_ratio: Largest share to recompute for a target; above it full prefill is about as quick, and exact.
        offset: How far tokens that are not recomputed are moved, as a share of the change that those which are predict
            for them; 0.0 leaves them as they are stored.
        seed: Seed of the ``random`` policy.
        alpha: Strength of the correction of the policy ``inter_attention``, which ignores ratio and preset: every chunk
            gets the share alpha * CCI * (1 - beta') of its tokens. The right one depends on the model.
        max_variants: How many variants of a chunk, made behind different prefixes, that policy keeps.
    """

    policy: PolicyName = "question_sensitivity"
    ratio: float = Field(default=_DEFAULT_RATIO, ge=0.0, le=1.0)
    target_divergence: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    preset: Preset | None = None
    max_ratio: float = Field(default=0.5, ge=0.0, le=1.0)
    offset: float = Field(default=1.0, ge=0.0, le=1.0)
    seed: int = 0
    alpha: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    max_variants: int = Field(default=5, ge=1)

    @property
    def target(self) -> float | None:
        """The divergence to stay below, from ``target_divergence`` or the preset; ``None`` for a fixed ratio."""
        return self.target_divergence if self.preset is None else _PRESET_TARGETS[self.preset]

    def changed(self, **changes: Any) -> RecomputeConfig:
        """The same settings but for some; of ratio, target and preset the new one takes the old one's place."""
        goals = ("ratio", "target_divergence", "preset")
        kept = self.model_dump(exclude=set(goals) if any(name in changes for name in goals) else None)
        return type(self)(**{**kept, **changes})

    @model_validator(mode="before")
    @classmethod
    def _take_the_ratio_of_the_preset(cls, values: Any) -> Any:
        preset = values.get("preset") if isinstance(values, dict) else None
        ratio = _PRESET_RATIOS.get(preset) if isinstance(preset, str) else None
        return values if ratio is None else {"ratio": ratio, **values}

    @model_validator(mode="after")
    def _check_that_one_thing_decides(self) -> RecomputeConfig:
        if self.preset is not None and self.target_divergence is not None:
            raise ValueError(
                f"target_divergence: {self.target_divergence} beside preset {self.preset!r}; give one of them"
            )
        decides = "target_divergence" if self.preset is None else f"preset {self.preset!r}"
        ratio = _DEFAULT_RATIO if self.preset is None else _PRESET_RATIOS[self.preset]
        if self.ratio != ratio and (self.preset is not None or self.target_divergence is not None):
            raise ValueError(f"ratio: {self.ratio} beside {decides}, which decides it; give one of them")
        return self


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

    @classmethod
    def of(cls, max_new_tokens: int, options: Mapping[str, Any]) -> SamplingConfig:
        """Settings of one call; options left at ``None`` keep their default, one stop text may be given alone."""
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        return cls(**{"max_new_tokens": max_new_tokens, **given})


class MemoryTierConfig(_Settings):
    """A tier in memory.

    Attributes:
        size: Byte budget; an integer or text such as ``"4GiB"``.
        policy: Which entries go first when it is full: least recently used, least frequently used (aged), or those
            that save least computation per byte.
        precision: What entries are kept in; everything but ``"model"`` loses some accuracy.
        ttl_s: Seconds without use after which an entry is gone; ``None`` keeps it.
        demote_after_s: Seconds without use after which an entry is lowered to int4 when room is short, before others
            are dropped; ``None`` never lowers.
    """

    size: ByteSize = 4 * 2**30
    policy: EvictionPolicyName = "lru"
    precision: Precision = "model"
    ttl_s: float | None = Field(default=None, gt=0)
    demote_after_s: float | None = Field(default=None, gt=0)


class WarmTierConfig(MemoryTierConfig):
    """A tier in device memory.

    Attributes:
        size: Byte budget; ``None`` takes its share of ``StoreConfig.device_size``.
    """

    size: ByteSize | None = None  # type: ignore[assignment]


class HotTierConfig(WarmTierConfig):
    """The tier of what is used most.

    Attributes:
        policy: As in every memory tier.
    """

    policy: EvictionPolicyName = "lfu"


class DiskTierConfig(_Settings):
    """A tier of files that outlives the process and may be shared by several.

    Attributes:
        path: Folder; made when it is missing.
        size: Byte budget over all processes.
        policy: As in memory.
        precision: What entries are written in.
        compression: ``"zstd"`` compresses after sorting bytes by their place in a number.
        ttl_s: Seconds without use after which an entry is gone.
    """

    path: str = Field(min_length=1)
    size: ByteSize = 16 * 2**30
    policy: EvictionPolicyName = "lru"
    precision: Precision = "model"
    compression: Compression = "none"
    ttl_s: float | None = Field(default=None, gt=0)


class RemoteTierConfig(_Settings):
    """A tier in Redis or Valkey, shared by many processes and machines.

    Attributes:
        url: ``redis://``, ``rediss://`` (TLS) or ``redis+cluster://``.
        size: Byte budget; ``None`` leaves it to the server.
        precision: What entries are sent in.
        compression: As on disk.
        ttl_s: Seconds without use after which an entry is gone; ``None`` keeps it.
    """

    url: str = Field(min_length=1)
    size: ByteSize | None = None
    precision: Precision = "model"
    compression: Compression = "none"
    ttl_s: float | None = Field(default=3600.0, gt=0)


class StoreConfig(_Settings):
    """The tiers of the chunk store, fastest first; each may be given as a plain dict, and one of 0 bytes is left out.

    Attributes:
        device_size: Byte budget of hot and warm together, in the memory of the model's device, which is host memory
            without a GPU; ``None`` takes a fifth of a GPU's memory, and nothing where there is none.
        hot_share: Share of ``device_size`` that is hot.
        hot: Device memory for chunks that are used again and again, and for static ones, which are never pushed out.
        warm: Device memory for what was used last.
        cold: Host memory, pinned where there is a GPU.
        disk: Files; ``None`` for no such tier.
        remote: Redis or Valkey; ``None`` for no such tier.
        master_key: Encrypts disk and remote, with a key of its own for every namespace: bytes, the path of a key file,
            or ``"env:NAME"`` for an environment variable; ``None`` stores entries in the clear.
        admit_after: Uses after which an entry is written to disk and remote; being computed is the first.
        hot_after: Uses after which an entry may become hot.
        load_ahead: Chunks read from disk or remote at the same time, ahead of the layers that compute with them; 0
            loads one after the other, before anything is computed.
        compute_if_faster: Whether a chunk is computed anew where loading it would take longer, both as measured.
    """

    device_size: ByteSize | None = None
    hot_share: float = Field(default=0.30, ge=0.0, le=1.0)
    hot: HotTierConfig = HotTierConfig()
    warm: WarmTierConfig = WarmTierConfig()
    cold: MemoryTierConfig = MemoryTierConfig()
    disk: DiskTierConfig | None = None
    remote: RemoteTierConfig | None = None
    master_key: bytes | str | None = Field(default=None, repr=False)
    admit_after: int = Field(default=1, ge=1)
    hot_after: int = Field(default=2, ge=1)
    load_ahead: int = Field(default=3, ge=0, le=64)
    compute_if_faster: bool = True


class EngineConfig(_Settings):
    """Settings of a ``CacheCraftEngine``.

    Attributes:
        namespace: Chunks are shared inside a namespace and never across (tenants).
        recompute: Which tokens of reused chunks are recomputed, and how many.
        calibration: File of ``cachecraft calibrate``: what this model's divergence is predicted from, for targets,
            presets and ``RequestStats.predicted_divergence``, and what the policy ``predicted`` needs; ``None``
            predicts nothing.
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
    calibration: str | None = Field(default=None, min_length=1)
    encode: EncodeConfig = EncodeConfig()
    store: StoreConfig = StoreConfig()
    keep_exact: bool = True
    max_new_tokens: int = Field(default=256, ge=1)
    context_window: int | None = Field(default=None, ge=2)
    max_chunks: int = Field(default=100_000, ge=1)
