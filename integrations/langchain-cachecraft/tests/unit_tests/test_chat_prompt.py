"""From a call of the chat model to the prompt that the engine gets."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from cachecraft_rag import CacheCraftEngine
from langchain_cachecraft.chat_prompt import ChatPrompt

TOOL = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": {}}}
OTHER = {"type": "function", "function": {"name": "now", "description": "Time.", "parameters": {}}}
MESSAGES = [HumanMessage("When?")]
CHAT = "<|im_start|>user\nWhen?{}<|im_end|>\n<|im_start|>assistant\n{}"


def rendered(engine: CacheCraftEngine, **given: Any) -> str:
    return engine.prompts.render(ChatPrompt.of(engine, "tiny", MESSAGES, given).prompt)


def test_without_options_the_prompt_is_the_chat(engine: CacheCraftEngine) -> None:
    assert rendered(engine) == CHAT.format("", "") == rendered(engine, tools=[TOOL], tool_choice="none")


def test_tools_are_shown_by_the_template(engine: CacheCraftEngine) -> None:
    text = rendered(engine, tools=[TOOL, OTHER])
    assert '"name": "search"' in text
    assert '"name": "now"' in text
    assert text.endswith(CHAT.format("", ""))


@pytest.mark.parametrize(
    ("instructions", "opening"),
    [
        ("", '{"name": "search", "arguments":'),
        ("within <tool_call></tool_call>", '<tool_call>\n{"name": "search", "arguments":'),
        ('"parameters": dictionary of argument name', '{"name": "search", "parameters":'),
    ],
)
def test_a_demanded_call_begins_as_the_template_teaches(
    engine: CacheCraftEngine, instructions: str, opening: str
) -> None:
    tokenizer = engine.prompts.tokenizer
    tokenizer.chat_template = tokenizer.chat_template.replace("Tools: ", f"Tools {instructions}: ")
    text = rendered(engine, tools=[TOOL, OTHER], tool_choice="search")
    assert '"name": "now"' not in text
    assert text.endswith(CHAT.format("", opening))
    several = rendered(engine, tools=[TOOL, OTHER], tool_choice="any")
    assert several.endswith(CHAT.format("", opening[: opening.index("search")]))


SCHEMA = {"type": "object", "properties": {"note": {}, "end date": {}}, "required": ["end date"]}


@pytest.mark.parametrize(
    ("schema", "opening"),
    [
        (SCHEMA, '{"end date": '),
        ({"type": "object", "properties": {"note": {}}}, "{"),
        ({"type": "object"}, "{"),
        ({"type": "array"}, ""),
    ],
)
def test_a_schema_stands_behind_the_question_and_the_answer_is_begun(
    engine: CacheCraftEngine, schema: dict[str, Any], opening: str
) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "Answer", "schema": schema}}
    text = rendered(engine, response_format=response_format)
    assert text.startswith("<|im_start|>user\nWhen?\n\nAnswer with one JSON value")
    assert text.endswith(f"<|im_end|>\n<|im_start|>assistant\n{opening}")


def test_a_schema_behind_an_answer_is_a_message_of_its_own(engine: CacheCraftEngine) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "Answer", "schema": SCHEMA}}
    asked = ChatPrompt.of(engine, "tiny", [*MESSAGES, AIMessage("In May.")], {"response_format": response_format})
    text = engine.prompts.render(asked.prompt)
    assert "<|im_start|>assistant\nIn May.<|im_end|>\n<|im_start|>user\nAnswer with one JSON value" in text


@pytest.mark.parametrize("response_format", [None, {"type": "text"}, {"type": "json_object"}])
def test_other_forms_of_answers_add_nothing(engine: CacheCraftEngine, response_format: Any) -> None:
    assert rendered(engine, response_format=response_format) == CHAT.format("", "")


@pytest.mark.parametrize("response_format", ["json", {"type": "xml"}, {"type": "json_schema"}])
def test_an_unknown_form_is_refused(engine: CacheCraftEngine, response_format: Any) -> None:
    with pytest.raises(ValueError, match=r"response_format: .* is not allowed"):
        rendered(engine, response_format=response_format)
