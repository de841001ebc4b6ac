"""Chunks are found in prompts wherever they stand, in every form, and never where they don't."""

from __future__ import annotations

import json
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.pieces import RECENT_TEXTS
from cachecraft_rag.registry import MIN_CHARS, PIECE_NAMESPACES, ChunkRegistry, TextSpan
from tests.conftest import CountedPrompt

CLAUSE = "The Supplier shall deliver the Products within thirty days after receipt of the Purchase Order."
QUOTED = 'He said "it\'s fine"\nand left;\tthe path C:\\temp stayed empty, as the report of the auditors shows.'


def passages(count: int, seed: int = 0, low: int = 20, high: int = 300) -> list[str]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    return [" ".join(rng.choices(words, k=rng.randint(low, high))) for _ in range(count)]


def registry_of(texts: list[str], namespace: str = "default") -> ChunkRegistry:
    registry = ChunkRegistry()
    registry.register(texts, namespace)
    return registry


def forms(text: str) -> set[str]:
    return {text, repr(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]}


def texts_at(prompt: str, spans: list[TextSpan]) -> list[str]:
    return [prompt[span.start : span.end] for span in spans]


def longest_first(prompt: str, chunks: list[str]) -> list[TextSpan]:
    """What `find` promises, the slow way: every occurrence of every form, longest first, then leftmost."""
    matches = set()
    for form in {form for chunk in chunks for form in forms(chunk.strip()) if len(chunk.strip()) >= MIN_CHARS}:
        at = prompt.find(form)
        while at >= 0:
            matches.add((-len(form), at))
            at = prompt.find(form, at + 1)
    taken: list[tuple[int, int]] = []
    for negative_length, start in sorted(matches):
        end = start - negative_length
        if all(end <= other_start or other_end <= start for other_start, other_end in taken):
            taken.append((start, end))
    return [TextSpan(*span) for span in sorted(taken)]


def test_a_chunk_in_the_middle_is_found() -> None:
    registry = ChunkRegistry()
    assert registry.register([CLAUSE]) == 1
    prompt = f"Context:\n---\n{CLAUSE}\n---\nQuestion: when?"
    assert registry.find(prompt) == [TextSpan(13, 13 + len(CLAUSE))]
    assert texts_at(prompt, registry.find(prompt)) == [CLAUSE]


@pytest.mark.parametrize("shift", range(9))
def test_a_chunk_is_found_at_every_alignment(shift: int) -> None:
    registry = ChunkRegistry()
    chunk = CLAUSE[:MIN_CHARS].strip().ljust(MIN_CHARS, "x")
    registry.register([chunk])
    assert registry.find("-" * shift + chunk) == [TextSpan(shift, shift + MIN_CHARS)]


def test_an_empty_or_short_prompt_has_no_chunks() -> None:
    registry = registry_of([CLAUSE])
    assert [registry.find(prompt) for prompt in ("", CLAUSE[:40], CLAUSE[:-1])] == [[], [], []]


def test_edge_whitespace_is_not_part_of_a_chunk() -> None:
    registry = registry_of([f"\n\n  {CLAUSE} \r\n"])
    assert texts_at(f"a{CLAUSE}b", registry.find(f"a{CLAUSE}b")) == [CLAUSE]
    assert registry.register([CLAUSE]) == 0
    assert (registry.contains(f" {CLAUSE}\n"), len(registry)) == (True, 1)


def test_texts_below_the_minimum_are_ignored() -> None:
    registry = ChunkRegistry()
    short, enough = "x" + "yz " * 20 + "ab", "x" + "yz " * 20 + "abc"
    assert (len(short), len(enough)) == (MIN_CHARS - 1, MIN_CHARS)
    assert registry.register([short, "", "  \n", enough]) == 1
    assert (registry.contains(short), registry.contains(enough)) == (False, True)


def test_the_repr_form_is_found_in_a_printed_list() -> None:
    registry = registry_of([QUOTED, CLAUSE])
    prompt = f"Context information: {[QUOTED, CLAUSE]}"
    assert texts_at(prompt, registry.find(prompt)) == [repr(QUOTED)[1:-1], CLAUSE]


