"""Tool calls in the text of models: what is read as a call, what stays text, and what a stream shows before the end."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from cachecraft_rag.tool_calls import ToolAnswer, ToolCall, ToolCallReader, written_call

NAMES = ["search", "now"]
CALL = '{"name": "search", "arguments": {"query": "lease"}}'
SEARCH = ToolCall("search", {"query": "lease"})

every_step = pytest.mark.parametrize("step", [1, 7, 1000])


def read(text: str, step: int = 1, opened: str = "", is_cut: bool = False, names: Any = NAMES) -> ToolAnswer:
    """The answer when its text comes in pieces; what was shown on the way is never taken back."""
    reader = ToolCallReader(names, opened)
    shown = ""
    for at in range(0, len(text), step):
        shown += reader.take(text[at : at + step])
        assert reader.shown == shown
    answer = reader.finish(is_cut)
    assert answer.text.startswith(shown)
    return answer


FORMS = {
    "tagged": f"<tool_call>\n{CALL}\n</tool_call>",
    "tagged without end": f"<tool_call>\n{CALL}",
    "tagged list": f"<tool_call>[{CALL}]</tool_call>",
    "bare": CALL,
    "llama": '{"name": "search", "parameters": {"query": "lease"}}',
    "llama with mark": '<|python_tag|>{"type": "function", "name": "search", "parameters": {"query": "lease"}}',
    "mistral": f"[TOOL_CALLS] [{CALL}]",
    "mistral with id": '[TOOL_CALLS][{"name": "search", "arguments": {"query": "lease"}, "id": "x"}]',
    "list": f"[{CALL}]",
    "block": f"```json\n{CALL}\n```",
    "block of a list": f"```\n[ {CALL} ]```",
    "block without end": f"```json\n{CALL}",
    "openai": f'{{"type": "function", "function": {CALL}}}',
    "openai, several": f'{{"tool_calls": [{{"id": "1", "type": "function", "function": {CALL}}}]}}',
    "arguments as text": r'{"name": "search", "arguments": "{\"query\": \"lease\"}"}',
    "arguments first": '{"arguments": {"query": "lease"}, "name": "search"}',
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@every_step
@every_form
def test_a_call_is_read_in_every_form_that_models_write(form: str, step: int) -> None:
    assert read(form, step) == ToolAnswer("", (SEARCH,))


@every_step
@every_form
def test_what_was_said_before_a_call_is_text(form: str, step: int) -> None:
    assert read(f"I look it up [1]:\n\n{form}\n", step) == ToolAnswer("I look it up [1]:", (SEARCH,))


@every_step
def test_text_around_tagged_calls_is_text_too(step: int) -> None:
    text = f'I look it up.\n<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>Done.'
    assert read(text, step) == ToolAnswer("I look it up.\n\nDone.", (SEARCH, ToolCall("now", {})))


@pytest.mark.parametrize("between", ["\n", "; ", ",\n"])
def test_several_bare_calls_may_be_separated_by_lines_semicolons_or_commas(between: str) -> None:
    assert read(f"{CALL}{between}{CALL}").calls == (SEARCH, SEARCH)


def test_every_call_has_an_id_of_its_own_that_templates_accept() -> None:
    ids = [call.id for call in read(f"{CALL}\n{CALL}").calls]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


def test_lines_may_break_inside_strings() -> None:
    (call,) = read('<tool_call>{"name": "search", "arguments": {"query": "first\nsecond"}}</tool_call>').calls
    assert call.arguments == {"query": "first\nsecond"}


@pytest.mark.parametrize("arguments", ["null", '""', '"{}"', "{}"])
def test_a_call_may_have_no_arguments(arguments: str) -> None:
    assert read(f'{{"name": "now", "arguments": {arguments}}}').calls == (ToolCall("now", {}),)


@every_step
@pytest.mark.parametrize(
    "query",
    ["why <tool_call>?", "a </tool_call> b", "<tool_call>{", '<tool_call>{"name": "now"}</tool_call>'],
)
def test_a_tag_inside_of_an_argument_is_part_of_it(query: str, step: int) -> None:
    expected = ToolCall("search", {"query": query})
    call = written_call("search", {"query": query})
    bare = call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert read(call, step) == ToolAnswer("", (expected,))
    assert read(f"{call}\n{call}", step).calls == (expected, expected)
    assert read(bare, step) == ToolAnswer("", (expected,))


@every_step
def test_a_tag_that_a_text_speaks_of_is_text_beside_calls(step: int) -> None:
    text = f"A model writes <tool_call> first.\n<tool_call>{CALL}</tool_call> and </tool_call> last."
    assert read(text, step) == ToolAnswer("A model writes <tool_call> first.\n and </tool_call> last.", (SEARCH,))


@every_step
def test_a_call_that_another_one_follows_need_not_be_closed(step: int) -> None:
    assert read(f"<tool_call>{CALL}\n<tool_call>{CALL}", step) == ToolAnswer("", (SEARCH, SEARCH))


PIECES = [
    "<tool_call>",
    "</tool_call>",
    CALL,
    '{"name": "search"',
    '{"function": {"name": "now", "parameters": {"a": "</tool_call>"}}}',
    "hello ",
    "\n",
    "```json\n",
    "<",
    "{",
    "[",
    "]",
    "[TOOL_CALLS]",
    ";",
]


@pytest.mark.parametrize("opened", ["", '<tool_call>\n{"name": "search", "arguments":'])
def test_a_text_in_pieces_is_read_as_the_whole_and_nothing_of_it_is_lost(opened: str) -> None:
    random = Random(7)
    for _ in range(400):
        text = "".join(random.choices(PIECES, k=random.randint(1, 7)))
        answer = read(text, random.randint(1, 5), opened)
        assert answer == read(text, len(text), opened)
        assert answer.calls or answer.broken or answer.text == text


TEXTS = [
    "Qwen models write a <tool_call> tag before the JSON. Everything else is plain text.",
    "A <tool_call> opens, and so does <tool_call> here.",
    "It ends with </tool_call> then.",
    '{"answer": "a <tool_call> tag"}',
    "It ends on 9 < 10 <tool> and <tool_",
    "See [1] and [TO DO] <b>now</b>. `x` ```python\nif x < 3: {}\n``` [ 7 ] {x} <tea> \n\n",
    '{"answer": "in May"}',
    'An object: {"year": 2030} is <b>no</b> call.',
    '{"name": "unknown", "arguments": {}}',
    '{"name": "search", "arguments": {}, "note": "an object of the answer"}',
    f"{CALL} is how a call looks.",
    f"```json\n{CALL}\n``` is how a call looks.",
    f'{CALL}\n{{"answer": "in May"}}',
    "```python\nprint(1)\n```",
    "a [TOOL_CALLS] [{",
    "[1, 2]",
    "[" * 3000,
    "  \n",
    "",
    "42",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@every_step
def test_all_else_is_text_to_the_last_character(text: str, step: int) -> None:
    assert read(text, step) == ToolAnswer(text)


@every_step
def test_without_tools_everything_is_text_at_once(step: int) -> None:
    text = f"<tool_call>{CALL} "
    reader = ToolCallReader()
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    assert [reader.take(piece) for piece in pieces] == pieces
    assert (reader.shown, reader.finish()) == (text, ToolAnswer(text))


@pytest.mark.parametrize(
    "pieces",
    [
        [("It", "It"), (" ends", " ends"), (" <", ""), ("b>", " <b>"), (" <tool", ""), ("_call>{", "")],
        [("See [", "See"), ("1]", " [1]"), ("[{", ""), ('"na', ""), ('rrow"', '[{"narrow"')],
        [("``", ""), ("`py", ""), ("\nx = 1", "```py\nx = 1"), ("\n", ""), ("```", ""), (".", "\n```.")],
        [("[TOOL", ""), ("BOX]", "[TOOLBOX]"), (" {  ", ""), ('"', ""), ('year": 1}', ' {  "year": 1}')],
    ],
)
def test_text_is_shown_as_soon_as_it_can_be_no_call(pieces: list[tuple[str, str]]) -> None:
    reader = ToolCallReader(NAMES)
    assert [reader.take(piece) for piece, _ in pieces] == [shown for _, shown in pieces]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>search lease</tool_call>", "no JSON object with a name"),
        ('<tool_call>{"name": "search", "arguments": {"query"', "no JSON object with a name"),
        (f"<tool_call>{CALL} or so</tool_call>", "no JSON object with a name"),
        ('<tool_call>{"arguments": {}}</tool_call>', "names no tool"),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "names no tool"),
        ("<tool_call>7</tool_call>", "names no tool"),
        ('<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "arguments are no JSON object"),
        ('<tool_call>{"name": "search", "arguments": "{"}</tool_call>', "no JSON object: Expecting property name"),
        ('<tool_call>{"name": "search", "arguments": "[1]"}</tool_call>', "arguments are no JSON object"),
    ],
)
def test_a_broken_call_is_kept_with_the_reason(text: str, reason: str) -> None:
    answer = read(text)
    assert (answer.text, answer.calls) == ("", ())
    (broken,) = answer.broken
    assert reason in broken.reason
    assert broken.name == ("search" if "arguments are" in broken.reason else None)
    assert broken.text.removeprefix("<tool_call>") in text


def test_a_call_that_was_cut_off_says_so() -> None:
    text = '<tool_call>{"name": "search", "argu'
    (broken,) = read(text, is_cut=True).broken
    assert broken.text == text
    assert "cut off at the token limit" in broken.reason


def test_a_broken_call_does_not_spoil_the_others() -> None:
    answer = read(f"<tool_call>search</tool_call><tool_call>{CALL}</tool_call>")
    assert (len(answer.broken), answer.calls) == (1, (SEARCH,))


@pytest.mark.parametrize(
    "tag", ["<tool_call>\n", "<think>\n\n</think>\n\n<tool_call>\n", "", "[TOOL_CALLS][", "[TOOL_CALLS] ["]
)
@pytest.mark.parametrize(
    ("names", "given", "continued"),
    [
        (["search"], '{"name": "search", "arguments":', ' {"query": "lease"}}'),
        (NAMES, '{"name": "', 'search", "arguments": {"query": "lease"}}'),
    ],
    ids=["one tool", "several tools"],
)
def test_a_call_whose_beginning_was_given_is_read_with_it(tag: str, names: Any, given: str, continued: str) -> None:
    end = "]" if "[" in tag else "\n</tool_call>" if tag else ""
    assert read(continued + end, opened=tag + given, names=names) == ToolAnswer("", (SEARCH,))


@pytest.mark.parametrize(
    "continued", [' {"query": "lease"}', ' {"query": "lease"}\n', f" {CALL}", ' {"query": "lease"}} and so on']
)
@pytest.mark.parametrize("tag", ["<tool_call>\n", ""])
def test_arguments_that_are_complete_are_enough_where_the_name_was_given(tag: str, continued: str) -> None:
    opened = f'{tag}{{"name": "search", "arguments":'
    assert read(continued, opened=opened, names=["search"]) == ToolAnswer("", (SEARCH,))


@pytest.mark.parametrize("tag", ["<tool_call>\n", ""])
@pytest.mark.parametrize("continued", ["no idea", ' {"query": "le', " 7", ""])
def test_an_answer_that_does_not_continue_its_beginning_is_broken_and_no_text(tag: str, continued: str) -> None:
    opened = f'{tag}{{"name": "search", "arguments":'
    answer = read(continued, opened=opened, names=["search"])
    assert (answer.text, answer.calls, len(answer.broken)) == ("", (), 1)
    assert answer.broken[0].text == opened + continued
