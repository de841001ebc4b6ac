"""Every rule of the tuner on curves whose answer is known by hand."""

from __future__ import annotations

import pytest

from cachecraft_rag.evaluate.bootstrap import Interval, paired_difference
from cachecraft_rag.evaluate.curve import Curve, Point
from cachecraft_rag.evaluate.recommend import (
    largest_target,
    last_gain,
    quickest_chunk_size,
    smallest_ratio,
    smallest_window,
    surely_closer,
)

Figures = dict[str, float | tuple[float, float, float]]


def curve(points: dict[float, Figures], labels: tuple[str, ...] = ()) -> Curve:
    """A curve of exact figures, or of figures with their ends."""
    made = []
    for x, figures in points.items():
        intervals = {
            name: Interval(*value) if isinstance(value, tuple) else Interval(value, value, value)
            for name, value in figures.items()
        }
        made.append(Point(x, intervals))
    return Curve("test", "Test", "x", (), tuple(made), "by hand", labels)


# Divergences of 0.02, 0.04 and 0.09 in three questions with offset 0.5, of 0.01, 0.03 and 0.05 with 1.0: means 0.05 and
# 0.03, differences -0.01, -0.01 and -0.04. Their mean is -0.02; the mean of three drawn again is from -0.04 to -0.01.
CLOSER: dict[float, Figures] = {
    0.0: {"kl": (0.060, 0.030, 0.090), "kl_change": (0.010, -0.010, 0.020)},
    0.5: {"kl": (0.050, 0.020, 0.090)},
    1.0: {"kl": (0.030, 0.010, 0.050), "kl_change": (-0.020, -0.040, -0.010)},
}


def test_the_paired_interval_by_hand_is_the_one_that_is_drawn() -> None:
    change = paired_difference([0.01, 0.03, 0.05], [0.02, 0.04, 0.09])
    assert (change.value, change.low, change.high) == pytest.approx(CLOSER[1.0]["kl_change"])


def test_another_value_is_taken_where_the_paired_interval_is_below_0_though_the_means_overlap() -> None:
    choice = surely_closer(curve(CLOSER))
    assert choice.value == 1.0
    assert "-0.0200 [-0.0400, -0.0100]" in choice.why
    assert "that of 0.5" in choice.why


@pytest.mark.parametrize(
    "change",
    [
        (-0.02, -0.04, 0.00),  # the interval holds 0
        (-0.02, -0.04, 0.01),
        (0.02, 0.01, 0.04),  # surely further away
    ],
)
def test_the_value_that_is_set_stays_where_no_other_is_surely_closer(change: tuple[float, float, float]) -> None:
    choice = surely_closer(curve({**CLOSER, 1.0: {"kl": 0.05 + change[0], "kl_change": change}}))
    assert choice.value == 0.5
    assert "no other" in choice.why


def test_of_those_that_are_surely_closer_the_one_of_the_lowest_mean_is_taken() -> None:
    both: dict[float, Figures] = {**CLOSER, 0.0: {"kl": 0.031, "kl_change": (-0.019, -0.021, -0.018)}}
    assert surely_closer(curve(both)).value == 1.0
    both[0.0] = {"kl": 0.029, "kl_change": (-0.021, -0.022, -0.018)}
    assert surely_closer(curve(both)).value == 0.0
    both[0.0] = {"kl": 0.029, "kl_change": (-0.021, -0.090, 0.010)}  # lower, but perhaps by chance
    assert surely_closer(curve(both)).value == 1.0


def test_values_may_be_words() -> None:
    words = curve(dict(enumerate(CLOSER.values())), ("none", "passages", "prefix"))
    choice = surely_closer(words)
    assert (choice.value, words.label(choice.value), words.x_of("prefix")) == (2, "prefix", 2.0)
    assert "that of passages" in choice.why
    with pytest.raises(ValueError, match="must be one per point"):
        curve(CLOSER, ("none", "passages", "prefix"))


def test_there_is_exactly_one_value_to_compare_with() -> None:
    two: dict[float, Figures] = {0.5: CLOSER[0.5], 1.0: CLOSER[0.5]}
    for points in (two, {1.0: CLOSER[1.0]}):
        with pytest.raises(ValueError, match="exactly one is compared with"):
            surely_closer(curve(points))


RATIOS = curve(
    {
        0.0: {"kl": (0.20, 0.15, 0.25)},
        0.1: {"kl": (0.05, 0.03, 0.07)},
        0.2: {"kl": (0.03, 0.02, 0.05)},
        0.5: {"kl": (0.01, 0.00, 0.02)},
    }
)


@pytest.mark.parametrize(
    ("max_divergence", "ratio"),
    [(0.25, 0.0), (0.2499, 0.1), (0.07, 0.1), (0.06, 0.2), (0.05, 0.2), (0.02, 0.5), (0.019, 1.0)],
)
def test_the_ratio_is_the_smallest_whose_interval_is_below_the_limit(max_divergence: float, ratio: float) -> None:
    assert smallest_ratio(RATIOS, max_divergence).value == ratio


def test_a_ratio_whose_mean_alone_is_below_the_limit_is_not_enough() -> None:
    choice = smallest_ratio(RATIOS, 0.06)  # at 0.1 the mean is 0.05, but it may be 0.07
    assert "0.0300 [0.0200, 0.0500]" in choice.why
    assert "computes everything" in smallest_ratio(RATIOS, 0.001).why


TARGETS = curve(
    {
        0.03: {"kl": (0.02, 0.01, 0.03), "charged": 0.30},
        0.06: {"kl": (0.04, 0.03, 0.06), "charged": 0.20},
        0.12: {"kl": (0.07, 0.05, 0.10), "charged": 0.10},
    }
)


