"""Prompts: the model reads exactly the user's text, and a chunk is read alike wherever it stands."""

from __future__ import annotations

import threading
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.prompt import EncodedPrompt, PromptEncoder, RagPrompt
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_tokenizers import ALL, NASTY_TEXTS, byte_level, byte_level_with_bos, metaspace, strict

CLAUSE = "The Supplier shall deliver the Products within thirty days after receipt of the Purchase Order."
GARDEN = "In the garden there were three apple trees, and under the oldest one stood a small wooden bench."
ENCODERS = {name: PromptEncoder(build()) for name, build in ALL.items()}
WITH_BOS = [name for name in ALL if not name.startswith("byte-level") or name == "byte-level-bos"]
WITH_TEMPLATE = [name for name, encoder in ENCODERS.items() if encoder.has_chat_template]


def chunk_texts(encoded: EncodedPrompt) -> list[str]:
    return [span.text for span in encoded.spans]


@pytest.fixture(params=list(ALL))
def encoder(request: pytest.FixtureRequest) -> PromptEncoder:
    """An encoder with every kind of tokenizer."""
    return ENCODERS[request.param]


@pytest.mark.parametrize("name", list(ALL))
def test_ids_of_every_tokenizer_fit_the_tiny_models(name: str) -> None:
    assert max(ALL[name]().get_vocab().values()) < VOCAB_SIZE


# What a prompt may look like


def test_an_empty_chunk_is_refused_by_its_number() -> None:
    with pytest.raises(ValueError, match=r"chunks\[1\]: ''"):
        RagPrompt(chunks=[CLAUSE, ""])  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [" \n\t", None, 7, b"bytes"])
def test_a_chunk_that_is_no_visible_text_is_refused(chunk: object) -> None:
    with pytest.raises(ValueError, match=r"chunks\[0\]"):
        RagPrompt(chunks=[chunk])  # type: ignore[arg-type]


def test_chunks_given_as_one_string_are_refused() -> None:
    with pytest.raises(ValueError, match=r"chunks: .*one string; give a list"):
        RagPrompt(chunks="The Supplier")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt",
    [
        RagPrompt(chunks=(CLAUSE, "half a pair: \ud83d, cut here")),
        RagPrompt(question="half a pair: \ud83d, cut here"),
        RagPrompt.from_text("half a pair: \ud83d, cut here"),
    ],
)
def test_half_a_character_is_refused_with_its_place(encoder: PromptEncoder, prompt: RagPrompt) -> None:
    with pytest.raises(ValueError, match=r"prompt: .*half a pair: \\ud83d, cut here.* lone surrogate"):
        encoder.encode(prompt)


@pytest.mark.parametrize("field", ["system", "question", "separator"])
def test_a_field_that_is_no_string_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: None"):
        RagPrompt(**{field: None})  # type: ignore[arg-type]


def test_a_chat_without_messages_is_refused() -> None:
    with pytest.raises(ValueError, match="messages: an empty list"):
        RagPrompt.from_messages([])


def test_a_prompt_keeps_its_own_copy_of_the_lists() -> None:
    chunks = [CLAUSE]
    prompt = RagPrompt(chunks=chunks)  # type: ignore[arg-type]
    chunks.append(GARDEN)
    assert prompt.chunks == (CLAUSE,)
    with pytest.raises(FrozenInstanceError):
        prompt.question = "other"  # type: ignore[misc]


def test_parts_are_joined_by_the_separator_and_nothing_else() -> None:
    prompt = RagPrompt(system="Be brief.", chunks=("A", "B"), question="C?", separator=" | ")
    assert prompt.as_messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "A | B | C?"},
    ]


def test_no_question_and_no_system_message_leave_nothing_behind() -> None:
    assert RagPrompt(chunks=("A", "B")).as_messages() == [{"role": "user", "content": "A\n\nB"}]


def test_the_tokenizer_of_the_caller_is_left_alone() -> None:
    tokenizer = byte_level()
    encoder = PromptEncoder(tokenizer)
    tokenizer(["one", "longer text"], padding=True, truncation=True, max_length=2)
    tokenizer.add_tokens(["deliver"])
    assert encoder.encode_text(CLAUSE) == ENCODERS["byte-level"].encode_text(CLAUSE)
    encoder.encode_chunk("<|im_end|>")
    assert tokenizer("<|im_end|>")["input_ids"] == [2]


def test_an_object_that_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer: object has no encode method"):
        PromptEncoder(object())


# The text


@pytest.mark.parametrize("kind", list(NASTY_TEXTS))
def test_the_ids_of_a_prompt_from_parts_decode_to_its_text(encoder: PromptEncoder, kind: str) -> None:
    encoded = encoder.encode(
        RagPrompt(system="Be brief.", chunks=(CLAUSE, NASTY_TEXTS[kind], GARDEN), question="When?")
    )
    assert encoder.decode(encoded.token_ids) == encoded.text
    assert chunk_texts(encoded) == [CLAUSE, NASTY_TEXTS[kind].strip(), GARDEN]


@pytest.mark.parametrize("kind", [kind for kind in NASTY_TEXTS if kind != "bos"])
def test_the_ids_of_a_ready_text_decode_to_it(encoder: PromptEncoder, kind: str) -> None:
    text = f"Context: {NASTY_TEXTS[kind]}\n\n{CLAUSE} Question?"
    encoded = encoder.encode(RagPrompt.from_text(text, [NASTY_TEXTS[kind]]))
    assert encoder.decode(encoded.token_ids) == encoded.text
    assert encoded.text.endswith(text)
    assert chunk_texts(encoded) == [NASTY_TEXTS[kind].strip()]