def test_the_json_form_is_found_in_a_tool_result() -> None:
    registry = ChunkRegistry()
    text = QUOTED + " Straße, 契約"
    registry.register([text])
    for ensure_ascii in (False, True):
        prompt = json.dumps([{"text": text}], ensure_ascii=ensure_ascii)
        (span,) = registry.find(prompt)
        assert texts_at(prompt, [span]) == [json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]]
        assert span.origins == (text,)


def test_all_forms_of_a_text_are_one_chunk() -> None:
    registry = ChunkRegistry(max_chunks=2)
    assert registry.register([QUOTED, CLAUSE]) == 2
    assert len(registry) == 2
    assert registry.forget([QUOTED]) == 1
    assert [registry.find(form) for form in forms(QUOTED)] == [[], [], []]
    assert registry.find(CLAUSE) == [TextSpan(0, len(CLAUSE))]


def test_a_text_that_is_the_escaped_form_of_another_survives_it() -> None:
    registry = ChunkRegistry()
    escaped = repr(QUOTED)[1:-1]
    assert registry.register([QUOTED, escaped]) == 2
    registry.forget([QUOTED])
    assert texts_at(escaped, registry.find(escaped)) == [escaped]
    assert registry.find(QUOTED) == []


def test_another_namespace_finds_nothing() -> None:
    registry = registry_of([CLAUSE], namespace="acme")
    for namespace, is_known in (("default", False), ("other", False), ("acme", True)):
        assert registry.contains(CLAUSE, namespace) is is_known
        assert registry.find(CLAUSE, namespace) == [TextSpan(0, len(CLAUSE))] * is_known
        assert registry.forget([CLAUSE], namespace) == is_known


def test_clear_empties_one_namespace_or_all() -> None:
    registry = ChunkRegistry()
    for namespace in ("a", "b", "c"):
        registry.register([CLAUSE, QUOTED], namespace)
    registry.clear("a")
    registry.clear("never used")
    assert (len(registry), len(registry.find(CLAUSE, "a")), len(registry.find(CLAUSE, "b"))) == (4, 0, 1)
    registry.clear()
    assert (len(registry), registry.find(CLAUSE, "b")) == (0, [])
    assert registry.register([CLAUSE], "a") == 1


def test_of_nested_chunks_the_longest_wins() -> None:
    registry = ChunkRegistry()
    first, second = passages(2, seed=3)
    parent = f"{first}\n\n{second}"
    registry.register([first, parent, second])
    prompt = f"{second} | {parent} | {first}"
    assert texts_at(prompt, registry.find(prompt)) == [second, parent, first]


def test_a_chunk_that_stands_twice_is_found_twice() -> None:
    registry = registry_of([CLAUSE, CLAUSE])
    assert len(registry) == 1
    assert registry.find(CLAUSE + CLAUSE) == [TextSpan(0, len(CLAUSE)), TextSpan(len(CLAUSE), 2 * len(CLAUSE))]


def test_a_chunk_of_one_repeated_letter_is_found() -> None:
    registry = registry_of(["a" * 500])
    assert registry.find("b" * 77 + "a" * 500 + "b" * 700) == [TextSpan(77, 577)]
    assert registry.find("b" * 77 + "a" * 499 + "b" * 700) == []


@pytest.mark.parametrize(
    "text",
    [
        "\ud800 lone \udfff " * 8,
        "nul\x00\x00 inside " * 8,
        "line one\r\nline two\r\n" * 6 + "end",
        "👩‍👩‍👧‍👦🇩🇪é " * 12 + ".",
    ],
    ids=["surrogates", "nul", "crlf", "emoji"],
)
def test_unusual_characters_are_found_in_every_form(text: str) -> None:
    registry = ChunkRegistry()
    chunk = text.strip()
    assert registry.register([text]) == 1
    for form in forms(chunk):
        prompt = f"<<{form}>>"
        assert texts_at(prompt, registry.find(prompt)) == [form]
    assert registry.forget([text]) == 1
    assert registry.find(chunk) == []


