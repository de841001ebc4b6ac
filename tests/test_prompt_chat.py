"""Chat messages: rendered once by the model's own template, or with what it refuses put elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cachecraft_rag.prompt import EncodedPrompt, PromptEncoder, RagPrompt
from tests.tiny_tokenizers import ALL

CLAUSE = "The Supplier shall deliver the Products within thirty days after receipt of the Purchase Order."
GARDEN = "In the garden there were three apple trees, and under the oldest one stood a small wooden bench."
ENCODERS = {name: PromptEncoder(build()) for name, build in ALL.items()}
WITH_TEMPLATE = [name for name, encoder in ENCODERS.items() if encoder.has_chat_template]


def chunk_texts(encoded: EncodedPrompt) -> list[str]:
    return [span.text for span in encoded.spans]


def test_a_template_that_refuses_a_system_message_gets_it_in_the_first_user_message() -> None:
    encoder = ENCODERS["strict"]
    encoded = encoder.encode(RagPrompt(system="Be brief.", chunks=(CLAUSE,), question="When?"))
    assert encoded.text == (
        f"<bos><start_of_turn>user\nBe brief.\n\n{CLAUSE}\n\nWhen?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert chunk_texts(encoded) == [CLAUSE]


def test_every_system_message_that_is_refused_goes_to_the_message_after_it() -> None:
    messages = [
        {"role": "system", "content": "One."},
        {"role": "system", "content": "Two."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "There."},
        {"role": "system", "content": "Three."},
        {"role": "user", "content": "When?"},
    ]
    text = ENCODERS["strict"].render(RagPrompt.from_messages(messages))
    assert text == (
        "<bos><start_of_turn>user\nOne.\n\nTwo.\n\nWhere?<end_of_turn>\n"
        "<start_of_turn>assistant\nThere.<end_of_turn>\n"
        "<start_of_turn>user\nThree.\n\nWhen?<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("first", [[], [{"role": "system", "content": "s"}]])
def test_what_else_a_template_refuses_is_an_error_with_its_reason(first: list[dict[str, str]]) -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match=r"messages: .*must alternate"):
        ENCODERS["strict"].encode(RagPrompt.from_messages([*first, *twice]))


def test_a_chat_that_is_one_refused_system_message_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"messages: .*System role not supported"):
        ENCODERS["strict"].encode(RagPrompt.from_messages([{"role": "system", "content": "s"}]))


def test_a_chunk_is_found_where_the_template_stripped_its_message() -> None:
    encoder = ENCODERS["strict"]
    encoded = encoder.encode(RagPrompt(chunks=(f"  {CLAUSE}\n", f"{GARDEN}  \n")))
    assert chunk_texts(encoded) == [CLAUSE, GARDEN]
    assert encoder.decode(encoded.token_ids) == encoded.text


def test_a_chat_has_its_chunks_in_any_message() -> None:
    messages = [
        {"role": "system", "content": f"Use this:\n{GARDEN}"},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Under a tree."},
        {"role": "user", "content": f"And this?\n{CLAUSE}"},
    ]
    encoder = ENCODERS["byte-level"]
    encoded = encoder.encode(RagPrompt.from_messages(messages, [GARDEN, CLAUSE]))
    assert chunk_texts(encoded) == [GARDEN, CLAUSE]
    assert encoder.decode(encoded.token_ids) == encoded.text
    assert encoded.text.count("<|im_start|>") == 5


def test_a_chat_can_have_tools() -> None:
    tool = {"type": "function", "function": {"name": "find_clause", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": f"{CLAUSE} When?"}]
    encoder = ENCODERS["byte-level"]
    encoded = encoder.encode(RagPrompt.from_messages(messages, [CLAUSE], tools=[tool]))
    head = encoded.text.partition("<|im_end|>")[0]
    assert json.loads(head.partition("Tools: ")[2]) == [tool]
    assert chunk_texts(encoded) == [CLAUSE]


def test_rendering_does_not_change_the_messages() -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompt = RagPrompt.from_messages(messages)
    ENCODERS["strict"].encode(prompt)
    assert messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


# The canonical prefix


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("byte-level", "<|im_start|>user\n"),
        ("strict", "<bos><start_of_turn>user\n"),
        ("metaspace-chat", "<s>[INST] "),
        ("metaspace", "<s>"),
        ("byte-level-plain", ""),
    ],
)
def test_the_canonical_prefix_begins_with_what_stands_before_a_user_message(name: str, head: str) -> None:
    encoder = ENCODERS[name]
    assert encoder.decode(encoder.head_ids("Read this.")) == f"{head}Read this."


@pytest.mark.parametrize("name", [*WITH_TEMPLATE, "metaspace", "byte-level-plain"])
def test_a_prompt_that_begins_with_the_instruction_begins_with_the_canonical_prefix(name: str) -> None:
    encoder = ENCODERS[name]
    instruction = "Answer the question using only the passages.\n\n"
    head = encoder.head_ids(instruction)
    messages = [{"role": "user", "content": f"{instruction}{CLAUSE}\n\nWhen?"}]
    encoded = encoder.encode(RagPrompt.from_messages(messages, [CLAUSE]))
    assert encoded.token_ids[: encoded.spans[0].start] == head


def test_the_canonical_prefix_of_a_plain_tokenizer_is_bos_and_instruction() -> None:
    encoder = ENCODERS["metaspace"]
    assert encoder.head_ids("") == (1,)
    assert encoder.decode(encoder.head_ids("Answer:")) == "<s>Answer:"
