"""``ChatCacheCraft``: a local Hugging Face model as a LangChain chat model that reuses the KV of retrieved chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator
from typing_extensions import Self

from cachecraft_rag import CacheCraftEngine, EngineConfig, EngineKey, RagPrompt
from cachecraft_rag.config import PolicyName
from cachecraft_rag.engine_pool import SHARED_ENGINES
from cachecraft_rag.steps import Steps
from langchain_cachecraft.answers import PROVIDER, Answer, delta_chunk
from langchain_cachecraft.callbacks import RETRIEVED, install
from langchain_cachecraft.engine_ids import ENGINE_IDS
from langchain_cachecraft.messages import artifact_texts, chat_messages
from langchain_cachecraft.options import CallOptions

_VERSION = version("langchain-cachecraft")


class ChatCacheCraft(BaseChatModel):
    """A local Hugging Face model that keeps the keys and values of retrieved chunks and reuses them in later prompts.

    Replace the chat model of a chain by this one; nothing else changes. The model is loaded at the first call and
    shared by all chat models of the process with the same name, dtype, device and engine settings.

    Every field from ``temperature`` to ``recompute_ratio`` can also be given per call: ``chat.invoke(messages,
    max_tokens=50)``, ``chat.bind(reuse=False)``. So can ``model`` and ``stop``.

    Example:
        ```python
        from langchain_cachecraft import ChatCacheCraft

        chat = ChatCacheCraft(model="Qwen/Qwen2.5-0.5B-Instruct", max_tokens=128)
        answer = chat.invoke("What is a warranty?")
        answer.usage_metadata  # input_token_details: cache_read, cache_creation
        answer.response_metadata["cachecraft"]  # what the engine did, and how long it took
        ```
    """

    model_config = ConfigDict(populate_by_name=True, extra="forbid")

    model: str = Field(default="", alias="model_name", description="A local folder, an alias, or a hub id.")
    engine: CacheCraftEngine | None = Field(
        default=None, exclude=True, repr=False, description="A ready engine, instead of one loaded by name."
    )
    dtype: str = Field(default="auto", description="A torch dtype or its name; 'auto' takes the checkpoint's.")
    device: str | None = Field(default=None, description="Where to run; None takes the first GPU, else the CPU.")
    engine_config: EngineConfig | None = Field(default=None, description="Settings of the engine, such as budgets.")
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

    stop: list[str] | None = Field(default=None, description="Texts that end the answer; a call's own replace them.")
    auto_register: bool = Field(
        default=True, description="Learn the chunks from every retriever of the process and from tool artifacts."
    )
    streaming: bool = Field(default=False, description="Whether invoke streams internally, for token callbacks.")
    max_retries: int | None = Field(
        default=None, description="Accepted because LangChain passes it to every chat model; nothing here is retried."
    )
    api_key: SecretStr | None = Field(
        default=None, description="Accepted because LangChain passes it to every chat model; a local model needs none."
    )

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
        self._add_version("langchain-cachecraft", _VERSION)
        if self.auto_register:
            install()
        return self

    def get_engine(self, model: str | None = None) -> CacheCraftEngine:
        """The engine behind this chat model, for ``warm``, ``invalidate`` and the like; loads the model if need be.

        Chat models of other namespaces have the same engine: with a ``namespace`` of your own, name it in these calls.

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
            raise ValueError(f"model: {model!r} can't be served, since this chat model was made with a ready engine")
        if self.auto_register:
            RETRIEVED.feed.subscribe(engine, self.namespace)
        return engine

    def close(self) -> None:
        """Release the model and its chunks, for all chat models of the process with the same settings.

        A later call loads the model again. A ready engine stays open: it belongs to whoever made it.
        """
        if self.engine is None:
            SHARED_ENGINES.close(self._engine_key(self.model))

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text by the model's own tokenizer, or by ``custom_get_token_ids``."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.get_engine().prompts.encode_text(text))

    @property
    def _llm_type(self) -> str:
        return PROVIDER

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that decides an answer; LangChain's response cache takes it as part of its key."""
        config = self.engine.config if self.engine is not None else self.engine_config or EngineConfig()
        return {
            **asdict(CallOptions.of(self, {})),
            "stop_sequences": self.stop,  # LangChain puts the stop texts of the call under "stop"
            "dtype": self.dtype,
            "device": self.device,
            "engine_config": config.model_dump(),
            "namespace": self.namespace or config.namespace,
            "engine": None if self.engine is None else ENGINE_IDS.id_of(self.engine),
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=self.stop if stop is None else stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = kwargs.get("model") or self.model
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        *_, answer = self._answer(messages, stop, kwargs)
        assert isinstance(answer, Answer)
        return answer.chat_result()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with closing(Steps(self._answer(messages, stop, kwargs))) as steps:
            answer = await steps.take_last()
        assert isinstance(answer, Answer)
        return answer.chat_result()

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with closing(self._answer(messages, stop, kwargs)) as items:
            for item in items:
                chunk = _chunk(item)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with closing(Steps(self._answer(messages, stop, kwargs))) as steps:
            while (item := await steps.take()) is not None:
                chunk = _chunk(item)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _answer(
        self, messages: list[BaseMessage], stop: list[str] | None, given: dict[str, Any]
    ) -> Generator[str | Answer, None, None]:
        """Yield the pieces of an answer and at last the whole; everything else is a form of this."""
        options = CallOptions.of(self, given)
        engine = self.get_engine(options.model)
        if self.auto_register:
            engine.register(artifact_texts(messages), self.namespace)
        prompt = RagPrompt.from_messages(chat_messages(messages))
        started = time.monotonic()
        stream = engine.stream(
            prompt,
            reuse=options.reuse,
            recompute=options.recompute(engine.config.recompute),
            namespace=self.namespace,
            stop=self.stop if stop is None else stop,
            **options.sampling(),
        )
        with closing(stream):
            for delta in stream:
                yield delta
                if options.timeout is not None and time.monotonic() - started > options.timeout:
                    raise TimeoutError(f"timeout: the answer was not complete after {options.timeout} s")
            result = stream.result
        yield Answer(result, options.model)

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


def _chunk(item: str | Answer) -> ChatGenerationChunk:
    return item.last_chunk() if isinstance(item, Answer) else delta_chunk(item)
