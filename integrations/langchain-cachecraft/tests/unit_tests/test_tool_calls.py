"""Tool calls in the text of models."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_cachecraft.tool_calls import ToolCallReader, ToolCalls

NAMES = ["search", "now"]
CALL = '{"name": "search", "arguments": {"query": "lease"}}'


def read(text: str, step: int = 1, opened: str = "", is_cut: bool = False) -> tuple[str, ToolCalls]:
    """The text that is shown, and the calls, when the text comes in pieces."""
    reader = ToolCallReader(NAMES, opened)
    shown = "".join(reader.take(text[at : at + step]) for at in range(0, len(text), step))
    assert shown == reader.shown
    found = reader.finish(is_cut)
    return shown + found.text, found


def names_and_arguments(found: ToolCalls) -> list[Any]:
    return [(call["name"], call["args"]) for call in found.calls]


FORMS = {
    "tagged": f"<tool_call>\n{CALL}\n</tool_call>",
    "tagged without end": f"<tool_call>\n{CALL}",
    "tagged list": f"<tool_call>[{CALL}]</tool_call>",
    "bare": CALL,
    "llama": '{"name": "search", "parameters": {"query": "lease"}}',
    "llama with mark": '<|python_tag|>{"type": "function", "name": "search", "parameters": {"query": "lease"}}',
    "mistral": f"[TOOL_CALLS] [{CALL}]",
    "list": f"[{CALL}]",
    "block": f"```json\n{CALL}\n```",
    "openai": f'{{"type": "function", "function": {CALL}}}',
    "arguments as text": r'{"name": "search", "arguments": "{\"query\": \"lease\"}"}',
}


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_a_call_is_read_in_every_form_that_models_write(text: str, step: int) -> None:
    shown, found = read(text, step)
    assert (shown, found.invalid) == ("", [])
    assert names_and_arguments(found) == [("search", {"query": "lease"})]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_text_around_tagged_calls_is_shown_and_the_calls_are_not(step: int) -> None:
    text = f'I look it up.\n<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>Done.'
    shown, found = read(text, step)
    assert shown == "I look it up.\nDone."
    assert names_and_arguments(found) == [("search", {"query": "lease"}), ("now", {})]


def test_several_bare_calls_may_be_separated_by_lines_or_semicolons() -> None:
    for between in ("\n", "; ", ",\n"):
        assert len(read(f"{CALL}{between}{CALL}")[1].calls) == 2


def test_every_call_has_an_id_of_its_own_that_templates_accept() -> None:
    ids = [call["id"] for call in read(f"{CALL}\n{CALL}")[1].calls]
    assert len(set(ids)) == 2
    assert all(call_id is not None and len(call_id) == 9 and call_id.isalnum() for call_id in ids)


@pytest.mark.parametrize(
    "text",
    [
        "It ends on 9 < 10 <tool> and <tool_",
        '{"answer": "in May"}',
        '{"name": "unknown", "arguments": {}}',
        '{"name": "search", "arguments": {}, "note": "an object of the answer"}',
        f"{CALL} is how a call looks.",
        "```python\nprint(1)\n```",
        "[1, 2]",
        "  \n",
        "",
        "42",
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_all_else_is_text_to_the_last_character(text: str, step: int) -> None:
    shown, found = read(text, step)
    assert (shown, found.calls, found.invalid) == (text, [], [])


def test_without_tools_everything_is_text_at_once() -> None:
    reader = ToolCallReader()
    assert reader.take(f"<tool_call>{CALL}") == f"<tool_call>{CALL}"
    assert reader.finish() == ToolCalls()


def test_text_is_shown_as_soon_as_it_can_be_no_call() -> None:
    reader = ToolCallReader(NAMES)
    assert [reader.take(piece) for piece in ("It", " ends", " <", "b>", " <tool", "_call>{")] == [
        "It",
        " ends",
        " ",
        "<b>",
        " ",
        "",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>search lease</tool_call>", "no JSON object with a name"),
        ('<tool_call>{"name": "search", "arguments": {"query"', "no JSON object with a name"),
        ('<tool_call>{"arguments": {}}</tool_call>', "names no tool"),
        ('<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "arguments are no JSON object"),
        ('<tool_call>{"name": "search", "arguments": "{"}</tool_call>', "no JSON object: Expecting property name"),
        ("<tool_call>7</tool_call>", "names no tool"),
    ],
)
def test_a_broken_call_is_kept_with_the_reason(text: str, reason: str) -> None:
    shown, found = read(text)
    assert (shown, found.calls) == ("", [])
    (invalid,) = found.invalid
    assert invalid["error"] is not None
    assert reason in invalid["error"]


def test_a_call_that_was_cut_off_says_so() -> None:
    _, found = read('<tool_call>{"name": "search", "argu', is_cut=True)
    assert "cut off at max_tokens" in str(found.invalid[0]["error"])


def test_an_answer_whose_beginning_was_given_is_a_call_or_broken() -> None:
    opened = '<tool_call>\n{"name": "search", "arguments": '
    assert names_and_arguments(read('{"query": "lease"}}\n</tool_call>', opened=opened)[1]) == [
        ("search", {"query": "lease"})
    ]
    bare = '{"name": "search", "arguments": '
    assert names_and_arguments(read('{"query": "lease"}}', opened=bare)[1]) == [("search", {"query": "lease"})]
    shown, found = read("no idea", opened=bare)
    assert (shown, len(found.invalid)) == ("", 1)
