"""A local Hugging Face model as a LlamaIndex LLM that reuses the KV of retrieved chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as default_messages_to_prompt
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
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.tools import BaseTool

from cachecraft_rag import RagPrompt
from llama_index.llms.cachecraft import responses
from llama_index.llms.cachecraft.answer import Answer, Piece, Response
from llama_index.llms.cachecraft.engine_backed import EngineBackedLLM
from llama_index.llms.cachecraft.global_settings import use_everywhere
from llama_index.llms.cachecraft.messages import check_text_only, to_prompt
from llama_index.llms.cachecraft.options import call_options
from llama_index.llms.cachecraft.tool_use import TOOL_OPTIONS, ToolUse, calls_functions, selections

# What LlamaIndex is told of a model that names no limit (recurrent ones).
_UNLIMITED_CONTEXT = 1_000_000


class CacheCraftLLM(EngineBackedLLM):
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

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialisation."""
        return "CacheCraftLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex must know of the model; loads it at the first use."""
        return LLMMetadata(
            context_window=self.engine.context_window or _UNLIMITED_CONTEXT,
            num_output=self.max_new_tokens,
            is_chat_model=self.engine.prompts.has_chat_template,
            is_function_calling_model=calls_functions(self.engine.prompts),
            model_name=self.model,
        )

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text. ``Settings.tokenizer = llm.tokenize`` makes LlamaIndex count with this model's tokenizer."""
        return list(self.engine.prompts.encode_text(text))

    def configure_settings(self) -> None:
        """Make this the LLM of LlamaIndex's ``Settings``, with its tokenizer and a prompt helper that cuts no chunk.

        Loads the model, since its context window is needed.
        """
        use_everywhere(self)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; ``formatted`` says that it is in the model's own format already."""
        return self._open_completion(prompt, formatted, kwargs).whole()

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt piece by piece."""
        return self._open_completion(prompt, formatted, kwargs).pieces()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt."""
        answer = await asyncio.to_thread(self._open_completion, prompt, formatted, kwargs)
        return await answer.awhole()

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Answer a prompt piece by piece."""
        answer = await asyncio.to_thread(self._open_completion, prompt, formatted, kwargs)
        return answer.apieces()

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat; ``tools`` and ``tool_choice`` offer tools to models whose template has a place for them."""
        return self._open_chat(messages, kwargs).whole()

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a chat piece by piece."""
        return self._open_chat(messages, kwargs).pieces()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat."""
        answer = await asyncio.to_thread(self._open_chat, messages, kwargs)
        return await answer.awhole()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a chat piece by piece."""
        answer = await asyncio.to_thread(self._open_chat, messages, kwargs)
        return answer.apieces()

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The tools that an answer calls.

        Args:
            response: The answer.
            error_on_no_tool_call: Whether an answer that calls none is an error.
            **kwargs: Ignored, as LlamaIndex's interface wants it.

        Raises:
            ValueError: The answer calls none.
        """
        calls = selections(response.message)
        if not calls and error_on_no_tool_call:
            raise ValueError(f"response: it calls no tool, but says {(response.message.content or '')[:200]!r}")
        return calls

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments for the chat methods; a call of theirs is still one call, with one pair of events."""
        message = ChatMessage(content=user_msg) if isinstance(user_msg, str) else user_msg
        choice = kwargs.pop("tool_choice", None)
        return {
            "messages": [*(chat_history or []), *([] if message is None else [message])],
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": choice if choice is not None or not tool_required else "required",
            "allow_parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def _open_completion(self, prompt: str, formatted: bool, given: dict[str, Any]) -> Answer[CompletionResponse]:
        if formatted:
            read = RagPrompt.from_text(prompt)
        elif self.completion_to_prompt not in (None, default_completion_to_prompt):
            read = RagPrompt.from_text(self._extend_prompt(self.completion_to_prompt(prompt)))
        elif not self.engine.prompts.has_chat_template:
            read = RagPrompt.from_text(self._extend_prompt(prompt))
        else:
            read = to_prompt(self._with_system_prompt([ChatMessage(content=prompt)]))
        return self._open(read, given, responses.completion)

    def _open_chat(self, messages: Sequence[ChatMessage], given: dict[str, Any]) -> Answer[ChatResponse]:
        messages = self._with_system_prompt(messages)
        tools = ToolUse.of(given, self.engine.prompts, self.model)
        given = {name: value for name, value in given.items() if name not in TOOL_OPTIONS}
        render = self.messages_to_prompt or default_messages_to_prompt
        if render is not default_messages_to_prompt or not self.engine.prompts.has_chat_template:
            if tools is not None:
                raise ValueError("tools: messages_to_prompt has no place for them; leave it out, or use a ReActAgent")
            check_text_only(messages)
            return self._open(RagPrompt.from_text(render(messages)), given, responses.chat)
        prompt = to_prompt(messages)
        if tools is not None:
            prompt = tools.offered.put_into(prompt)
        return self._open(prompt, given, responses.chat, tools)

    def _open(
        self,
        prompt: RagPrompt,
        given: dict[str, Any],
        shape: Callable[[Piece], Response],
        tools: ToolUse | None = None,
    ) -> Answer[Response]:
        """The one way into the engine; undecorated, so that a call sends one pair of events whatever path it takes."""
        options = call_options(self.__dict__, given)
        engine = self.engine
        recompute = options.recompute_config(engine.config.recompute)
        stream = engine.stream(
            prompt, reuse=options.reuse, recompute=recompute, namespace=self.namespace, **options.sampling
        )
        return Answer(stream, shape, self.model, tools)

    def _with_system_prompt(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Add ``system_prompt`` unless the chat brings a system message, as LlamaIndex's ``predict`` makes it."""
        roles = {message.role for message in messages}
        is_missing = bool(self.system_prompt) and roles.isdisjoint({MessageRole.SYSTEM, MessageRole.DEVELOPER})
        return self._extend_messages(list(messages)) if is_missing else list(messages)
