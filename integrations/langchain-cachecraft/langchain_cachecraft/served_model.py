"""What chat model and text model have in common: their fields, their engine, and how an answer is drawn from it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from langchain_core.documents import Document
from langchain_core.language_models import LangSmithParams
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from typing_extensions import Self

from cachecraft_rag import CacheCraftEngine, EngineConfig, EngineKey, GenerationResult, RagPrompt
from cachecraft_rag.config import PolicyName, Preset
from cachecraft_rag.engine_pool import SHARED_ENGINES
from langchain_cachecraft.answers import PROVIDER
from langchain_cachecraft.callbacks import RETRIEVED, install
from langchain_cachecraft.documents import DOCUMENT_ID_KEYS, DocumentIdKey, texts_by_document
from langchain_cachecraft.engine_ids import ENGINE_IDS
from langchain_cachecraft.options import CallOptions, check_goals


class ServedModel(BaseModel):
    """A local Hugging Face model behind an engine that all models of the process with the same settings share.

    Weights are loaded at the first call. Copies, pickles and configured variants have the same engine.
    """

    model_config = ConfigDict(populate_by_name=True, extra="forbid", arbitrary_types_allowed=True)

    model: str = Field(default="", alias="model_name", description="A local folder, an alias, or a hub id.")
    engine: CacheCraftEngine | None = Field(
        default=None, exclude=True, repr=False, description="A ready engine, instead of one loaded by name."
    )
    dtype: str = Field(default="auto", description="A torch dtype or its name; 'auto' takes the checkpoint's.")
    device: str | None = Field(default=None, description="Where to run; None takes the first GPU, else the CPU.")
    engine_config: EngineConfig | None = Field(
        default=None, description="Settings of the engine, such as budgets; or the path of a file that holds them."
    )
    namespace: str | None = Field(
        default=None,
        min_length=1,
        description="Chunks are shared inside it and never across (tenants); None: the engine's.",
    )

    temperature: float = Field(default=0.0, ge=0.0, description="0.0 takes the most likely token.")
    max_tokens: int | None = Field(default=None, ge=1, description="Longest answer; None takes the engine's setting.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Smallest set of tokens that reaches this sum.")
    top_k: int = Field(default=0, ge=0, description="Number of most likely tokens to keep; 0 keeps all.")
    repetition_penalty: float = Field(default=1.0, gt=0.0, description="Factor against tokens seen before; 1.0 is off.")
    seed: int | None = Field(default=None, description="Seed of the draw; None draws a new one.")
    timeout: float | None = Field(
        default=None, gt=0.0, description="Seconds an answer may take, loading excluded; checked between texts."
    )
    reuse: bool = Field(default=True, description="False prefills every prompt in the ordinary way: the reference.")
    policy: PolicyName | None = Field(default=None, description="Which chunk tokens to recompute; None: the engine's.")
    recompute_ratio: float | None = Field(
        default=None, ge=0.0, le=1.0, description="Share of the chunk tokens that is recomputed; None: the engine's."
    )
    target_divergence: float | None = Field(
        default=None,
        ge=0.0,
        description="How far answers may be from full prefill's, in nats per token, instead of a share; the engine "
        "needs a calibration.",
    )
    preset: Preset | None = Field(default=None, description="A target by name, instead of a share or a target.")

    stop: list[str] | None = Field(default=None, description="Texts that end the answer; a call's own replace them.")
    auto_register: bool = Field(
        default=True, description="Learn the chunks from every retriever of the process and from tool artifacts."
    )
    streaming: bool = Field(default=False, description="Whether invoke streams internally, for token callbacks.")
    max_retries: int | None = Field(
        default=None, description="Accepted because LangChain passes it to every model; nothing here is retried."
    )
    api_key: SecretStr | None = Field(
        default=None, description="Accepted because LangChain passes it to every model; a local model needs none."
    )

    @field_validator("engine_config", mode="before")
    @classmethod
    def _read_config(cls, value: object) -> object:
        return EngineConfig.from_file(value) if isinstance(value, str | Path) else value

    @field_validator("dtype", "device", mode="before")
    @classmethod
    def _name_of(cls, value: object) -> object:
        return str(value).removeprefix("torch.") if isinstance(value, torch.dtype | torch.device) else value

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, value: str) -> str:
        dtype = getattr(torch, value, None)
        if value != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype: {value!r} is no floating point dtype of torch; give 'auto' or e.g. 'bfloat16'")
        return value

    @model_validator(mode="after")
    def _set_up_cachecraft(self) -> Self:
        if self.engine is None and not self.model:
            raise ValueError("model: '' names no model; give a local folder, an alias, a hub id, or a ready engine")
        if self.engine is not None:
            own = {"dtype": self.dtype != "auto", "device": self.device, "engine_config": self.engine_config}
            if refused := [name for name, given in own.items() if given]:
                raise ValueError(f"{refused[0]}: can't be given together with a ready engine, which has its own")
            name = getattr(self.engine.model.config, "_name_or_path", "")
            self.model = self.model or name or type(self.engine.model).__name__
        check_goals(dict(self))
        if self.auto_register:
            install()
        return self

    def get_engine(self, model: str | None = None) -> CacheCraftEngine:
        """The engine behind this model, for ``warm``, ``invalidate`` and the like; loads the weights if need be.

        Models of other namespaces have the same engine: with a ``namespace`` of your own, name it in these calls.

        Args:
            model: Another model, loaded with the settings of this one.

        Raises:
            ValueError: There is no such model, or another model is asked of a ready engine.
        """
        if self.engine is None:
            engine = SHARED_ENGINES.get(self._engine_key(model or self.model), keep=True)
        elif model in (None, self.model):
            engine = self.engine
        else:
            raise ValueError(f"model: {model!r} can't be served, since this one was made with a ready engine")
        if self.auto_register:
            RETRIEVED.feed.subscribe(engine, self.namespace)
        return engine

    def register_documents(
        self,
        documents: Iterable[Document],
        *,
        document_id_key: DocumentIdKey = DOCUMENT_ID_KEYS,
        prefetch: bool = False,
    ) -> int:
        """Look for the texts of documents in later prompts; loads the weights if need be.

        Args:
            documents: Chunks, as a retriever returns them.
            document_id_key: Where their metadata name the document they were cut from, for the engine's
                ``invalidate(document_ids=...)``: the first of these keys that is there, or ``None`` for nowhere.
            prefetch: Whether their stored KV begins to move from disk or remote into memory at once.

        Returns:
            How many texts are new.
        """
        engine = self.get_engine()
        grouped = texts_by_document(documents, document_id_key)
        num_new = sum(engine.register(texts, self.namespace, name) for name, texts in grouped.items())
        if prefetch:
            engine.prefetch([text for texts in grouped.values() for text in texts], self.namespace)
        return num_new

    def close(self) -> None:
        """Release the model and its chunks, for all models of the process with the same settings.

        A later call loads the weights again. A ready engine stays open: it belongs to whoever made it.
        """
        if self.engine is None:
            SHARED_ENGINES.close(self._engine_key(self.model))

    def _named(self, params: LangSmithParams, model: str | None) -> LangSmithParams:
        """A trace's parameters with our names for provider and model; ``model`` is that of the call."""
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = model or self.model
        return params

    def _identity(self) -> dict[str, Any]:
        """All that decides an answer; LangChain's response cache takes it as part of its key."""
        config = self.engine.config if self.engine is not None else self.engine_config or EngineConfig()
        return {
            **CallOptions.of(self, {}).as_dict(),
            "stop_sequences": self.stop,  # LangChain puts the stop texts of the call under "stop"
            "dtype": self.dtype,
            "device": self.device,
            "engine_config": config.model_dump(),
            "namespace": self.namespace or config.namespace,
            "engine": None if self.engine is None else ENGINE_IDS.id_of(self.engine),
        }

    def _answer_to(
        self, engine: CacheCraftEngine, prompt: RagPrompt, stop: list[str] | None, options: CallOptions
    ) -> Generator[str | GenerationResult, None, None]:
        """Yield the pieces of an answer and at last the whole."""
        started = time.monotonic()
        stream = engine.stream(prompt, **self._engine_options(engine, stop, options))
        with closing(stream):
            for delta in stream:
                yield delta
                if options.timeout is not None and time.monotonic() - started > options.timeout:
                    raise TimeoutError(f"timeout: the answer was not complete after {options.timeout} s")
            result = stream.result
        yield result

    def _answers_to(
        self, engine: CacheCraftEngine, prompts: Sequence[RagPrompt], stop: list[str] | None, options: CallOptions
    ) -> list[GenerationResult]:
        """Whole answers to several prompts; ``timeout`` is not looked at."""
        return engine.generate_batch(prompts, **self._engine_options(engine, stop, options))

    def _engine_options(self, engine: CacheCraftEngine, stop: list[str] | None, options: CallOptions) -> dict[str, Any]:
        return {
            "reuse": options.reuse,
            "recompute": options.recompute(engine.config.recompute),
            "namespace": self.namespace,
            "stop": self.stop if stop is None else stop,
            **options.sampling(),
        }

    def _engine_key(self, model: str) -> EngineKey:
        return EngineKey(model, self.dtype, self.device, self.engine_config or EngineConfig())

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine  # weights and chunks stay where they are
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        if self.engine is None:
            return state
        return {**state, "__dict__": {**state["__dict__"], "engine": ENGINE_IDS.id_of(self.engine)}}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        engine_id = state["__dict__"]["engine"]
        if engine_id is not None:
            state = {**state, "__dict__": {**state["__dict__"], "engine": ENGINE_IDS.engine_of(engine_id)}}
        super().__setstate__(state)
        if self.auto_register:
            install()
