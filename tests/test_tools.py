"""Tools that a call offers: what is found out about a chat template, and how a demanded call is begun."""

from __future__ import annotations

from typing import Any

import pytest

from cachecraft_rag import RagPrompt
from cachecraft_rag.prompt import PromptEncoder
from cachecraft_rag.tool_calls import ToolAnswer, ToolCall
from cachecraft_rag.tools import CallFormat, OfferedTools, normalized_choice
from tests.tiny_tokenizers import byte_level, strict

TOOL = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": {}}}
OTHER = {"type": "function", "function": {"name": "now", "description": "Time.", "parameters": {}}}
QUESTION = RagPrompt.from_messages([{"role": "user", "content": "When?"}])

_TOOLS = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }} {WORDS}<|im_end|>\n{% endif %}"
_TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{CALL}{% endfor %}{END}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ARGUMENTS = "{{ call.function.arguments | tojson }}"
_NAME = '{"name": "{{ call.function.name }}", '


def encoder(call: str = "", words: str = "", end: str = "<|im_end|>\n") -> PromptEncoder:
    """A model whose template prints tools, and calls in a form of its own."""
    tokenizer = byte_level()
    tokenizer.chat_template = (_TOOLS + _TURNS).replace("{CALL}", call).replace("{WORDS}", words).replace("{END}", end)
    return PromptEncoder(tokenizer)


TEMPLATES = {
    "qwen": (
        f'<tool_call>\n{_NAME}"arguments": {_ARGUMENTS}}}\n</tool_call>',
        '<tool_call>\n{"name": "',
        '", "arguments":',
    ),
    "llama": (f'{_NAME}"parameters": {_ARGUMENTS}}}', '{"name": "', '", "parameters":'),
    "mistral": (f'[TOOL_CALLS][{_NAME}"arguments": {_ARGUMENTS}}}]', '[TOOL_CALLS][{"name": "', '", "arguments":'),
}


@pytest.mark.parametrize("end", ["<|im_end|>\n", "</s>", ""])
@pytest.mark.parametrize(("call", "before", "after"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_demanded_call_begins_as_the_template_prints_one(call: str, before: str, after: str, end: str) -> None:
    prompts = encoder(call, end=end)
    found = CallFormat.of(prompts)
    assert (found.shows_tools, found.shows_calls) == (True, True)
    assert found.opening_of(["search"]) == f"{before}search{after}"
    assert found.opening_of(["search", "now"]) == before


@pytest.mark.parametrize(
    ("words", "opening"),
    [
        ("", '{"name": "search", "arguments":'),
        ("Call them within <tool_call></tool_call>.", '<tool_call>\n{"name": "search", "arguments":'),
        ('Write "parameters": dictionary of argument name and value', '{"name": "search", "parameters":'),
    ],
)
@pytest.mark.parametrize("call", ["", "CALL {{ call.function.name }}({{ call.function.arguments }})"])
def test_where_no_call_is_printed_it_begins_as_the_prompt_asks_for(call: str, words: str, opening: str) -> None:
    found = CallFormat.of(encoder(call, words))
    assert (found.shows_tools, found.shows_calls) == (True, False)
    assert found.opening_of(["search"]) == opening


# Llama 3.1's way with more than one call.
_SINGLE = (
    "{% for message in messages %}{% if message.tool_calls and message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("call", [TEMPLATES["llama"][0], ""], ids=["prints calls", "prints none"])
def test_where_several_calls_are_refused_the_first_is_the_answer(call: str) -> None:
    several, single = encoder(call), encoder(call)
    single.tokenizer.chat_template = _SINGLE + single.tokenizer.chat_template
    for prompts, is_refused in [(several, False), (single, bool(call))]:
        assert CallFormat.of(prompts).several_calls is not is_refused
        offered = OfferedTools.of([TOOL], None, prompts)
        assert offered is not None
        reader = offered.reader()
        reader.take(
            '{"name": "search", "parameters": {"query": "a"}}; {"name": "search", "parameters": {"query": "b"}}'
        )
        calls = reader.finish().calls
        assert [call.arguments["query"] for call in calls] == (["a"] if is_refused else ["a", "b"])


def test_a_template_that_prints_the_first_call_only_may_not_get_several() -> None:
    prompts = encoder(TEMPLATES["llama"][0])
    prompts.tokenizer.chat_template = prompts.tokenizer.chat_template.replace(
        "message.tool_calls or []", "(message.tool_calls or [])[:1]"
    )
    assert not CallFormat.of(prompts).several_calls


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "function", "function": {}}, {"function": "search"}])
def test_a_tool_that_is_no_function_with_a_name_is_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tools: \{.*\} has no function with a name; a local model calls functions"):
        OfferedTools.of([TOOL, tool], None, encoder())


