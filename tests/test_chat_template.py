"""Chats that a template has no place for: calls of tools that it does not print, system messages that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from cachecraft_rag import RagPrompt
from cachecraft_rag.prompt import PromptEncoder
from tests.tiny_tokenizers import ALL, byte_level, strict

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "lease"}}\n</tool_call>'
FUNCTION: dict[str, Any] = {"name": "search", "arguments": {"query": "lease"}}
TOOL = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": {}}}
PRINTING = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}CALL {{ call.function.name }}{% endfor %}{% endfor %}"
)


def chat(function: dict[str, Any] = FUNCTION, content: str | None = "") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "user", "content": "Well?"},
    ]


def rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None) -> str:
    return PromptEncoder(tokenizer).render(RagPrompt.from_messages(messages, tools=tools))


def templated(template: str | None) -> Any:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("content", ["", None, "I look."])
def test_calls_that_a_template_does_not_print_are_in_the_prompt_as_text(name: str, tools: Any, content: Any) -> None:
    text = rendered(ALL[name](), chat(content=content), tools)
    assert text.count(CALL) == 1
    assert "None" not in text
    assert not content or f"{content}\n{CALL}" in text


@pytest.mark.parametrize("arguments", ['{"query": "lease"}', {"query": "lease"}])
def test_arguments_given_as_json_are_written_as_the_object(arguments: Any) -> None:
    assert CALL in rendered(byte_level(), chat({"name": "search", "arguments": arguments}))
    assert '"arguments": "lease"' in rendered(byte_level(), chat({"name": "search", "arguments": "lease"}))


@pytest.mark.parametrize("template", [PRINTING, PRINTING.replace("{% for m", "{% if tools %}{% endif %}{% for m")])
def test_calls_that_a_template_prints_are_left_to_it(template: str) -> None:
    text = rendered(templated(template), chat())
    assert "CALL search" in text
    assert CALL not in text


def test_a_template_that_prints_calls_only_beside_tools_loses_none_without() -> None:
    tokenizer = templated(PRINTING.replace("message.tool_calls or []", "((message.tool_calls or []) if tools else [])"))
    assert CALL in rendered(tokenizer, chat())
    assert "CALL search" in rendered(tokenizer, chat(), [TOOL])


def test_a_template_that_fails_at_calls_gets_them_as_text() -> None:
    tokenizer = templated(PRINTING.replace("CALL", "{{ raise_exception('No calls') }}"))
    assert CALL in rendered(tokenizer, chat())


def test_another_template_is_looked_at_anew() -> None:
    prompts = PromptEncoder(templated(PRINTING))
    assert CALL not in prompts.render(RagPrompt.from_messages(chat()))
    prompts.tokenizer.chat_template = byte_level().chat_template
    assert CALL in prompts.render(RagPrompt.from_messages(chat()))


def test_chunks_are_found_beside_calls_that_became_text() -> None:
    chunk = "In the garden there were three apple trees."
    messages = [*chat()[:2], {"role": "tool", "content": chunk}]
    encoded = PromptEncoder(byte_level()).encode(RagPrompt.from_messages(messages, [chunk]))
    assert [span.text for span in encoded.spans] == [chunk]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("messages", "users"),
    [
        ("user a|system S|assistant b|user c", ["a", "S\n\nc"]),
        ("user a|system S|assistant b", ["a\n\nS"]),
        ("user a|system S", ["a\n\nS"]),
        ("user a|assistant b|user c|system S|system T", ["a", "c\n\nS\n\nT"]),
        ("system S|user a|assistant b|system T|user c", ["S\n\na", "T\n\nc"]),
    ],
)
def test_a_refused_system_message_never_goes_into_the_models_own(messages: str, users: list[str]) -> None:
    text = rendered(strict(), [turn(*message.split(" ")) for message in messages.split("|")])
    said = [part.partition("<end_of_turn>")[0] for part in text.split("<start_of_turn>")[1:]]
    assert [part.removeprefix("user\n") for part in said if part.startswith("user\n")] == users
    assert [part for part in said if part.startswith("assistant")] == ["assistant\nb"] * messages.count("assistant")