def test_the_least_recently_used_chunk_goes_first() -> None:
    one, two, three, four, five = passages(5, seed=4)
    registry = ChunkRegistry(max_chunks=3)
    registry.register([one, two, three])
    registry.register([one])  # registering again is a use
    registry.register([four])
    assert [registry.contains(text) for text in (one, two, three, four)] == [True, False, True, True]
    assert registry.find(repr(three)) != []  # so is being found, in any form
    registry.register([five], namespace="other")  # the bound is over all namespaces
    assert [registry.contains(text) for text in (one, three, four)] == [False, True, True]
    assert len(registry) == 3
    prompt = f"{one} {two} {three}"
    assert texts_at(prompt, registry.find(prompt)) == [three]


def test_nothing_is_left_in_the_index_when_all_chunks_are_gone() -> None:
    registry = ChunkRegistry(max_chunks=50)
    texts = passages(200, seed=5) + [CLAUSE + str(number) for number in range(50)] + ["a" * n for n in range(64, 90)]
    registry.register(texts)
    assert len(registry) == 50
    assert registry.forget(texts) == 50
    assert (len(registry), registry._namespaces) == (0, {})


def test_planted_chunks_are_found_and_nothing_else() -> None:
    rng = random.Random(6)
    known = passages(1500, seed=7)
    known += [text[: len(text) // 2] for text in known[:200]]  # nested
    known += [text.replace(" ", "\n", 3) + ' "quoted"' for text in known[200:500]]  # near duplicates
    registry = registry_of(known)
    noise = passages(300, seed=8, low=1, high=40)
    for _ in range(150):
        parts = []
        for chunk in rng.sample(known, rng.randint(0, 8)):
            form = rng.choice(sorted(forms(chunk.strip())))
            parts += [form, rng.choice(["", "\n\n", rng.choice(noise), known[0][:50]])]
        prompt = "".join(parts)
        near = [chunk for chunk in known if chunk.strip()[:40] in prompt or repr(chunk.strip())[1:41] in prompt]
        assert registry.find(prompt) == longest_first(prompt, near)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_matches_are_what_an_exhaustive_search_finds(data: st.DataObject) -> None:
    piece = st.text(alphabet='ab\n"', min_size=1, max_size=6).map(lambda text: text * 30)
    chunks = data.draw(st.lists(st.lists(piece, min_size=1, max_size=3).map("".join), min_size=1, max_size=5))
    registry = registry_of(chunks)
    forgotten = data.draw(st.lists(st.sampled_from(chunks), max_size=2))
    registry.forget(forgotten)
    gone = {chunk.strip() for chunk in forgotten}
    kept = [chunk for chunk in chunks if chunk.strip() not in gone]
    parts = data.draw(
        st.lists(st.one_of(st.sampled_from(chunks), st.sampled_from(chunks).map(repr), piece), max_size=4)
    )
    prompt = "".join(parts)
    assert registry.find(prompt) == longest_first(prompt, kept)


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=MIN_CHARS, max_size=300), st.text(max_size=50), st.text(max_size=50))
def test_any_text_is_found_between_any_others(text: str, before: str, after: str) -> None:
    registry = registry_of([text])
    chunk, prompt = text.strip(), before + text + after
    spans = registry.find(prompt)
    assert bool(spans) == (len(chunk) >= MIN_CHARS)
    assert all(part in forms(chunk) for part in texts_at(prompt, spans))


def _boilerplate(count: int) -> list[str]:
    rng = random.Random(9)
    clauses = passages(4, seed=10, low=60, high=100)
    return [" ".join(rng.choices(clauses, k=rng.randint(2, 7))) + "." * (number % 37) for number in range(count)]


@pytest.mark.parametrize(
    ("known", "prompt"),
    [
        (["a" * length for length in range(MIN_CHARS, 1500)], "a" * 20_000),
        (["a" * length + "b" for length in range(MIN_CHARS, 1500)], "a" * 20_000),
        ([CLAUSE * 30 + "!" * length for length in range(1500)], CLAUSE * 200),
        (_boilerplate(3000), " ".join(_boilerplate(40))[:20_000]),
    ],
    ids=["one letter", "one letter but for the end", "one clause", "four clauses"],
)
def test_chunks_that_share_all_their_anchors_cost_bounded_work(known: list[str], prompt: str) -> None:
    registry = registry_of(known)
    counted = CountedPrompt(prompt)
    spans = registry.find(counted)
    assert set(texts_at(prompt, spans)) <= set(known)
    # 8 characters for probes and 512 for comparisons, per character of the prompt.
    assert counted.num_chars <= 520 * len(prompt) + max(map(len, known))
    assert len(registry._namespaces["default"].candidates(prompt)) <= len(prompt) // 16 + 2048