@pytest.mark.parametrize("tokenizer", [strict(), byte_level(chat_template=False)], ids=["no tools", "no template"])
def test_a_template_without_tools_is_known_as_such(tokenizer: Any) -> None:
    assert CallFormat.of(PromptEncoder(tokenizer)) == CallFormat()


def test_another_template_is_looked_at_anew() -> None:
    prompts = encoder()
    assert CallFormat.of(prompts) is CallFormat.of(prompts)
    prompts.tokenizer.chat_template = strict().chat_template
    assert not CallFormat.of(prompts).shows_tools


def rendered(choice: object) -> str:
    prompts = encoder(TEMPLATES["qwen"][0])
    offered = OfferedTools.of([TOOL, OTHER], choice, prompts)
    assert offered is not None
    return prompts.render(offered.put_into(QUESTION))


@pytest.mark.parametrize("choice", [None, "auto", False])
def test_a_free_choice_shows_all_tools_and_begins_nothing(choice: object) -> None:
    text = rendered(choice)
    assert '"search"' in text
    assert '"now"' in text
    assert text.endswith("When?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("choice", ["any", "required", True])
def test_any_call_is_begun_up_to_the_name(choice: object) -> None:
    assert rendered(choice).endswith('<|im_start|>assistant\n<tool_call>\n{"name": "')


@pytest.mark.parametrize(
    "choice", ["search", {"type": "function", "function": {"name": "search"}}, {"type": "tool", "name": "search"}]
)
def test_a_named_tool_is_the_only_one_that_is_shown(choice: object) -> None:
    text = rendered(choice)
    assert '"now"' not in text
    assert text.endswith('<|im_start|>assistant\n<tool_call>\n{"name": "search", "arguments":')


def test_the_answer_to_a_begun_call_is_read_as_that_call() -> None:
    offered = OfferedTools.of([TOOL, OTHER], "search", encoder(TEMPLATES["qwen"][0]))
    assert offered is not None
    reader = offered.reader()
    reader.take(' {"query": "lease"}}\n</tool_call>')
    assert reader.finish() == ToolAnswer("", (ToolCall("search", {"query": "lease"}),))


def test_without_tools_or_with_none_chosen_nothing_is_offered() -> None:
    prompts = encoder()
    assert OfferedTools.of([], None, prompts) is None
    assert OfferedTools.of([TOOL], "none", prompts) is None


def test_a_tool_that_is_called_like_a_choice_can_be_chosen() -> None:
    assert normalized_choice("any", ["any", "now"]) == "any"
    assert normalized_choice("auto", ["auto"]) == "auto"


@pytest.mark.parametrize(
    ("choice", "names"),
    [("find", ["search"]), ("any", []), (7, ["search"]), ({"type": "function", "function": {"name": "x"}}, ["search"])],
)
def test_a_choice_that_is_none_is_refused_with_what_is_allowed(choice: object, names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"tool_choice: .* is not allowed; give 'auto', 'none', 'any' or one of \["):
        normalized_choice(choice, names)


def test_chunks_named_in_a_prompt_stay_named_behind_a_begun_answer() -> None:
    prompts = encoder(TEMPLATES["qwen"][0])
    chunk = "A lease of the garden."
    prompt = RagPrompt.from_messages([{"role": "user", "content": f"{chunk} When?"}], [chunk])
    offered = OfferedTools.of([TOOL], "search", prompts)
    assert offered is not None
    assert [span.text for span in prompts.encode(offered.put_into(prompt)).spans] == [chunk]
