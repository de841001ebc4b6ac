"""Variants of a chunk: which is used, which is exact, and which go."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.keys import context_hash
from cachecraft_rag.variants import Prefix, VariantInfo, choose_variant, which_to_drop

CHUNKS = st.lists(st.sampled_from("abcde"), max_size=5)


def behind(chunks: str, text: str = "") -> Prefix:
    """The prefix of these chunks; ``text`` stands for the tokens around them."""
    return Prefix(tuple(chunks), context_hash([ord(letter) for letter in f"{text}|{chunks}"]))


def variant(
    chunks: str, inter: tuple[float, ...] = (), *, ratio: float = 0.0, is_exact: bool = True, text: str = ""
) -> VariantInfo:
    """A variant of 100 tokens made behind some chunks; ``ratio`` is a-bar / b-bar."""
    return VariantInfo(behind(chunks, text), inter or (1.0,) * len(chunks), ratio, 1.0, 100, is_exact)


@st.composite
def variants(draw: st.DrawFn) -> VariantInfo:
    chunks = draw(CHUNKS)
    inter = draw(st.lists(st.floats(0, 1e4), min_size=len(chunks), max_size=len(chunks)))
    a_bar, b_bar = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    prefix = behind("".join(chunks), draw(st.sampled_from(["", "other text"])))
    return VariantInfo(prefix, tuple(inter), a_bar, b_bar, draw(st.integers(1, 5000)), draw(st.booleans()))


PREFIXES = st.builds(lambda chunks, text: behind("".join(chunks), text), CHUNKS, st.sampled_from(["", "other text"]))
ALPHAS = st.floats(0.01, 3)


def test_without_candidates_there_is_no_choice() -> None:
    assert choose_variant([], behind("ab"), 1.0) is None


def test_an_exact_match_needs_no_recompute_and_wins() -> None:
    candidates = [VariantInfo.alone(context_hash([]), 100), variant("b"), variant("ab", ratio=3.0), variant("a")]
    assert choose_variant(candidates, behind("ab"), 1.0) == (2, 0.0)


def test_the_same_chunks_with_other_text_around_them_are_no_exact_match() -> None:
    made = variant("ab", text="system A")
    assert not made.is_exact_behind(behind("ab", "system B"))
    assert made.overhead(behind("ab", "system B"), 1.0) == pytest.approx(0.5 / 3)


def test_approximate_kv_is_never_exact_and_never_cheaper_than_kv_made_alone() -> None:
    approximate = variant("ab", is_exact=False)
    alone = VariantInfo.alone(context_hash([1]), 100)
    assert not approximate.is_exact_behind(behind("ab"))
    assert approximate.overhead(behind("ab"), 0.4) == pytest.approx(0.2)
    assert choose_variant([approximate, alone], behind("ab"), 0.4) == (1, 0.2)


def test_approximate_kv_is_used_when_there_is_nothing_better() -> None:
    candidates = [variant("xyz", ratio=4.0), variant("ab", is_exact=False)]
    assert choose_variant(candidates, behind("ab"), 1.0) == (1, 0.5)


def test_kv_made_alone_costs_half_of_alpha_behind_anything_else() -> None:
    alone = VariantInfo.alone(context_hash([1, 2]), 100)
    for prefix in (behind(""), behind("a"), behind("abcd")):
        assert alone.overhead(prefix, 0.3) == pytest.approx(0.15)
    assert alone.overhead(Prefix((), context_hash([1, 2])), 0.3) == 0.0


@pytest.mark.parametrize(
    ("old", "inter", "ratio", "new", "expected"),
    [
        # beta = 3/4, gamma = 0, CCI = 0.75: 0.75 * 0.25; the floor is 0.5 * (1 - 1/3), higher.
        ("ab", (3.0, 1.0), math.log(3), "ax", 0.5 * 2 / 3),
        # beta = 1/4: 0.75 * 0.75.
        ("ab", (1.0, 3.0), math.log(3), "ax", 0.5625),
        # beta = 1, gamma = 1: 0.75.
        ("ab", (1.0, 3.0), math.log(3), "ba", 0.75),
        # beta = 1, gamma = 1/3: 0.75 / 3; the floor is 0.5 * (1 - 3/4).
        ("abc", (1.0, 1.0, 1.0), math.log(3), "acb", 0.25),
        # Nothing in common.
        ("ab", (1.0, 3.0), math.log(3), "xy", 0.75),
        # Nothing has gone, two are new: the floor alone, 0.5 * (1 - 1/4).
        ("a", (1.0,), math.log(3), "abc", 0.375),
        # A chunk that occurs twice was seen once.
        ("a", (1.0,), math.log(3), "aa", 0.5 * 2 / 3),
    ],
)
def test_the_overhead_follows_the_formula_down_to_the_floor(
    old: str, inter: tuple[float, ...], ratio: float, new: str, expected: float
) -> None:
    made = variant(old, inter, ratio=ratio)
    assert made.overhead(behind(new), 1.0) == pytest.approx(expected)
    assert made.overhead(behind(new), 0.2) == pytest.approx(0.2 * expected)


def test_the_variant_that_saw_more_of_the_prefix_is_preferred_to_one_that_merely_lost_nothing() -> None:
    candidates = [variant("a"), variant("abcx", (5.0, 5.0, 5.0, 1.0))]
    chosen = choose_variant(candidates, behind("abcd"), 1.0)
    assert chosen is not None
    assert chosen[0] == 1


def test_with_alpha_zero_an_exact_match_still_goes_first() -> None:
    candidates = [variant("x", is_exact=False), variant("b"), variant("ab")]
    assert choose_variant(candidates, behind("ab"), 0.0) == (2, 0.0)


@given(candidates=st.lists(variants(), max_size=6), prefix=PREFIXES, alpha=ALPHAS)
def test_the_choice_has_the_lowest_overhead(candidates: list[VariantInfo], prefix: Prefix, alpha: float) -> None:
    chosen = choose_variant(candidates, prefix, alpha)
    if not candidates:
        assert chosen is None
        return
    assert chosen is not None
    index, overhead = chosen
    assert overhead == candidates[index].overhead(prefix, alpha)
    assert overhead == min(info.overhead(prefix, alpha) for info in candidates)
    if any(info.is_exact_behind(prefix) for info in candidates):
        assert candidates[index].is_exact_behind(prefix)


@given(info=variants(), prefix=PREFIXES, alpha=ALPHAS)
def test_no_recompute_means_exact_and_the_other_way_round(info: VariantInfo, prefix: Prefix, alpha: float) -> None:
    overhead = info.overhead(prefix, alpha)
    assert 0.0 <= overhead <= 1.0
    assert (overhead == 0.0) == info.is_exact_behind(prefix)


@given(candidates=st.lists(variants(), min_size=1, max_size=6), prefix=PREFIXES, alpha=ALPHAS)
def test_approximate_kv_never_wins_over_kv_made_alone(
    candidates: list[VariantInfo], prefix: Prefix, alpha: float
) -> None:
    candidates = [*candidates, VariantInfo.alone(context_hash([7]), 100)]
    chosen = choose_variant(candidates, prefix, alpha)
    assert chosen is not None
    assert candidates[chosen[0]].is_exact


def test_the_record_gives_the_figures_of_the_formulas() -> None:
    info = VariantInfo.recorded(
        behind("ab"), [2, 3], inter=[[8.0, 6.0], [4.0, 0.0]], intra=[8.0, 8.0], num_tokens=4, is_exact=True
    )
    assert info.inter == (12.0, 6.0)
    assert [info.a_bar, info.b_bar] == pytest.approx([1.0, 0.5])
    assert info.cci == pytest.approx(1 / (1 + math.exp(-2)))
    assert info.is_exact_behind(behind("ab"))


def test_a_record_behind_nothing_equals_kv_made_alone() -> None:
    info = VariantInfo.recorded(behind(""), [], inter=[[], []], intra=[1.0, 2.0], num_tokens=4, is_exact=True)
    assert info == replace(VariantInfo.alone(behind("").context, 4), b_bar=info.b_bar)


@given(info=variants())
def test_json_keeps_every_bit(info: VariantInfo) -> None:
    assert VariantInfo.from_json(info.to_json()) == info


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_exact", "false"),
        ("is_exact", 1),
        ("is_exact", None),
        ("num_tokens", 0),
        ("num_tokens", 1.5),
        ("a_bar", -1.0),
        ("b_bar", None),
        ("inter", [1.0]),
        ("inter", [1.0, -1.0]),
        ("prefix", ["a", "b"]),
        ("prefix", {"chunks": "ab", "context": "c"}),
        ("prefix", {"chunks": ["a", "b"]}),
        ("another", 1),
    ],
)
def test_damaged_json_is_refused(field: str, value: object) -> None:
    fields = json.loads(variant("ab").to_json()) | {field: value}
    with pytest.raises(ValueError, match=field):
        VariantInfo.from_json(json.dumps(fields))


@pytest.mark.parametrize("field", ["prefix", "inter", "a_bar", "b_bar", "num_tokens", "is_exact"])
def test_json_without_a_field_is_refused(field: str) -> None:
    fields = json.loads(variant("ab").to_json())
    del fields[field]
    with pytest.raises(ValueError, match=field):
        VariantInfo.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "1"])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="VariantInfo"):
        VariantInfo.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inter": (1.0,)}, "inter: 1 figures"),
        ({"inter": (1.0, math.nan)}, "inter: nan"),
        ({"a_bar": math.inf}, "a_bar: inf"),
        ({"b_bar": -0.5}, "b_bar: -0.5"),
        ({"num_tokens": 0}, "num_tokens: 0"),
    ],
)
def test_impossible_figures_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(variant("ab"), **change)


def test_those_that_save_least_go() -> None:
    # CCI 0.5, 0.75 and 0.75: 100 tokens * (0.5, 0.25, 0.25) * uses = 100, 125, 75.
    candidates = [variant("a"), variant("b", ratio=math.log(3)), variant("c", ratio=math.log(3))]
    uses = [2, 5, 3]
    assert which_to_drop(candidates, uses, 3, 1.0) == []
    assert which_to_drop(candidates, uses, 2, 1.0) == [2]
    assert which_to_drop(candidates, uses, 1, 1.0) == [0, 2]
    assert which_to_drop(candidates, uses, 0, 1.0) == [0, 1, 2]


def test_of_equal_savings_approximate_kv_goes_first_then_high_impact_then_the_oldest() -> None:
    candidates = [
        VariantInfo.alone(context_hash([]), 100),
        variant("a", ratio=0.5),
        variant("b", ratio=2.0),
        variant("c", ratio=0.5),
        variant("d", is_exact=False),
    ]
    drops = [which_to_drop(candidates, [0] * 5, limit, 1.0) for limit in (4, 3, 2, 1)]
    assert drops == [[4], [2, 4], [1, 2, 4], [1, 2, 3, 4]]


@given(
    used=st.lists(st.tuples(variants(), st.floats(0, 1e3)), max_size=6),
    limit=st.integers(0, 7),
    alpha=st.floats(0, 3),
)
def test_at_most_the_limit_stays(used: list[tuple[VariantInfo, float]], limit: int, alpha: float) -> None:
    dropped = which_to_drop([info for info, _ in used], [uses for _, uses in used], limit, alpha)
    assert dropped == sorted(set(dropped))
    assert len(used) - len(dropped) == min(len(used), limit)
    assert set(dropped) <= set(range(len(used)))


@pytest.mark.parametrize(
    ("uses", "limit", "message"),
    [([1], 1, "uses: 1 figures"), ([1, -1], 1, "uses: -1"), ([1, 1], -1, "limit: -1")],
)
def test_bad_arguments_are_named(uses: list[float], limit: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        which_to_drop([variant("a"), variant("b")], uses, limit, 1.0)