def test_the_target_is_the_largest_that_keeps_the_limit_and_computes_less_than_the_ratio() -> None:
    choice = largest_target(TARGETS, 0.06, charged=0.25)
    assert choice is not None
    assert choice.value == 0.06
    assert "0.0400 [0.0300, 0.0600]" in choice.why
    for max_divergence in (0.10, 0.2):
        choice = largest_target(TARGETS, max_divergence, charged=0.25)
        assert choice is not None
        assert choice.value == 0.12


@pytest.mark.parametrize(("max_divergence", "charged"), [(0.06, 0.20), (0.06, 0.15), (0.03, 0.25), (0.029, 0.9)])
def test_there_is_no_target_that_computes_as_much_as_the_ratio_or_misses_the_limit(
    max_divergence: float, charged: float
) -> None:
    assert largest_target(TARGETS, max_divergence, charged) is None


SIZES: dict[float, Figures] = {
    256: {"kl": (0.040, 0.030, 0.050), "ttft_s": 2.0},
    512: {"kl": (0.050, 0.040, 0.060), "ttft_s": 1.5},
    768: {"kl": (0.051, 0.040, 0.070), "ttft_s": 1.2},
    1024: {"kl": (0.080, 0.070, 0.090), "ttft_s": 1.0},
}


def test_the_chunk_size_is_the_quickest_of_those_within_the_interval_of_the_best() -> None:
    choice = quickest_chunk_size(curve(SIZES), current=768)
    assert choice.value == 512  # 768 is quicker, but 0.051 is above 0.050, the end of the best one's interval
    assert "256, 512" in choice.why
    assert "0.0400 [0.0300, 0.0500]" in choice.why


def test_the_best_chunk_size_may_be_the_quickest() -> None:
    wide: dict[float, Figures] = {**SIZES, 256: {"kl": (0.040, 0.030, 0.090), "ttft_s": 0.5}}
    assert quickest_chunk_size(curve(wide), current=768).value == 256
    alone: dict[float, Figures] = {**SIZES, 256: {"kl": (0.020, 0.010, 0.030), "ttft_s": 2.0}}
    choice = quickest_chunk_size(curve(alone), current=768)
    assert choice.value == 256
    assert "no other size" in choice.why
    wide[256]["ttft_s"] = 2.0
    assert quickest_chunk_size(curve(wide), current=768).value == 1024


def test_of_chunk_sizes_that_are_the_same_the_current_one_stays() -> None:
    same = curve({size: {"kl": (0.04, 0.03, 0.05), "ttft_s": 1.0} for size in (256, 512, 768, 1024)})
    assert quickest_chunk_size(same, current=512).value == 512
    assert "short" in quickest_chunk_size(same, current=512).why
    assert quickest_chunk_size(same, current=600).value == 1024


@pytest.mark.parametrize(
    ("rates", "share"),
    [
        ((0.50, 0.55, 0.60, 0.60, 0.59), 0.4),  # the last step that gains
        ((0.50, 0.505, 0.509, 0.509, 0.509), 0.0),  # less than a point in all
        ((0.50, 0.505, 0.511, 0.520, 0.5205), 0.4),  # a point over what was taken, in two steps; then less than one
        ((0.50, 0.45, 0.52, 0.40, 0.30), 0.4),  # over every smaller share
        ((0.60, 0.50, 0.50, 0.50, 0.50), 0.0),
        ((0.10, 0.20, 0.30, 0.40, 0.50), 1.0),
    ],
)
def test_the_hot_share_is_the_largest_that_still_gains_a_point(rates: tuple[float, ...], share: float) -> None:
    shares = (0.0, 0.2, 0.4, 0.6, 1.0)
    points: dict[float, Figures] = {x: {"hit_rate": rate} for x, rate in zip(shares, rates, strict=True)}
    assert last_gain(curve(points)).value == share


@pytest.mark.parametrize(
    ("times", "first_token", "window"),
    [
        ((1.0, 0.5, 0.21, 0.20, 0.20), 1.0, 2),  # 0.21 is 5 % above 0.20
        ((1.0, 0.5, 0.22, 0.20, 0.20), 1.0, 3),  # 0.22 is more than that, and than 1 % of the first token
        ((1.0, 0.5, 0.22, 0.20, 0.20), 3.0, 2),  # 1 % of the first token is 0.03
        ((0.1, 0.2, 0.30, 0.40, 0.50), 1.0, 0),
        ((0.9, 0.8, 0.70, 0.60, 0.50), 1.0, 4),
    ],
)
def test_the_window_is_the_smallest_that_loads_as_quickly_as_the_best(
    times: tuple[float, ...], first_token: float, window: int
) -> None:
    points: dict[float, Figures] = {x: {"load_s": time, "ttft_s": first_token} for x, time in enumerate(times)}
    assert smallest_window(curve(points)).value == window


def test_a_window_within_the_interval_of_the_best_is_as_good() -> None:
    points: dict[float, Figures] = {
        0: {"load_s": (0.50, 0.40, 0.60), "ttft_s": 1.0},
        1: {"load_s": (0.30, 0.20, 0.40), "ttft_s": 1.0},
        2: {"load_s": (0.20, 0.10, 0.30), "ttft_s": 1.0},
    }
    assert smallest_window(curve(points)).value == 1


def test_a_curve_has_points_by_rising_x() -> None:
    point = Point(1.0, {})
    for points in ((), (point, point), (Point(2.0, {}), point)):
        with pytest.raises(ValueError, match="rising x"):
            Curve("test", "Test", "x", (), points, "")
