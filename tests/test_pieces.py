"""Pieces of chunks are found wherever a framework cut them, and never where they don't stand."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from cachecraft_rag.chunk_forms import MAX_FORMS, forms_of
from cachecraft_rag.pieces import _STEP, MIN_PIECE_CHARS, RECENT_TEXTS, PieceIndex, PieceSpan, apart
from tests.conftest import CountedPrompt


def passages(count: int, seed: int = 0, low: int = 120, high: int = 300) -> list[str]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    return [
        "\n".join(" ".join(rng.choices(words, k=rng.randint(low, high) // 3)) for _ in range(3)) for _ in range(count)
    ]


def index_of(texts: list[str]) -> PieceIndex:
    index = PieceIndex()
    for text in texts:
        index.use(text)
    return index


def find(index: PieceIndex, prompt: str) -> list[PieceSpan]:
    spans = index.find(prompt, [(0, len(prompt))])
    for span in spans:
        assert prompt[span.start : span.end] == span.form[span.offset : span.offset + span.end - span.start]
        assert span.form in forms_of(span.text)
        assert span.end - span.start >= MIN_PIECE_CHARS
    assert all(one.end <= other.start for one, other in pairwise(spans))
    return spans


CHUNK, OTHER, THIRD = passages(3)


@pytest.mark.parametrize("shift", range(5))
@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 400), (300, None), (200, 480), (0, MIN_PIECE_CHARS), (37, 37 + MIN_PIECE_CHARS), (-MIN_PIECE_CHARS, None)],
    ids=["head", "tail", "middle", "short head", "short middle", "short tail"],
)
def test_a_piece_is_found_with_its_place_in_the_chunk(first: int, last: int | None, shift: int) -> None:
    piece = CHUNK[first:last]
    before = "-" * (20 + shift)
    (span,) = find(index_of([OTHER, CHUNK]), f"{before}{piece}|")
    assert span == PieceSpan(len(before), len(before) + len(piece), CHUNK, CHUNK, first % len(CHUNK))


def test_shorter_pieces_are_left_alone() -> None:
    assert find(index_of([CHUNK]), f"-- {CHUNK[50 : 49 + MIN_PIECE_CHARS]} --") == []


def test_an_index_without_texts_and_a_prompt_without_room_give_nothing() -> None:
    assert PieceIndex().find(CHUNK, [(0, len(CHUNK))]) == []
    assert index_of([CHUNK]).find(CHUNK, [(0, MIN_PIECE_CHARS - 1), (MIN_PIECE_CHARS, MIN_PIECE_CHARS + 9)]) == []


def test_pieces_end_where_the_range_ends() -> None:
    spans = index_of([CHUNK]).find(CHUNK, [(10, 300), (400, 700)])
    assert [(span.start, span.end, span.offset) for span in spans] == [(10, 300, 10), (400, 700, 400)]


def test_both_parts_of_a_chunk_that_was_cut_in_two_are_found() -> None:
    prompt = f"{CHUNK[:420]}\n\nQuestion\n\n{CHUNK[420:]}"
    assert [span.offset for span in find(index_of([CHUNK]), prompt)] == [0, 420]


def test_the_longest_of_overlapping_pieces_stays_whole() -> None:
    joined = f"{CHUNK[-300:]} {OTHER[:600]}"
    first, second = find(index_of([CHUNK, OTHER, joined + THIRD]), f"...{joined}...{CHUNK[-340:]}")
    assert (first.text, first.end - first.start, first.offset) == (joined + THIRD, len(joined), 0)
    assert (second.text, second.end - second.start) == (CHUNK, 340)


def test_of_equally_long_pieces_the_one_that_begins_its_chunk_is_taken() -> None:
    for texts in ([CHUNK[:500] + OTHER, THIRD + CHUNK[:500]], [THIRD + CHUNK[:500], CHUNK[:500] + OTHER]):
        (span,) = find(index_of(texts), f"<{CHUNK[:500]}>")
        assert (span.text, span.offset) == (CHUNK[:500] + OTHER, 0)


@pytest.mark.parametrize(
    "printed",
    [lambda text: repr([text]), json.dumps, lambda text: json.dumps({"a": text}, ensure_ascii=False)],
    ids=["repr", "ascii json", "json"],
)
def test_a_piece_is_found_in_escaped_forms(printed: object) -> None:
    assert callable(printed)
    chunk = "".join(f'{line} "it\'s" §\u2014 契\tx\\' for line in CHUNK.splitlines(keepends=True))
    prompt = f"Tool: {printed(chunk[330:])} done"
    (span,) = find(index_of([chunk, OTHER]), prompt)
    assert span.end - span.start >= len(printed(chunk[330:])) - 12  # but for the brackets around it
    assert span.form != chunk
    assert len(forms_of(chunk)) == MAX_FORMS


def test_the_texts_used_last_are_looked_for() -> None:
    texts = passages(RECENT_TEXTS + 2, seed=3)
    index = index_of(texts)
    index.use(texts[2])
    index.use(OTHER)
    found = [bool(find(index, text[100:])) for text in texts]
    assert found == [False, False, True, False, *[True] * (RECENT_TEXTS - 2)]
    index.discard(texts[2])
    index.discard(texts[-1])
    assert find(index, texts[2][100:]) == find(index, texts[-1][100:]) == []
    index.release()
    assert len(find(index, texts[4][100:])) == 1


def test_nothing_is_left_in_the_index_of_texts_that_are_gone() -> None:
    texts = passages(20, seed=4) + [CHUNK + str(number) for number in range(20)]
    index = index_of(texts)
    find(index, json.dumps(CHUNK + "\n"))
    for text in texts:
        index.discard(text)
    assert all(kind._places == {} and kind._forms == {} for kind in index._kinds)


def test_a_form_with_half_a_character_is_left_out() -> None:
    broken = CHUNK[:400] + "\ud800" + CHUNK[400:]
    index = index_of([broken])
    assert find(index, CHUNK[:400] + "!") == []
    (span,) = find(index, repr(broken)[1:-30])
    assert span.form == repr(broken)[1:-1]


def test_rules_and_repeated_letters_are_no_anchors() -> None:
    index = index_of(["-" * 5000, "a" * 5000])
    assert find(index, "-" * 3000 + "a" * 3000) == []


def test_random_cuts_are_found_and_nothing_else() -> None:
    rng = random.Random(5)
    known = passages(40, seed=6)
    noise = passages(20, seed=7)
    index = index_of(known)
    for _ in range(60):
        parts, expected, at = [], [], 0
        for chunk in rng.sample(known, rng.randint(1, 5)):
            length = rng.randint(MIN_PIECE_CHARS, len(chunk))
            offset = rng.randint(0, len(chunk) - length)
            between = f"\x01{rng.choice(noise)}\x02"
            parts += [between, chunk[offset : offset + length]]
            at += len(between) + length
            expected.append((at - length, at, chunk, offset))
        prompt = "".join(parts) + "\x03"
        assert [(span.start, span.end, span.text, span.offset) for span in find(index, prompt)] == expected


def test_boilerplate_costs_bounded_work_and_is_still_covered() -> None:
    rng = random.Random(8)
    clauses = [text.replace("\n", " ") for text in passages(4, seed=9)]
    known = [" ".join(rng.choices(clauses, k=rng.randint(3, 6))) + str(number) for number in range(RECENT_TEXTS)]
    prompt = CountedPrompt(" ".join(text[70:-70] for text in known)[:30_000])
    spans = find(index_of(known), prompt)
    assert sum(span.end - span.start for span in spans) > 0.9 * len(prompt)
    prompt.num_chars = 0
    index_of(known).find(prompt, [(0, len(prompt))])
    assert prompt.num_chars < 120 * len(prompt)


@pytest.mark.parametrize(
    ("ranges", "taken", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(7, 9), (2, 4)], [(0, 2), (4, 7), (9, 10)]),
        ([(0, 10), (20, 30)], [(5, 25)], [(0, 5), (25, 30)]),
        ([(5, 10)], [(0, 5), (10, 12)], [(5, 10)]),
    ],
)
def test_what_is_not_taken_is_left(
    ranges: list[tuple[int, int]], taken: list[tuple[int, int]], left: list[tuple[int, int]]
) -> None:
    assert apart(ranges, taken) == left


def test_a_text_that_repeats_itself_takes_no_anchor_of_another_with_it() -> None:
    begin = CHUNK[:_STEP]
    other = begin + OTHER
    index = index_of([begin * 4 + THIRD, other])
    assert find(index, other[: 2 * MIN_PIECE_CHARS])
    index.discard(begin * 4 + THIRD)
    anew = index_of([other])
    find(anew, other)
    assert index._kinds[0]._places == anew._kinds[0]._places
