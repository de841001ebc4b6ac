"""The part of ``CacheCraftLLM`` that is no call: its fields, and the engine it shares with others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

from llama_index.core.bridge.pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.function_calling import FunctionCallingLLM
from typing_extensions import Self

from cachecraft_rag import CacheCraftEngine, EngineConfig, EngineKey
from cachecraft_rag.config import PolicyName, Preset
from cachecraft_rag.engine_pool import SHARED_ENGINES
from llama_index.llms.cachecraft import instrumentation
from llama_index.llms.cachecraft.options import SAMPLING, check_one_goal

# Fields that are settings of the engine: two LLMs that differ in them have two engines.
_OF_THE_ENGINE = ("context_window", "calibration")

Stop = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else [] if value is None else value),
]


class EngineBackedLLM(FunctionCallingLLM):
    """An LLM of LlamaIndex over an engine that is loaded late and shared; see ``CacheCraftLLM`` for its arguments."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="A local folder, the alias `smollm2-135m`, or a hub id.")
    context_window: int | None = Field(
        default=None, ge=2, description="Largest prompt plus answer in tokens; None takes the model's own."
    )
    max_new_tokens: int = Field(default=DEFAULT_NUM_OUTPUTS, ge=1, description="Longest answer in tokens.")
    temperature: float = Field(default=0.0, ge=0.0, description="0.0 takes the most likely token.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Probability mass to draw from; 1.0 keeps all.")
    top_k: int = Field(default=0, ge=0, description="Number of most likely tokens to draw from; 0 keeps all.")
    repetition_penalty: float = Field(default=1.0, gt=0.0, description="Factor against repetition; 1.0 is off.")
    seed: int | None = Field(default=None, description="Seed of the draw; None draws a new one.")
    stop: Stop = Field(default_factory=list, description="Texts that end the answer; they are not part of it.")
    namespace: str = Field(
        default="default", min_length=1, description="Chunks are shared inside a namespace and never across (tenants)."
    )
    policy: PolicyName | None = Field(
        default=None, description="Which tokens of reused chunks are recomputed; None takes the engine's policy."
    )
    recompute_ratio: float | None = Field(
        default=None, ge=0.0, le=1.0, description="Share of reused chunk tokens to recompute; None takes the engine's."
    )
    preset: Preset | None = Field(
        default=None, description="How close answers come to full prefill: exact, high, balanced or fast."
    )
    target_divergence: float | None = Field(
        default=None, ge=0.0, allow_inf_nan=False, description="Largest distance from full prefill, in nats per token."
    )
    calibration: str | None = Field(
        default=None, min_length=1, description="File of `cachecraft calibrate`, which targets need."
    )
    engine_config: EngineConfig | None = Field(
        default=None,
        description="Settings of the engine, or the path of a file that holds them; fields here come before them.",
    )
    reuse: bool = Field(default=True, description="False prefills every prompt in full: the reference.")
    auto_register: bool = Field(
        default=True, description="Learn chunks from synthesizers, retrievers and node parsers of this process."
    )
    dtype: str = Field(default="auto", description="Name of a torch dtype; `auto` takes the checkpoint's.")
    device: str | None = Field(default=None, description="Where to run; None takes the first GPU, else the CPU.")

    _engine: CacheCraftEngine | None = PrivateAttr(default=None)  # held, since the pool lets go of unused engines
    _is_given: bool = PrivateAttr(default=False)

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: CacheCraftEngine | None = None,
        hf_model: Any = None,
        tokenizer: Any = None,
        **fields: Any,
    ) -> None:
        if sum(source is not None for source in (model, engine, hf_model)) != 1:
            raise ValueError("model: give exactly one of model (a name), engine, and hf_model with tokenizer")
        if (hf_model is None) != (tokenizer is None):
            raise ValueError("tokenizer: give hf_model and tokenizer together")
        loading = [name for name in ("dtype", "device") if model is None and name in fields]
        if engine is not None and fields.get("engine_config") is not None:
            raise ValueError("engine_config: can't be given together with a ready engine, which has its own")
        if loading:
            raise ValueError(f"{loading[0]}: {fields[loading[0]]!r} has no effect on a model that is loaded already")
        config = engine.config if engine is not None else _config(fields)
        if config is not None:
            fields.setdefault("namespace", config.namespace)
            for field in _OF_THE_ENGINE:
                fields.setdefault(field, getattr(config, field))
        name = model if model is not None else _name(engine.model if engine is not None else hf_model)
        super().__init__(**{**fields, "model": name})
        if hf_model is not None:
            engine = SHARED_ENGINES.over(hf_model, tokenizer, self._key.config)
        self._engine, self._is_given = engine, engine is not None
        if self.auto_register:
            instrumentation.install()
        if self._is_given:
            self._ready_engine()  # refuses fields that contradict the engine's config

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_one_goal(self.__dict__)
        return self

    @property
    def engine(self) -> CacheCraftEngine:
        """The engine; loads the model at the first use.

        LLM objects of other namespaces have the same engine: with a ``namespace`` of your own, name it in calls of
        ``warm``, ``register`` and ``invalidate``.
        """
        return self._ready_engine()

    @property
    def chunk_limits(self) -> dict[str, int]:
        """``min_tokens`` and ``max_tokens`` of the chunks that the engine is set for; never loads the model."""
        config = self._engine.config if self._is_given and self._engine is not None else self.engine_config
        return (config or EngineConfig()).chunk_limits

    @property
    def is_loaded(self) -> bool:
        """Whether the engine is at hand; it is loaded at the first use."""
        return self._engine is not None and (self._is_given or not self._engine.is_closed)

    def close(self) -> None:
        """Close the engine, also for other LLM objects that share it; a model given by name loads again on use."""
        if self._is_given:
            assert self._engine is not None
            self._engine.close()
        else:
            SHARED_ENGINES.close(self._key)
            self._engine = None

    def to_payload(self) -> dict[str, Any]:
        """What events say about this LLM; never loads the model, because events are sent on the event loop."""
        return {
            "class_name": self.class_name(),
            "model_name": self.model,
            **{name: getattr(self, name) for name in SAMPLING},
        }

    def _ready_engine(self) -> CacheCraftEngine:
        if not self._is_given:
            self._engine = SHARED_ENGINES.get(self._key)
        engine = self._engine
        assert engine is not None
        if self._is_given:
            self._check_against(engine.config)
        if self.auto_register:
            instrumentation.CHUNKS.subscribe(engine, self.namespace)
        return engine

    def _check_against(self, config: EngineConfig) -> None:
        for name in _OF_THE_ENGINE:
            wanted, has = getattr(self, name), getattr(config, name)
            if wanted != has:
                raise ValueError(f"{name}: {wanted!r}, but the given engine has {has!r}; set it in its config")

    @property
    def _key(self) -> EngineKey:
        given = self.engine_config or EngineConfig()
        config = given.model_copy(update={name: getattr(self, name) for name in _OF_THE_ENGINE})
        return EngineKey(self.model, self.dtype, self.device, config)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self._engine)] = self._engine  # weights and chunks stay where they are
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        if self._is_given:
            raise TypeError("a CacheCraftLLM made from ready objects can't be pickled; name its model instead")
        clean = self.model_copy()  # LlamaIndex takes what can't be pickled out of the very dictionary it is handed
        clean._engine = None
        state: dict[str, Any] = FunctionCallingLLM.__getstate__(clean)
        return state


def _config(fields: dict[str, Any]) -> EngineConfig | None:
    """The engine's settings among the fields, read from their file or made of plain values where need be."""
    given = fields.get("engine_config")
    if isinstance(given, str | Path):
        given = EngineConfig.from_file(given)
    elif isinstance(given, dict):
        given = EngineConfig.model_validate(given)
    if given is None:
        return None
    fields["engine_config"] = given
    if "max_new_tokens" in given.model_fields_set:
        fields.setdefault("max_new_tokens", given.max_new_tokens)
    return cast(EngineConfig, given)


def _name(hf_model: Any) -> str:
    return str(getattr(hf_model.config, "_name_or_path", "") or type(hf_model).__name__)
