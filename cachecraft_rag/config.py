"""Settings of the engine: frozen models, every field with a default, unknown options refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cachecraft_rag.settings_file import read_settings, write_settings
from cachecraft_rag.store_config import ByteSize, Settings, StoreConfig

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

Behind = Literal["none", "chat_head", "prefix", "passages", "neighbours"]
"""What chunks are computed behind; see ``EncodeConfig``."""

Preset = Literal["exact", "high", "balanced", "fast"]
"""How close answers come to full prefill's, by name; see ``RecomputeConfig``."""

_PRESET_TARGETS: dict[str, float | None] = {"exact": None, "high": 0.03, "balanced": 0.06, "fast": 0.15}
_PRESET_RATIOS = {"exact": 1.0, "high": 0.3, "balanced": 0.15, "fast": 0.05}
_DEFAULT_RATIO = 0.15


class RecomputeConfig(Settings):
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
        attend_share: Share of the blocks of every reused chunk that the question and the recomputed tokens look at,
            the most promising ones (sparse attention); 1.0 looks at all. Not where a request recomputes everything.
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
    offset: float = Field(default=0.5, ge=0.0, le=1.0)
    attend_share: float = Field(default=1.0, gt=0.0, le=1.0)
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
        replaced = set(goals) if any(name in changes for name in goals) else None
        kept = self.model_dump(exclude_unset=True, exclude=replaced)
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


class EncodeConfig(Settings):
    """What a chunk's KV is computed behind, in place of the prompts that are not known yet.

    Attributes:
        behind: ``"none"``, ``"chat_head"`` (the chat template up to the user's text), ``"prefix"`` (the chat head and
            ``instruction``), ``"passages"``: the average over two unrelated texts behind that prefix, or
            ``"neighbours"``: the average over one of these texts and the chunks of the namespace that are most like it,
            half of them each. Averages are taken once the sensitivity is measured; until then it is the first text.
            Part of every chunk's key.
        instruction: The instruction of the canonical prefix.
        sensitivity: When a chunk's static sensitivity is measured: ``"deferred"`` after the answer that first used the
            chunk, ``"inline"`` together with its KV. ``warm`` always measures it at once.
    """

    behind: Behind = "neighbours"
    instruction: str = "Answer the question using only the passages.\n\n"
    sensitivity: Literal["deferred", "inline"] = "deferred"


class RefineConfig(Settings):
    """Computing exactly, while no request runs, the chunk sequences that were answered approximately and come again.

    Attributes:
        enabled: Whether this is done.
        after: How many approximate answers to a sequence make it worth that.
        max_sequences: How many sequences are counted; the least recent are forgotten.
        max_waiting: How many wait to be computed; the oldest gives way.
        piece_tokens: Tokens of one forward pass. A request that comes meanwhile waits for one at most.
    """

    enabled: bool = False
    after: int = Field(default=2, ge=1)
    max_sequences: int = Field(default=10_000, ge=1)
    max_waiting: int = Field(default=8, ge=1)
    piece_tokens: int = Field(default=256, ge=1)


class SimilarConfig(Settings):
    """Starting from what an earlier, similar question looked at; needs the engine's argument ``embed``.

    Only prompts whose ``RagPrompt.question`` is set take part, and policies that score tokens.

    Attributes:
        enabled: Whether this is done.
        threshold: Least cosine of two questions that count as similar.
        max_questions: How many questions are kept; the least useful are forgotten.
        skip_pass: Whether the question is not scored itself where the earlier one had the same chunks: its pass is
            saved.
        weight: What earlier scores count where the question is scored itself, whose own scores count 1.
    """

    enabled: bool = False
    threshold: float = Field(default=0.85, ge=-1.0, le=1.0)
    max_questions: int = Field(default=1000, ge=1)
    skip_pass: bool = True
    weight: float = Field(default=0.5, ge=0.0, allow_inf_nan=False)


class SchedulerConfig(Settings):
    """How many requests are served at the same time.

    Attributes:
        max_batch: How many are decoded together, one row of the model each.
        max_waiting: How many may wait in line; another one gets ``EngineBusyError``.
        memory: Bytes of the KV buffers (prompt and longest answer) of all that are being served. One that is larger
            than all of it is served alone.
    """

    max_batch: int = Field(default=32, ge=1)
    max_waiting: int = Field(default=256, ge=1)
    memory: ByteSize = 2 * 2**30


class SamplingConfig(Settings):
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


class EngineConfig(Settings):
    """Settings of a ``CacheCraftEngine``.

    Attributes:
        namespace: Chunks are shared inside a namespace and never across (tenants).
        recompute: Which tokens of reused chunks are recomputed, and how many.
        calibration: File of ``cachecraft calibrate``: what this model's divergence is predicted from, for targets,
            presets and ``RequestStats.predicted_divergence``, and what the policy ``predicted`` needs; ``None``
            predicts nothing.
        encode: What a chunk's KV is computed behind.
        store: The tiers.
        scheduler: How many requests are served at the same time.
        keep_exact: Whether chunk KV that a request computed in its true context (ratio 1.0) is stored too, for prompts
            that begin alike. It takes the same room as any other entry.
        refine: What is computed exactly while no request runs; nothing by default.
        similar_questions: What is taken over from earlier questions; nothing by default.
        max_new_tokens: Longest answer, in tokens, where a call names none.
        context_window: Largest prompt plus answer in tokens; ``None`` takes the model's own.
        max_chunks: Largest number of chunk texts the registry remembers.
        auto_chunks: Whether long text that nobody registered is split at paragraphs, whose KV is stored after the first
            answer and reused when they come again.
        chunk_tokens: Most tokens of the chunks that splitters are to cut for this engine; see ``chunk_limits``.
    """

    namespace: str = Field(default="default", min_length=1)
    recompute: RecomputeConfig = RecomputeConfig()
    calibration: str | None = Field(default=None, min_length=1)
    encode: EncodeConfig = EncodeConfig()
    store: StoreConfig = StoreConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    keep_exact: bool = True
    refine: RefineConfig = RefineConfig()
    similar_questions: SimilarConfig = SimilarConfig()
    max_new_tokens: int = Field(default=256, ge=1)
    context_window: int | None = Field(default=None, ge=2)
    max_chunks: int = Field(default=100_000, ge=1)
    auto_chunks: bool = False
    chunk_tokens: int = Field(default=768, ge=2)

    @property
    def chunk_limits(self) -> dict[str, int]:
        """``min_tokens`` and ``max_tokens`` of a ``ChunkSplitter``: two thirds of ``chunk_tokens``, and all of it."""
        return {"min_tokens": 2 * self.chunk_tokens // 3, "max_tokens": self.chunk_tokens}

    @classmethod
    def from_file(cls, path: str | Path) -> EngineConfig:
        """Settings from a JSON file: an object of names and values as here, each in its place or at its default.

        Paths in it are relative to the working directory, as they are everywhere.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no JSON object, or a setting is not allowed; the message names it, its value, and what is.
        """
        return read_settings(cls, path)

    def to_file(self, path: str | Path) -> None:
        """Write what was set, as ``from_file`` reads it; folders are made.

        Raises:
            ValueError: The master key is given as bytes, which belong in no readable file.
        """
        write_settings(self, path)
