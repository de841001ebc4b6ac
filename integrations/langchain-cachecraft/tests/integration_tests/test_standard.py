"""LangChain's own integration tests for chat models, against a tiny model."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_cachecraft import ChatCacheCraft
from tests.conftest import passage


class TestChatCacheCraftIntegration(ChatModelIntegrationTests):
    """On a model of random weights, which writes neither tool calls nor JSON; the scripted one below does."""

    folder = ""
    other_folder = ""

    @pytest.fixture(autouse=True)
    def _folders(self, model_folder: str, other_model_folder: str) -> None:
        type(self).folder, type(self).other_folder = model_folder, other_model_folder

    @property
    def chat_model_class(self) -> type[ChatCacheCraft]:
        return ChatCacheCraft

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self.folder, "max_tokens": 12}

    @property
    def model_override_value(self) -> str:
        return self.other_folder

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(
        self,
    ) -> dict[
        Literal["invoke", "stream"],
        list[Literal["audio_input", "audio_output", "reasoning_output", "cache_read_input", "cache_creation_input"]],
    ]:
        details: Any = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        chat = self.chat_model_class(**self.chat_model_params)
        chat.get_engine().warm([passage(901)])
        message = _ask(chat, passage(901), stream)
        assert _details(message)["cache_read"] > 0
        return message

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        chat = self.chat_model_class(**self.chat_model_params)
        chat.get_engine().invalidate([passage(902)])
        chat.get_engine().register([passage(902)])
        message = _ask(chat, passage(902), stream)
        assert _details(message)["cache_creation"] > 0
        return message


class TestScriptedChatCacheCraftIntegration(TestChatCacheCraftIntegration):
    """On a model that calls tools and writes JSON, as far as its script goes."""

    @pytest.fixture(autouse=True)
    def _folders(self, scripted_folder: str, other_model_folder: str) -> None:
        type(self).folder, type(self).other_folder = scripted_folder, other_model_folder

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestFunctionCallingChatCacheCraftIntegration(TestScriptedChatCacheCraftIntegration):
    """The same, with structured output by tool calls."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}


def _ask(chat: ChatCacheCraft, chunk: str, stream: bool) -> AIMessage:
    question = f"{chunk}\n\nWhat ends first?"
    if not stream:
        return chat.invoke(question)
    first, *rest = chat.stream(question)
    for part in rest:
        first += part
    assert isinstance(first, AIMessageChunk)
    return first


def _details(message: AIMessage) -> Any:
    assert message.usage_metadata is not None
    return message.usage_metadata["input_token_details"]
