"""Cache-Craft's formulas, against values computed by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachecraft_rag import cfo
from cachecraft_rag.cfo import (
    adjusted_overlap,
    cache_fix_overhead,
    chunk_context_impact,
    mean_inter,
    mean_intra,
    num_to_recompute,
    order_penalty,
    prefix_overlap,
)

ATTENTION = st.floats(0, 1e6)
SHARES = st.floats(0, 1)
CHUNKS = st.lists(st.sampled_from("abcdefg"), max_size=8)
DISTINCT = st.lists(st.sampled_from("abcdefg"), max_size=7, unique=True)


def test_attention_to_preceding_chunks_is_averaged_over_pairs_and_layers() -> None:
    # Layer 0: 8/(4*2) + 6/(4*3) = 1.5; layer 1: 4/(4*2) + 0 = 0.5.
    assert mean_inter([[8.0, 6.0], [4.0, 0.0]], lengths=[2, 3], num_tokens=4) == pytest.approx(1.0)


def test_a_chunk_behind_nothing_paid_no_attention_outside() -> None:
    assert mean_inter([[], []], lengths=[], num_tokens=4) == 0.0


def test_attention_inside_is_averaged_over_pairs_and_layers() -> None:
    assert mean_intra([8.0, 4.0], num_tokens=4) == pytest.approx((8 / 16 + 4 / 16) / 2)


@pytest.mark.parametrize(
    ("a_bar", "b_bar", "expected"),
    [
        (0.0, 1.0, 0.5),
        (0.0, 0.0, 0.5),
        (1.0, 1.0, 0.7310585786300049),
        (0.2, 0.1, 0.8807970779778823),
        (math.log(3.0), 1.0, 0.75),
        (1.0, 0.0, math.nextafter(1.0, 0.0)),
        (1e308, 1e-308, math.nextafter(1.0, 0.0)),
    ],
)
def test_context_impact_is_the_sigmoid_of_the_ratio(a_bar: float, b_bar: float, expected: float) -> None:
    assert chunk_context_impact(a_bar, b_bar) == pytest.approx(expected, abs=1e-15)


@given(a_bar=ATTENTION, b_bar=ATTENTION)
@example(a_bar=1.0, b_bar=0.0)
@example(a_bar=1e6, b_bar=5e-324)
@example(a_bar=5e-324, b_bar=1e6)
def test_context_impact_lies_from_one_half_to_below_one(a_bar: float, b_bar: float) -> None:
    assert 0.5 <= chunk_context_impact(a_bar, b_bar) < 1.0


@given(a_bar=ATTENTION, more=ATTENTION, b_bar=ATTENTION)
def test_more_attention_outside_never_lowers_the_context_impact(a_bar: float, more: float, b_bar: float) -> None:
    assert chunk_context_impact(a_bar + more, b_bar) >= chunk_context_impact(a_bar, b_bar)


@pytest.mark.parametrize(
    ("old", "new", "inter", "expected"),
    [
        ("abc", "abc", [1.0, 2.0, 5.0], 1.0),
        ("abc", "cba", [1.0, 2.0, 5.0], 1.0),
        ("abc", "ac", [1.0, 2.0, 5.0], 0.75),
        ("abc", "xbyz", [1.0, 2.0, 5.0], 0.25),
        ("abc", "xyz", [1.0, 2.0, 5.0], 0.0),
        ("abc", "", [1.0, 2.0, 5.0], 0.0),
        ("a", "ab", [3.0], 1.0),
        ("aa", "a", [3.0, 1.0], 0.75),
        ("", "ab", [], 1.0),
        ("", "", [], 1.0),
        ("ab", "xy", [0.0, 0.0], 1.0),
    ],
)
def test_the_overlap_is_the_share_of_attention_to_chunks_that_are_still_there(
    old: str, new: str, inter: list[float], expected: float
) -> None:
    assert prefix_overlap(old, new, inter) == pytest.approx(expected)


@given(old=CHUNKS, new=CHUNKS, data=st.data())
def test_the_overlap_is_a_share(old: list[str], new: list[str], data: st.DataObject) -> None:
    inter = data.draw(st.lists(ATTENTION, min_size=len(old), max_size=len(old)))
    assert 0.0 <= prefix_overlap(old, new, inter) <= 1.0
    assert prefix_overlap(old, old[::-1], inter) == 1.0


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("abcd", "abcd", 0.0),
        ("abcd", "dcba", 1.0),
        ("abc", "acb", 1 / 3),
        ("abc", "cab", 2 / 3),
        ("abcd", "badc", 2 / 6),
        ("axbyc", "cqba", 1.0),
        ("ab", "ba", 1.0),
        ("ab", "bx", 0.0),
        ("a", "a", 0.0),
        ("", "abc", 0.0),
        ("aab", "baa", 2 / 3),
        ("aa", "aa", 0.0),
        ("aab", "ab", 0.0),
    ],
)
def test_the_order_penalty_is_the_share_of_swapped_pairs(old: str, new: str, expected: float) -> None:
    assert order_penalty(old, new) == pytest.approx(expected)


@given(old=CHUNKS, new=CHUNKS)
def test_the_order_penalty_is_symmetric_and_a_share(old: list[str], new: list[str]) -> None:
    assert order_penalty(old, new) == order_penalty(new, old)
    assert 0.0 <= order_penalty(old, new) <= 1.0


@given(chunks=CHUNKS)
def test_the_same_order_has_no_penalty(chunks: list[str]) -> None:
    assert order_penalty(chunks, chunks) == 0.0


@given(chunks=DISTINCT)
def test_the_reverse_order_has_the_full_penalty(chunks: list[str]) -> None:
    assert order_penalty(chunks, chunks[::-1]) == (1.0 if len(chunks) > 1 else 0.0)


def test_the_order_penalty_lowers_the_overlap() -> None:
    assert adjusted_overlap(0.8, 0.25) == pytest.approx(0.6)
    assert adjusted_overlap(1.0, 0.0) == 1.0
    assert adjusted_overlap(1.0, 1.0) == 0.0


@pytest.mark.parametrize(
    ("alpha", "cci", "beta_prime", "expected"),
    [
        (1.0, 0.5, 0.0, 0.5),
        (1.0, 0.8, 0.75, 0.2),
        (0.5, 0.6, 0.5, 0.15),
        (2.0, 0.75, 0.0, 1.0),
        (0.0, 0.9, 0.0, 0.0),
        (3.0, 0.9, 1.0, 0.0),
    ],
)
def test_the_overhead_is_alpha_times_impact_times_what_is_gone(
    alpha: float, cci: float, beta_prime: float, expected: float
) -> None:
    assert cache_fix_overhead(alpha, cci, beta_prime) == pytest.approx(expected, abs=1e-15)


@given(alpha=st.floats(0, 1e308), cci=SHARES, beta_prime=SHARES)
def test_the_overhead_is_a_share(alpha: float, cci: float, beta_prime: float) -> None:
    assert 0.0 <= cache_fix_overhead(alpha, cci, beta_prime) <= 1.0


@given(alpha=st.floats(0, 100), cci=SHARES, num_tokens=st.integers(0, 10**6))
def test_a_whole_overlap_means_that_nothing_is_recomputed(alpha: float, cci: float, num_tokens: int) -> None:
    assert num_to_recompute(cache_fix_overhead(alpha, cci, 1.0), num_tokens) == 0


@pytest.mark.parametrize(
    ("overhead", "num_tokens", "expected"),
    [
        (0.0, 512, 0),
        (1.0, 512, 512),
        (0.5, 5, 3),
        (0.07, 100, 7),
        (0.29, 100, 29),
        (0.1, 1000, 100),
        (0.1 + 0.2, 10, 3),
        (0.301, 10, 4),
        (5e-324, 10, 1),
        (0.7, 0, 0),
    ],
)
def test_the_number_of_tokens_is_rounded_up_but_not_by_noise(overhead: float, num_tokens: int, expected: int) -> None:
    assert num_to_recompute(overhead, num_tokens) == expected


@given(overhead=SHARES, num_tokens=st.integers(0, 10**5))
def test_the_number_of_tokens_is_the_least_that_covers_the_share(overhead: float, num_tokens: int) -> None:
    number, share = num_to_recompute(overhead, num_tokens), Fraction(overhead) * num_tokens
    assert 0 <= number <= num_tokens
    assert share * Fraction(1 - 1e-8) <= number < share + 1


@given(wanted=st.integers(0, 4096), num_tokens=st.integers(1, 4096))
def test_a_share_that_is_a_whole_number_of_tokens_gives_that_number(wanted: int, num_tokens: int) -> None:
    wanted = min(wanted, num_tokens)
    assert num_to_recompute(wanted / num_tokens, num_tokens) == wanted


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("mean_inter", ([], [], 4), "inter: "),
        ("mean_inter", ([[1.0]], [], 4), "inter: a layer has 1 figures"),
        ("mean_inter", ([[1.0]], [0], 4), "lengths: 0"),
        ("mean_inter", ([[1.0]], [3], 0), "num_tokens: 0"),
        ("mean_inter", ([[-1.0]], [3], 4), "inter: -1.0"),
        ("mean_intra", ([], 4), "intra: "),
        ("mean_intra", ([math.nan], 4), "intra: nan"),
        ("mean_intra", ([1.0], -1), "num_tokens: -1"),
        ("chunk_context_impact", (-0.1, 1.0), "a_bar: -0.1"),
        ("chunk_context_impact", (1.0, math.inf), "b_bar: inf"),
        ("prefix_overlap", ("ab", "ab", [1.0]), "inter: 1 figures"),
        ("prefix_overlap", ("a", "a", [math.inf]), "inter: inf"),
        ("adjusted_overlap", (1.1, 0.0), "beta: 1.1"),
        ("adjusted_overlap", (0.5, -0.1), "gamma: -0.1"),
        ("cache_fix_overhead", (-1.0, 0.5, 0.5), "alpha: -1.0"),
        ("cache_fix_overhead", (math.nan, 0.5, 0.5), "alpha: nan"),
        ("cache_fix_overhead", (1.0, 1.5, 0.5), "cci: 1.5"),
        ("cache_fix_overhead", (1.0, 0.5, math.nan), "beta_prime: nan"),
        ("num_to_recompute", (1.5, 10), "cfo: 1.5"),
        ("num_to_recompute", (0.5, -1), "num_tokens: -1"),
    ],
)
def test_bad_arguments_are_named(name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(cfo, name)(*arguments)
