"""``ChatCacheCraft``: a local Hugging Face model as a LangChain chat model that reuses the KV of retrieved chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, model_validator
from typing_extensions import Self

from cachecraft_rag import CacheCraftEngine, GenerationResult
from cachecraft_rag.steps import Steps
from cachecraft_rag.tools import name_of, normalized_choice
from langchain_cachecraft._version import __version__
from langchain_cachecraft.answers import PROVIDER, Answer, delta_chunk
from langchain_cachecraft.batch_round import BatchRound, current_round
from langchain_cachecraft.chat_prompt import OPTIONS, ChatPrompt
from langchain_cachecraft.documents import DOCUMENT_ID_KEYS, texts_by_document
from langchain_cachecraft.messages import artifact_documents
from langchain_cachecraft.options import CallOptions
from langchain_cachecraft.profiles import model_profile
from langchain_cachecraft.served_model import ServedModel
from langchain_cachecraft.structured_output import METHODS, Method, Schema, bound_to, structured
from langchain_cachecraft.structured_output import name_of as name_of_schema


class ChatCacheCraft(ServedModel, BaseChatModel):
    """A local Hugging Face model that keeps the keys and values of retrieved chunks and reuses them in later prompts.

    Replace the chat model of a chain by this one; nothing else changes. The model is loaded at the first call and
    shared by all models of the process with the same name, dtype, device and engine settings.

    Every field from ``temperature`` to ``preset`` can also be given per call: ``chat.invoke(messages,
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

    @model_validator(mode="after")
    def _set_version(self) -> Self:
        self._add_version("langchain-cachecraft", __version__)
        return self

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text by the model's own tokenizer, or by ``custom_get_token_ids``."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.get_engine().prompts.encode_text(text))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Length of the prompt that a chat becomes, with its chat template and the tools that it shows.

        In a call the prompt may be a few tokens longer: where a known chunk begins or ends, a new token begins.
        """
        if not messages:
            return 0
        if self.custom_get_token_ids is not None:
            return super().get_num_tokens_from_messages(messages, tools)
        prompts = self.get_engine().prompts
        asked = ChatPrompt.of(self.get_engine(), self.model, messages, {"tools": tools})
        try:
            return len(prompts.encode(asked.prompt).token_ids)
        except ValueError:  # part of a chat, as trim_messages tries it, may be none that the template takes
            return super().get_num_tokens_from_messages(messages)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it may call, shown to it by its chat template.

        Args:
            tools: Tools, functions, Pydantic classes, or descriptions in OpenAI's form.
            tool_choice: ``"auto"`` leaves it to the model, ``"none"`` shows no tool; ``"any"`` and the name of a tool
                begin the answer with a call, which the model can only complete.
            strict: Whether the descriptions ask for arguments that follow the schema exactly.
            **kwargs: Other options of the calls.

        Raises:
            ValueError: ``tool_choice`` names no tool. A call raises it too, when the chat template knows no tools.
        """
        described = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        choice = normalized_choice(tool_choice, [name_of(tool) for tool in described])
        return self.bind(tools=described, tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: Schema,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with answers that are objects.

        Args:
            schema: A JSON schema, a ``TypedDict``, a function in OpenAI's form, or a Pydantic class. Only a Pydantic
                class is checked for its fields and types.
            method: ``"json_schema"`` writes the schema behind the question, for any model; ``"json_mode"`` leaves it
                to the prompt to ask for JSON; ``"function_calling"`` has the model call a tool.
            include_raw: Whether to give message, object and error side by side, instead of raising the error.
            strict: Whether the tool asks for arguments that follow the schema exactly.
            **kwargs: Other options of the calls.

        Raises:
            ValueError: There is no such method, or the schema is no object and a tool is to be called. The calls raise
                ``OutputParserException`` for an answer that is not JSON of the schema's kind, or was cut off; a stream
                raises it at its end.
        """
        if method not in METHODS:
            raise ValueError(f"method: {method!r} is not allowed; give one of {', '.join(map(repr, METHODS))}")
        options = {**bound_to(schema, method), **kwargs}
        if method == "function_calling":
            llm = self.bind_tools([schema], tool_choice=name_of_schema(schema), strict=strict, **options)
        else:
            llm = self.bind(**options)
        return structured(llm, schema, method, include_raw)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answers to several inputs, which the engine is given together; a run for each, in order.

        With ``timeout`` or ``streaming`` they are given one by one.
        """
        if len(inputs) < 2 or self.streaming or kwargs.get("timeout", self.timeout) is not None:
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        stop = kwargs.get("stop")
        given = {name: value for name, value in kwargs.items() if name != "stop"}

        batch_round = BatchRound(
            self, [self._messages_of(item) for item in inputs], lambda chats: self._answers(chats, stop, given)
        )
        answers: list[Any] = []
        for place, (item, its_config) in enumerate(zip(inputs, get_config_list(config, len(inputs)), strict=True)):
            try:
                with batch_round.at(place):
                    answers.append(self.invoke(item, its_config, **kwargs))
            except Exception as error:
                if not return_exceptions:
                    raise
                answers.append(error)
        return answers

    def _messages_of(self, item: LanguageModelInput) -> list[BaseMessage] | None:
        try:
            return self._convert_input(item).to_messages()
        except Exception:
            return None  # the input's own invoke raises the same, where it is that input's error only

    @property
    def _llm_type(self) -> str:
        return PROVIDER

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self._identity()

    def _resolve_model_profile(self) -> ModelProfile | None:
        window = None if self.engine_config is None else self.engine_config.context_window
        return model_profile(self.model, self.engine, window)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=self.stop if stop is None else stop, **kwargs)
        return self._named(params, kwargs.get("model"))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        batch_round = current_round()
        answer: object = None if batch_round is None else batch_round.answer(self, messages)
        if answer is None:
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
        options = CallOptions.of(self, given, OPTIONS)
        engine = self.get_engine(options.model)
        asked = self._asked(engine, options.model, messages, given)
        reader = asked.reader()
        with closing(self._answer_to(engine, asked.prompt, stop, options)) as items:
            for item in items:
                if isinstance(item, GenerationResult):
                    yield Answer.of(item, options.model, reader)
                elif text := reader.take(item):
                    yield text

    def _answers(
        self, chats: Sequence[list[BaseMessage]], stop: list[str] | None, given: dict[str, Any]
    ) -> list[Answer]:
        """Whole answers to several chats."""
        options = CallOptions.of(self, given, OPTIONS)
        engine = self.get_engine(options.model)
        asked = [self._asked(engine, options.model, messages, given) for messages in chats]
        results = self._answers_to(engine, [each.prompt for each in asked], stop, options)
        answers = []
        for each, result in zip(asked, results, strict=True):
            reader = each.reader()
            reader.take(result.text)
            answers.append(Answer.of(result, options.model, reader))
        return answers

    def _asked(
        self, engine: CacheCraftEngine, model: str, messages: list[BaseMessage], given: dict[str, Any]
    ) -> ChatPrompt:
        if self.auto_register:
            for name, texts in texts_by_document(artifact_documents(messages), DOCUMENT_ID_KEYS).items():
                engine.register(texts, self.namespace, name)
        return ChatPrompt.of(engine, model, messages, given)


def _chunk(item: str | Answer) -> ChatGenerationChunk:
    return item.last_chunk() if isinstance(item, Answer) else delta_chunk(item)
