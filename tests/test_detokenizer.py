"""Ids to text, token by token: whole characters, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cachecraft_rag.detokenizer import Detokenizer
from tests.tiny_tokenizers import ALL, byte_level, metaspace

BYTE_LEVEL, METASPACE = byte_level(), metaspace()
LAST_ID = max(BYTE_LEVEL.get_vocab().values())
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40)


def decode_with(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def characters(ids: Sequence[int]) -> str:
    """A decoder in which every token is one character."""
    return "".join(map(chr, ids))


def run(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    """All deltas, the last one from ``finish``; ends as the engine does at a stop text."""
    deltas = []
    for token_id in token_ids:
        deltas.append(detokenizer.push(token_id))
        assert detokenizer.text == "".join(deltas)
        if detokenizer.is_stopped:
            break
    deltas.append(detokenizer.finish())
    assert detokenizer.text == "".join(deltas)
    return deltas


def spelled(text: str, *stop: str) -> Detokenizer:
    """A detokenizer that got a text character by character, not finished."""
    detokenizer = Detokenizer(characters, stop)
    for character in text:
        assert not detokenizer.is_stopped
        detokenizer.push(ord(character))
    return detokenizer


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, LAST_ID), max_size=30))
@example([2, 0, 1])
@example([187, 187, 187])
def test_deltas_of_random_tokens_join_to_their_text(token_ids: list[int]) -> None:
    decode = decode_with(BYTE_LEVEL)
    assert "".join(run(Detokenizer(decode), token_ids)) == decode(token_ids)


@settings(max_examples=150, deadline=None)
@given(TEXTS)
@example("👍🏽 漢字 שלום \0\r\n e\u0301")
def test_deltas_of_any_text_join_to_it(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, METASPACE):
        decode = decode_with(tokenizer)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(run(Detokenizer(decode), token_ids)) == decode(token_ids)


@pytest.mark.parametrize("name", list(ALL))
def test_every_word_keeps_its_space(name: str) -> None:
    tokenizer = ALL[name]()
    token_ids = tokenizer.encode("the Supplier shall  deliver\n the Products", add_special_tokens=False)
    assert "".join(run(Detokenizer(decode_with(tokenizer)), token_ids)) == "the Supplier shall  deliver\n the Products"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE])
def test_a_character_split_over_tokens_comes_out_whole(tokenizer: Any) -> None:
    token_ids = tokenizer.encode("漢👍", add_special_tokens=False)
    assert len(token_ids) >= 7
    deltas = run(Detokenizer(decode_with(tokenizer)), token_ids)
    assert [delta for delta in deltas if delta] == ["漢", "👍"]


def test_nothing_is_shown_of_a_character_until_its_last_byte() -> None:
    detokenizer = Detokenizer(decode_with(BYTE_LEVEL))
    first, second, third = BYTE_LEVEL.encode("漢", add_special_tokens=False)
    assert [detokenizer.push(first), detokenizer.push(second), detokenizer.push(third)] == ["", "", "漢"]


def test_bytes_that_stay_incomplete_are_given_out_at_the_end() -> None:
    detokenizer = Detokenizer(decode_with(BYTE_LEVEL))
    token_ids = BYTE_LEVEL.encode("ok漢", add_special_tokens=False)[:-1]
    assert "".join(detokenizer.push(token_id) for token_id in token_ids) == "ok"
    assert detokenizer.finish() == "�"
    assert detokenizer.text == "ok�"


def test_bytes_that_make_no_character_are_given_out_with_the_next_one() -> None:
    detokenizer = Detokenizer(decode_with(BYTE_LEVEL))
    broken = BYTE_LEVEL.encode("漢", add_special_tokens=False)[0]
    (letter,) = BYTE_LEVEL.encode("x", add_special_tokens=False)
    assert [detokenizer.push(broken), detokenizer.push(letter)] == ["", "�x"]


def test_special_tokens_have_no_text() -> None:
    detokenizer = Detokenizer(decode_with(BYTE_LEVEL))
    (letter,) = BYTE_LEVEL.encode("x", add_special_tokens=False)
    assert [detokenizer.push(token_id) for token_id in (letter, 2, letter)] == ["x", "", "x"]


def test_no_tokens_have_no_text() -> None:
    detokenizer = Detokenizer(characters, ["stop"])
    assert detokenizer.finish() == ""
    assert (detokenizer.text, detokenizer.is_stopped) == ("", False)


def test_the_number_of_tokens_decoded_again_stays_small() -> None:
    lengths = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return characters(ids)

    run(Detokenizer(decode, ["zz"]), [ord("a")] * 500)
    assert max(lengths) <= 3


# Stop texts


def test_a_stop_text_ends_the_answer_and_is_no_part_of_it() -> None:
    detokenizer = spelled("yes\n\n", "\n\n")
    assert detokenizer.is_stopped
    assert detokenizer.text == "yes"
    assert detokenizer.finish() == ""
    assert detokenizer.text == "yes"


def test_nothing_after_the_stop_text_is_shown() -> None:
    detokenizer = Detokenizer("".join, ["STOP"])  # type: ignore[arg-type]
    assert detokenizer.push("yes STOP no") == "yes "  # type: ignore[arg-type]
    assert detokenizer.is_stopped
    assert detokenizer.finish() == ""


def test_what_may_be_the_start_of_a_stop_text_is_held_back() -> None:
    detokenizer = Detokenizer(characters, ["###"])
    assert [detokenizer.push(ord(c)) for c in "ab##"] == ["a", "b", "", ""]
    assert detokenizer.text == "ab"
    assert not detokenizer.is_stopped


def test_what_turns_out_to_be_no_stop_text_is_released() -> None:
    detokenizer = Detokenizer(characters, ["###"])
    assert [detokenizer.push(ord(c)) for c in "a##b"] == ["a", "", "", "##b"]


def test_what_is_held_back_is_released_at_the_end() -> None:
    detokenizer = spelled("a##", "###")
    assert detokenizer.finish() == "##"
    assert detokenizer.text == "a##"
    assert not detokenizer.is_stopped


def test_only_as_much_as_may_begin_a_stop_text_is_held_back() -> None:
    detokenizer = Detokenizer(characters, ["aab"])
    assert [detokenizer.push(ord(c)) for c in "aaaa"] == ["", "", "a", "a"]
    assert detokenizer.push(ord("b")) == ""
    assert detokenizer.is_stopped
    assert detokenizer.text == "aa"


def test_a_stop_text_at_the_very_start_leaves_nothing() -> None:
    detokenizer = spelled("END", "END")
    assert detokenizer.is_stopped
    assert detokenizer.text == ""


def test_a_stop_text_at_the_very_end_is_found_when_the_answer_is_finished() -> None:
    # The last character has its bytes only at the end, and completes the stop text.
    detokenizer = Detokenizer(decode_with(BYTE_LEVEL), ["k�"])
    for token_id in BYTE_LEVEL.encode("ok漢", add_special_tokens=False)[:-1]:
        detokenizer.push(token_id)
    assert detokenizer.finish() == ""
    assert detokenizer.is_stopped
    assert detokenizer.text == "o"


def test_a_stop_text_across_the_borders_of_tokens_is_found() -> None:
    decode = decode_with(BYTE_LEVEL)
    token_ids = BYTE_LEVEL.encode("the Supplier shall deliver", add_special_tokens=False)
    for length in range(2, 8):
        for start in range(1, 18):
            stop = "the Supplier shall deliver"[start : start + length]
            detokenizer = Detokenizer(decode, [stop])
            run(detokenizer, token_ids)
            assert detokenizer.is_stopped
            assert detokenizer.text == "the Supplier shall deliver".partition(stop)[0]


@pytest.mark.parametrize("stops", [("ab", "abc"), ("abc", "ab")])
@pytest.mark.parametrize(("text", "expected"), [("xxabc", "xx"), ("xxab", "xx"), ("xxac", "xxac"), ("aab", "a")])
def test_the_shorter_of_two_stop_texts_with_one_start_wins(stops: tuple[str, ...], text: str, expected: str) -> None:
    detokenizer = Detokenizer(characters, stops)
    run(detokenizer, [ord(character) for character in text])
    assert detokenizer.text == expected
    assert detokenizer.is_stopped == (expected != text)


def test_of_several_stop_texts_in_one_token_the_first_in_the_text_wins() -> None:
    detokenizer = Detokenizer("".join, ["late", "early"])  # type: ignore[arg-type]
    detokenizer.push("now early then late")  # type: ignore[arg-type]
    assert detokenizer.text == "now "


@settings(max_examples=300, deadline=None)
@given(st.text("abc", max_size=25), st.text("abc", min_size=1, max_size=4))
def test_the_answer_ends_before_the_first_occurrence_of_a_stop_text(text: str, stop: str) -> None:
    detokenizer = Detokenizer(characters, [stop])
    for count, character in enumerate(text, start=1):
        detokenizer.push(ord(character))
        if detokenizer.is_stopped:
            break
        held = text[len(detokenizer.text) : count]
        assert stop.startswith(held)
        assert len(held) < len(stop)
    detokenizer.finish()
    assert detokenizer.text == text.partition(stop)[0]
    assert detokenizer.is_stopped == (stop in text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("abc", min_size=1, max_size=4), max_size=8), st.text("abc", min_size=1, max_size=4))
def test_where_tokens_end_makes_no_difference_to_the_text(pieces: list[str], stop: str) -> None:
    by_token = Detokenizer("".join, [stop])  # type: ignore[arg-type]
    run(by_token, pieces)  # type: ignore[arg-type]
    by_character = Detokenizer(characters, [stop])
    run(by_character, [ord(character) for character in "".join(pieces)])
    assert by_token.text == by_character.text
    assert by_token.is_stopped == by_character.is_stopped


def test_two_stop_texts_that_end_at_different_places_do_not_depend_on_where_tokens_end() -> None:
    one_token = Detokenizer("".join, ["b", "abc"])  # type: ignore[arg-type]
    one_token.push("xabc")  # type: ignore[arg-type]
    assert one_token.text == spelled("xab", "b", "abc").text == "xa"