def test_special_tokens_in_free_text_add_no_characters(encoder: PromptEncoder) -> None:
    eos = encoder.tokenizer.eos_token
    encoded = encoder.encode(RagPrompt.from_text(f"one{eos}two {eos} three{eos}{eos}\n{CLAUSE}", [CLAUSE]))
    assert encoder.decode(encoded.token_ids) == encoded.text
    assert encoded.token_ids.count(encoder.tokenizer.eos_token_id) == 4


@pytest.mark.parametrize("text", [f"  {CLAUSE}", f"\n{CLAUSE}\n", f"\n\n{CLAUSE}\n\n", f"{CLAUSE}  ", CLAUSE])
def test_white_space_at_the_edges_of_a_ready_text_is_read_too(encoder: PromptEncoder, text: str) -> None:
    encoded = encoder.encode(RagPrompt.from_text(text, [CLAUSE]))
    assert encoder.decode(encoded.token_ids) == encoded.text
    assert encoded.text.endswith(text)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_around_any_chunk_is_read_as_it_is(data: st.DataObject) -> None:
    encoder = ENCODERS[data.draw(st.sampled_from(list(ALL)))]
    # SentencePiece writes spaces as U+2581, so it can't tell the two apart.
    texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=30)
    before, chunk, after = data.draw(texts), data.draw(texts.filter(str.strip)), data.draw(texts)
    encoded = encoder.encode(RagPrompt.from_text(before + chunk + after, [chunk]))
    assert encoder.decode(encoded.token_ids) == encoded.text
    assert encoded.text.endswith(before + chunk + after)
    assert chunk_texts(encoded) == [chunk.strip()]


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_text_is_what_the_chat_template_makes(name: str) -> None:
    encoder = ENCODERS[name]
    prompt = RagPrompt(chunks=(CLAUSE, GARDEN), question="When?")
    rendered = encoder.tokenizer.apply_chat_template(prompt.as_messages(), tokenize=False, add_generation_prompt=True)
    assert encoder.encode(prompt).text == encoder.render(prompt) == rendered


def test_the_rendered_prompt_ends_where_the_answer_starts() -> None:
    text = ENCODERS["byte-level"].render(RagPrompt(question="When?"))
    assert text == "<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n"


def test_a_tokenizer_without_a_template_gets_the_plain_layout() -> None:
    prompt = RagPrompt(system="Be brief.", chunks=(CLAUSE,), question="When?")
    assert ENCODERS["byte-level-plain"].encode(prompt).text == f"Be brief.\n\n{CLAUSE}\n\nWhen?"
    assert not ENCODERS["byte-level-plain"].has_chat_template


@pytest.mark.parametrize("name", WITH_BOS)
def test_the_bos_stands_at_the_start_exactly_once(name: str) -> None:
    encoder = ENCODERS[name]
    bos, bos_id = encoder.tokenizer.bos_token, encoder.tokenizer.bos_token_id
    prompts = (
        RagPrompt(chunks=(CLAUSE,), question="When?"),
        RagPrompt(chunks=(f"a {bos} in a document",), question="When?"),
        RagPrompt.from_messages([{"role": "user", "content": "When?"}]),
        RagPrompt.from_text(f"{CLAUSE} When?"),
        RagPrompt.from_text(f"{bos}{CLAUSE} When?"),
        RagPrompt.from_text(f"{CLAUSE} When?", [CLAUSE]),
    )
    for prompt in prompts:
        encoded = encoder.encode(prompt)
        assert encoded.token_ids[0] == bos_id
        assert encoded.token_ids.count(bos_id) == 1
        assert encoded.text.startswith(bos)


@pytest.mark.parametrize("name", ["byte-level", "byte-level-plain"])
def test_a_tokenizer_that_adds_no_bos_gets_none(name: str) -> None:
    encoded = ENCODERS[name].encode(RagPrompt.from_text(CLAUSE))
    assert encoded.text == CLAUSE
    assert ENCODERS[name].tokenizer.bos_token_id not in encoded.token_ids


def test_an_empty_text_without_a_bos_has_no_tokens() -> None:
    assert ENCODERS["byte-level"].encode(RagPrompt.from_text("")) == EncodedPrompt("", (), ())


# Decoding and threads


def test_special_tokens_can_be_left_out_when_decoding() -> None:
    encoder = ENCODERS["byte-level"]
    ids = encoder.encode_text("yes<|im_end|>")
    assert encoder.decode(ids) == "yes<|im_end|>"
    assert encoder.decode(ids, skip_special_tokens=True) == "yes"


def test_spaces_before_punctuation_are_not_tidied_up() -> None:
    encoder = ENCODERS["byte-level"]
    assert encoder.decode(encoder.encode_text("a , b . c 's n't")) == "a , b . c 's n't"


@pytest.mark.parametrize("build", [byte_level, byte_level_with_bos, metaspace, strict])
def test_two_threads_encoding_at_once_agree_with_one(build: Any) -> None:
    prompts = [
        RagPrompt(chunks=(f"{CLAUSE} {number} <|im_end|> </s>", GARDEN), question=f"{number}?<|im_end|></s>")
        for number in range(60)
    ]
    expected = [PromptEncoder(build()).encode(prompt) for prompt in prompts]
    shared, found = PromptEncoder(build()), {}
    start = threading.Barrier(2)

    def encode_all(order: range) -> None:
        start.wait()
        for index in order:
            found[order.step, index] = shared.encode(prompts[index])

    orders = (range(0, 60, 1), range(59, -1, -1))
    threads = [threading.Thread(target=encode_all, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 * len(prompts)
    assert all(encoded == expected[index] for (_, index), encoded in found.items())
