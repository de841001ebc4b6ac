"""Means with confidence intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cachecraft_rag.evaluate import Interval, bootstrap_mean, bootstrap_median, paired_difference, paired_ratio
from cachecraft_rag.evaluate.bootstrap import predicted_mean


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert bootstrap_mean([0.5] * 7) == Interval(0.5, 0.5, 0.5)


def test_two_values_span_all_that_can_be_drawn() -> None:
    # Of 0 and 1 the means 0, 0.5 and 1 are drawn with probabilities 1/4, 1/2, 1/4: the 2.5 % quantile is 0.
    assert bootstrap_mean([0.0, 1.0]) == Interval(0.5, 0.0, 1.0)
    assert bootstrap_mean([0.0, 1.0], confidence=0.3) == Interval(0.5, 0.5, 0.5)


def test_the_width_is_that_of_the_normal_distribution_for_many_values() -> None:
    values = np.random.default_rng(3).normal(2.0, 1.5, 900)
    found = bootstrap_mean(list(values), samples=4000)
    half = 1.96 * values.std() / math.sqrt(900)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.value == pytest.approx(half, rel=0.1)
    assert found.value - found.low == pytest.approx(half, rel=0.1)


def test_an_interval_of_more_confidence_is_wider() -> None:
    values = [float(number) for number in range(30)]
    narrow, wide = bootstrap_mean(values, confidence=0.5), bootstrap_mean(values, confidence=0.99)
    assert wide.low < narrow.low < 14.5 < narrow.high < wide.high


def test_the_mean_of_as_many_others_lies_below_its_upper_end_as_often_as_promised() -> None:
    draw = np.random.default_rng(0)
    samples = draw.gamma(1.0, size=(400, 2, 40))
    bounds = [predicted_mean(ours, confidence=0.8, samples=400).high for ours, _ in samples]
    kept = [new.mean() <= bound for (_, new), bound in zip(samples, bounds, strict=True)]
    assert 0.86 <= np.mean(kept) <= 0.94  # a bound on the true mean alone is kept by 0.81 of the others


def test_a_prediction_is_as_wide_as_two_samples_make_it() -> None:
    values = np.random.default_rng(0).normal(3.0, 1.0, 400)
    width = predicted_mean(values).high - predicted_mean(values).low
    assert predicted_mean(values).value == pytest.approx(values.mean())
    assert width == pytest.approx(2 * 1.96 * np.sqrt(2 / 400), rel=0.1)
    assert predicted_mean([2.0, 2.0, 2.0]).high == 2.0


def test_the_seed_decides_what_is_drawn() -> None:
    values = list(np.random.default_rng(1).random(40))
    assert bootstrap_mean(values, seed=4) == bootstrap_mean(values, seed=4)
    assert bootstrap_mean(values, seed=4) != bootstrap_mean(values, seed=5)


def test_many_values_are_drawn_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    values = list(np.random.default_rng(1).random(50))
    expected = bootstrap_mean(values)
    monkeypatch.setattr("cachecraft_rag.evaluate.bootstrap._DRAWN_AT_ONCE", 120)
    assert bootstrap_mean(values) == expected


def test_a_difference_common_to_all_pairs_is_certain_however_much_they_vary() -> None:
    a = [0.5, 10.5, -3.5, 100.5]
    b = [0.25, 10.25, -3.75, 100.25]
    assert paired_difference(a, b) == Interval(0.25, 0.25, 0.25)
    assert paired_difference(b, a).value == -0.25


def test_a_difference_is_drawn_from_pairs() -> None:
    assert paired_difference([1.0, 2.0], [1.0, 1.0]) == Interval(0.5, 0.0, 1.0)


def test_a_median_is_that_of_the_values_and_so_are_the_ends_of_its_interval() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 1000.0]
    found = bootstrap_median(values)
    assert found.value == 3.0
    assert {found.low, found.high} <= set(values)
    assert found.low < 3.0 < found.high
    assert bootstrap_median([0.5] * 7) == Interval(0.5, 0.5, 0.5)


def test_a_ratio_common_to_all_pairs_is_certain_however_much_they_vary() -> None:
    b = [0.5, 10.5, 3.5, 100.5]
    a = [value / 4 for value in b]
    assert paired_ratio(a, b) == Interval(0.25, 0.25, 0.25)
    assert paired_ratio(a, b, "median") == Interval(0.25, 0.25, 0.25)


def test_a_ratio_is_that_of_the_means_or_medians_and_not_the_mean_of_ratios() -> None:
    a, b = [1.0, 2.0, 9.0], [2.0, 1.0, 1.0]
    assert paired_ratio(a, b).value == pytest.approx(3.0)
    assert paired_ratio(a, b, "median").value == pytest.approx(2.0)


def test_samples_without_a_ratio_are_left_out_and_infinite_ones_count() -> None:
    # Of (0, 0) and (1, 1), samples of the first alone say nothing; the others all give 1.
    assert paired_ratio([0.0, 1.0], [0.0, 1.0]) == Interval(1.0, 1.0, 1.0)
    # Of (1, 0) and (1, 1), samples of the first alone are infinite: a quarter of all.
    assert paired_ratio([1.0, 1.0], [0.0, 1.0]) == Interval(2.0, 1.0, math.inf)


def test_there_is_no_ratio_to_nothing() -> None:
    with pytest.raises(ValueError, match="b: its mean is 0"):
        paired_ratio([1.0, 2.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="b: its median is 0"):
        paired_ratio([1.0, 2.0, 3.0], [0.0, 0.0, 3.0], "median")
    with pytest.raises(ValueError, match="b: 1 values don't pair with 2"):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="a: "):
        paired_ratio([math.nan], [1.0])


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([], {}, "values"),
        ([1.0, math.nan], {}, "values"),
        ([1.0], {"confidence": 1.0}, "confidence"),
        ([1.0], {"confidence": 0.0}, "confidence"),
        ([1.0], {"samples": 0}, "samples"),
    ],
)
def test_useless_arguments_are_refused_by_name(values: list[float], options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_mean(values, **options)  # type: ignore[arg-type]


def test_values_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="b: 1 values don't pair with 2"):
        paired_difference([1.0, 2.0], [1.0])


def test_an_interval_shows_its_ends_in_the_format_that_is_asked_for() -> None:
    interval = Interval(0.5, 0.25, 0.123456)
    assert f"{interval}" == "0.5 [0.25, 0.1235]"
    assert f"{interval:.2f}" == "0.50 [0.25, 0.12]"
