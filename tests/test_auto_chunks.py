"""Text that nobody registered is known from its second appearance on."""

from __future__ import annotations

import pytest

from cachecraft_rag import RagPrompt
from cachecraft_rag.auto_chunks import MAX_PART_CHARS, MIN_PART_CHARS, AutoChunks
from cachecraft_rag.registry import ChunkRegistry, TextSpan
from tests.conftest import EngineMaker, passage

FIRST, SECOND = passage(1, 12), passage(2, 12)
SHORT = "\n\n".join(passage(number, 2) for number in range(3, 9))


def find(parts: AutoChunks, text: str, namespace: str = "default") -> list[str]:
    spans = parts.find(text, [(0, len(text))], ChunkRegistry(), namespace)
    assert all(span.origins == (text[span.start : span.end],) for span in spans)
    return [span.origins[0] for span in spans]


def test_paragraphs_are_known_from_the_second_time_on_wherever_they_stand() -> None:
    parts = AutoChunks(100)
    assert find(parts, f"Context:\n\n{FIRST}\n\n{SECOND}\n\nWhy?") == []
    assert find(parts, f"Other words.\n \n{SECOND}\n\n\nMore.\n\n{FIRST}") == [SECOND, FIRST]
    assert find(parts, FIRST[:-1]) == []


def test_short_paragraphs_between_long_ones_are_one_part() -> None:
    parts = AutoChunks(100)
    for expected in ([], [FIRST, SHORT, SECOND]):
        assert find(parts, f"{FIRST}\n\n{SHORT}\n\n{SECOND}\n\nWhy?") == expected


def test_long_text_without_paragraphs_is_split_further() -> None:
    text = passage(9, 120).replace("\n", " ")
    parts = AutoChunks(100)
    assert find(parts, text) == []
    again = find(parts, f"{text} And this.")
    assert all(MIN_PART_CHARS <= len(part) <= MAX_PART_CHARS for part in again)
    assert sum(map(len, again)) > 0.8 * len(text)


def test_what_is_found_is_registered() -> None:
    parts, registry = AutoChunks(100), ChunkRegistry()
    for _ in range(2):
        parts.find(FIRST, [(0, len(FIRST))], registry, "a")
    assert registry.find(FIRST, "a") == [TextSpan(0, len(FIRST))]
    assert registry.find(FIRST) == []


def test_namespaces_are_apart_and_can_be_forgotten() -> None:
    parts = AutoChunks(100)
    assert [find(parts, FIRST, name) for name in ("a", "b", "a")] == [[], [], [FIRST]]
    parts.clear("a")
    assert [find(parts, FIRST, name) for name in ("a", "b")] == [[], [FIRST]]


def test_parts_that_were_seen_longest_ago_are_forgotten_first() -> None:
    parts = AutoChunks(2)
    for text in (FIRST, SECOND, FIRST, SHORT):
        find(parts, text)
    assert [find(parts, text) for text in (FIRST, SECOND)] == [[FIRST], []]


def test_new_parts_are_handed_over_once() -> None:
    parts = AutoChunks(100)
    find(parts, f"{FIRST}\n\n{SECOND}", "a")
    assert parts.take_new("b") == []
    assert parts.take_new("a") == [FIRST, SECOND]
    find(parts, FIRST, "a")
    assert parts.take_new("a") == []


def test_the_reference_stores_nothing(make_engine: EngineMaker) -> None:
    engine = make_engine(auto_chunks=True)
    engine.generate(RagPrompt.from_text(f"{FIRST}\n\n{SECOND}\n\nWhy?"), reuse=False)
    assert len(engine.store) == 0


def test_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="max_parts: 0 is too small; give at least 1"):
        AutoChunks(0)


@pytest.mark.parametrize("is_on", [True, False])
def test_an_engine_stores_what_it_saw_and_reuses_it_the_second_time(make_engine: EngineMaker, is_on: bool) -> None:
    engine = make_engine(auto_chunks=True, ratio=0.2) if is_on else make_engine(ratio=0.2)
    found = []
    for question in ("Why?", "Who signs?", "When?"):
        text = f"Read this.\n\n{FIRST}\n\n{SECOND}\n\n{question}"
        stats = engine.generate(RagPrompt.from_messages([{"role": "user", "content": text}])).stats
        found.append((stats.chunk_hits, stats.chunk_misses, stats.reused_tokens > 0, len(engine.store)))
    assert found == ([(0, 0, False, 2), (2, 0, True, 2), (2, 0, True, 2)] if is_on else [(0, 0, False, 0)] * 3)
    engine.invalidate()
    assert engine.generate(RagPrompt.from_text(FIRST)).stats.chunk_misses == 0