def test_versions_of_one_text_are_told_apart_with_little_work() -> None:
    registry = ChunkRegistry()
    before, after = passages(2, seed=11, low=80, high=90)
    versions = [f"{before} {number} {after}" for number in range(2000)]
    registry.register(versions)
    prompt = CountedPrompt(f"{versions[7]}\n\n{versions[1234]}\n\n{before}")
    assert texts_at(prompt, registry.find(prompt)) == [versions[7], versions[1234]]
    assert prompt.num_chars < 40 * len(prompt)


def test_a_shared_heading_is_not_what_chunks_are_found_by() -> None:
    registry = ChunkRegistry()
    heading = "Contract: Distribution Agreement between the parties named below\nSection: General terms\n\n"
    known = [heading + text for text in passages(1000, seed=12)]
    registry.register(known)
    prompt = CountedPrompt("\n\n".join(known[10:30]))
    assert texts_at(prompt, registry.find(prompt)) == known[10:30]
    assert prompt.num_chars < 20 * len(prompt)


def test_searches_and_changes_at_once_give_only_right_spans() -> None:
    registry = ChunkRegistry(max_chunks=60)
    texts = [text.replace(" ", "\n", 2) for text in passages(100, seed=13, high=60)]
    always = passages(3, seed=14)
    registry.register(always, "search")
    prompt = "\n\n".join([always[0], *texts[:10], always[1], repr(texts[11:15]), always[2]])
    problems: list[str] = []
    stop = threading.Event()

    def change(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            registry.register(rng.sample(texts, 10), "search")
            registry.register(always, "search")
            registry.forget(rng.sample(texts, 5), "search")

    threads = [threading.Thread(target=change, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    allowed = {form for text in texts + always for form in forms(text)}
    for _ in range(150):
        found = texts_at(prompt, registry.find(prompt, "search"))
        problems += [text for text in found if text not in allowed]
        problems += [text for text in always if text not in found]
    stop.set()
    for thread in threads:
        thread.join()
    assert (problems, len(registry) <= 60) == ([], True)


def test_pieces_are_those_of_the_chunks_that_were_registered_or_found_last() -> None:
    registry = ChunkRegistry()
    old, *rest = passages(RECENT_TEXTS + 1, seed=15, low=200, high=210)
    registry.register([old, *rest])

    def pieces(text: str, namespace: str = "default") -> list[str]:
        prompt = f"Context: {text[300:]}"
        return [span.text for span in registry.find_pieces(prompt, [(0, len(prompt))], namespace)]

    assert pieces(old) == []
    assert registry.find(old) != []
    assert (pieces(old), pieces(rest[0])) == ([old], [])
    registry.register([rest[0]])
    assert (pieces(rest[0]), pieces(rest[0], "other")) == ([rest[0]], [])
    registry.forget([rest[0]])
    assert pieces(rest[0]) == []
    registry.clear()
    assert pieces(old) == []


def test_the_piece_index_of_many_namespaces_stays_small() -> None:
    registry = ChunkRegistry()
    (chunk,) = passages(1, seed=16, low=200, high=210)
    names = [str(number) for number in range(PIECE_NAMESPACES + 3)]
    for _ in range(2):
        for name in names:
            registry.register([chunk], name)
            assert len(registry.find_pieces(chunk[:-1], [(0, len(chunk) - 1)], name)) == 1
    indexed = [name for name in names if registry._namespaces[name].pieces._kinds]
    assert indexed == names[-PIECE_NAMESPACES:]


def test_a_single_string_is_refused() -> None:
    registry = ChunkRegistry()
    with pytest.raises(ValueError, match=r"texts='The Supplier .*not one string"):
        registry.register(CLAUSE)
    with pytest.raises(ValueError, match="texts="):
        registry.forget(CLAUSE)


def test_a_registry_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="max_chunks=0: must be at least 1"):
        ChunkRegistry(max_chunks=0)
