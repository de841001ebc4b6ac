"""A local Hugging Face model as a LlamaIndex LLM that reuses the KV of retrieved chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as default_messages_to_prompt
from llama_index.core.bridge.pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM, default_completion_to_prompt

from cachecraft_rag import AnswerStream, CacheCraftEngine, EngineConfig, EngineKey, RagPrompt
from cachecraft_rag.config import PolicyName
from cachecraft_rag.engine_pool import SHARED_ENGINES
from llama_index.llms.cachecraft import instrumentation, responses
from llama_index.llms.cachecraft.messages import check_text_only, to_prompt
from llama_index.llms.cachecraft.options import SAMPLING, call_options
from llama_index.llms.cachecraft.streaming import aresponses_of, aresult, responses_of

# What LlamaIndex is told of a model that names no limit (recurrent ones).
_UNLIMITED_CONTEXT = 1_000_000

Stop = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else [] if value is None else value),
]


class CacheCraftLLM(LLM):
    """A local Hugging Face causal language model that reuses the KV of every retrieved chunk it has seen before.

    The chunks reach it by themselves, through LlamaIndex's instrumentation; a pipeline needs no other change. LLM
    objects of the same model and engine settings share one engine, so the weights are loaded once. Methods may be
    called from any thread, and the async ones don't block the event loop.

    Args:
        model: A local folder, the alias ``smollm2-135m``, or a hub id; loaded at the first use.
        engine: A ready engine, instead of ``model``.
        hf_model: A ready transformers model, instead of ``model``.
        tokenizer: Its tokenizer.
        **fields: The fields below, and those of every LlamaIndex LLM (``system_prompt``, ``messages_to_prompt``, ...).

    Raises:
        ValueError: A field is not known or has a value that is not allowed, or not exactly one model was given.

    Examples:
        >>> from llama_index.core import Settings
        >>> from llama_index.llms.cachecraft import CacheCraftLLM
        >>> Settings.llm = CacheCraftLLM(model="smollm2-135m", max_new_tokens=128)
    """

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
        if loading:
            raise ValueError(f"{loading[0]}: {fields[loading[0]]!r} has no effect on a model that is loaded already")
        if engine is not None:
            fields.setdefault("namespace", engine.config.namespace)
            fields.setdefault("context_window", engine.config.context_window)
        name = model if model is not None else _name(engine.model if engine is not None else hf_model)
        super().__init__(**{**fields, "model": name})
        if hf_model is not None:
            engine = SHARED_ENGINES.over(hf_model, tokenizer, self._key.config)
        self._engine, self._is_given = engine, engine is not None
        if self.auto_register:
            instrumentation.install()
        if self._is_given:
            self._ready_engine()  # refuses fields that contradict the engine's config

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialisation."""
        return "CacheCraftLLM"

    @property
    def engine(self) -> CacheCraftEngine:
        """The engine; loads the model at the first use.

        LLM objects of other namespaces have the same engine: with a ``namespace`` of your own, name it in calls of
        ``warm``, ``register`` and ``invalidate``.
        """
        return self._ready_engine()

    @property
    def is_loaded(self) -> bool:
        """Whether the engine is at hand; it is loaded at the first use."""
        return self._engine is not None and (self._is_given or not self._engine.is_closed)

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex must know of the model; loads it at the first use."""
        return LLMMetadata(
            context_window=self.engine.context_window or _UNLIMITED_CONTEXT,
            num_output=self.max_new_tokens,
            is_chat_model=self.engine.prompts.has_chat_template,
            model_name=self.model,
        )

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text. ``Settings.tokenizer = llm.tokenize`` makes LlamaIndex count with this model's tokenizer."""
        return list(self.engine.prompts.encode_text(text))

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

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; ``formatted`` says that it is in the model's own format already."""
        stream = self._open_completion(prompt, formatted, kwargs)
        for _ in stream:
            continue
        return responses.completion(stream.result)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt piece by piece."""
        stream = self._open_completion(prompt, formatted, kwargs)
        return responses_of(stream, responses.completion_piece)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt."""
        stream = await asyncio.to_thread(self._open_completion, prompt, formatted, kwargs)
        return responses.completion(await aresult(stream))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Answer a prompt piece by piece."""
        stream = await asyncio.to_thread(self._open_completion, prompt, formatted, kwargs)
        return aresponses_of(stream, responses.completion_piece)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat."""
        stream = self._open_chat(messages, kwargs)
        for _ in stream:
            continue
        return responses.chat(stream.result)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a chat piece by piece."""
        stream = self._open_chat(messages, kwargs)
        return responses_of(stream, responses.chat_piece)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat."""
        stream = await asyncio.to_thread(self._open_chat, messages, kwargs)
        return responses.chat(await aresult(stream))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a chat piece by piece."""
        stream = await asyncio.to_thread(self._open_chat, messages, kwargs)
        return aresponses_of(stream, responses.chat_piece)

    def _open_completion(self, prompt: str, formatted: bool, given: dict[str, Any]) -> AnswerStream:
        if formatted:
            return self._open(RagPrompt.from_text(prompt), given)
        if self.completion_to_prompt not in (None, default_completion_to_prompt):
            return self._open(RagPrompt.from_text(self._extend_prompt(self.completion_to_prompt(prompt))), given)
        if not self.engine.prompts.has_chat_template:
            return self._open(RagPrompt.from_text(self._extend_prompt(prompt)), given)
        return self._open(to_prompt(self._with_system_prompt([ChatMessage(content=prompt)])), given)

    def _open_chat(self, messages: Sequence[ChatMessage], given: dict[str, Any]) -> AnswerStream:
        messages = self._with_system_prompt(messages)
        render = self.messages_to_prompt or default_messages_to_prompt
        if render is not default_messages_to_prompt or not self.engine.prompts.has_chat_template:
            check_text_only(messages)
            return self._open(RagPrompt.from_text(render(messages)), given)
        return self._open(to_prompt(messages), given)

    def _open(self, prompt: RagPrompt, given: dict[str, Any]) -> AnswerStream:
        """The one way into the engine; undecorated, so that a call sends one pair of events whatever path it takes."""
        options = call_options(self.__dict__, given)
        engine = self.engine
        recompute = options.recompute_config(engine.config.recompute)
        return engine.stream(
            prompt, reuse=options.reuse, recompute=recompute, namespace=self.namespace, **options.sampling
        )

    def _with_system_prompt(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Add ``system_prompt`` unless the chat brings a system message, as LlamaIndex's ``predict`` makes it."""
        roles = {message.role for message in messages}
        is_missing = bool(self.system_prompt) and roles.isdisjoint({MessageRole.SYSTEM, MessageRole.DEVELOPER})
        return self._extend_messages(list(messages)) if is_missing else list(messages)

    def _ready_engine(self) -> CacheCraftEngine:
        if not self._is_given:
            self._engine = SHARED_ENGINES.get(self._key)
        engine = self._engine
        assert engine is not None
        if self._is_given and self.context_window != engine.config.context_window:
            has = engine.config.context_window
            raise ValueError(
                f"context_window: {self.context_window!r}, but the given engine has {has!r}; set it in its config"
            )
        if self.auto_register:
            instrumentation.CHUNKS.subscribe(engine, self.namespace)
        return engine

    @property
    def _key(self) -> EngineKey:
        return EngineKey(self.model, self.dtype, self.device, EngineConfig(context_window=self.context_window))

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> CacheCraftLLM:
        memo = {} if memo is None else memo
        memo[id(self._engine)] = self._engine  # weights and chunks stay where they are
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        if self._is_given:
            raise TypeError("a CacheCraftLLM made from ready objects can't be pickled; name its model instead")
        clean = self.model_copy()  # LlamaIndex takes what can't be pickled out of the very dictionary it is handed
        clean._engine = None
        state: dict[str, Any] = LLM.__getstate__(clean)
        return state


def _name(hf_model: Any) -> str:
    return str(getattr(hf_model.config, "_name_or_path", "") or type(hf_model).__name__)
