"""Plans: what happens to every chunk, and how many tokens may be recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.plan import Action, PlannedChunk, RequestPlan, make_plan

REUSE, ENCODE, PREFILL = Action.REUSE, Action.ENCODE, Action.PREFILL


@dataclass(frozen=True)
class Case:
    """A prompt, and everything its plan must say."""

    name: str
    num_tokens: int
    spans: tuple[tuple[int, int], ...] = ()
    stored: tuple[bool, ...] = ()
    exact: tuple[bool, ...] = ()
    ratio: float = 0.15
    actions: tuple[Action, ...] = ()
    free: tuple[tuple[int, int], ...] = ()
    question: tuple[int, int] = (0, 0)
    candidates: int = 0
    budget: int = 0
    leading_exact: int = 0


CASES = (
    Case("no chunks", 10, free=((0, 10),), question=(0, 10), leading_exact=10),
    Case("one token", 1, free=((0, 1),), question=(0, 1), leading_exact=1),
    Case(
        "gaps before, between and after",
        100,
        ((10, 30), (40, 60)),
        (True, True),
        (False, False),
        actions=(REUSE, REUSE),
        free=((0, 10), (30, 40), (60, 100)),
        question=(60, 100),
        candidates=40,
        budget=6,
        leading_exact=10,
    ),
    Case(
        "adjacent chunks",
        50,
        ((0, 20), (20, 40)),
        (True, False),
        (False, False),
        actions=(REUSE, ENCODE),
        free=((40, 50),),
        question=(40, 50),
        candidates=40,
        budget=6,
        leading_exact=0,
    ),
    Case(
        "a chunk at the end of the prompt: its last token is computed anyway",
        50,
        ((10, 50),),
        (True,),
        (False,),
        ratio=1.0,
        actions=(REUSE,),
        free=((0, 10), (49, 50)),
        question=(49, 50),
        candidates=39,
        budget=39,
        leading_exact=10,
    ),
    Case(
        "a chunk that is the whole prompt",
        8,
        ((0, 8),),
        (True,),
        (False,),
        ratio=0.5,
        actions=(REUSE,),
        free=((7, 8),),
        question=(7, 8),
        candidates=7,
        budget=4,
        leading_exact=0,
    ),
    Case(
        "a chunk of one token at the end",
        8,
        ((7, 8),),
        (True,),
        (False,),
        ratio=0.5,
        actions=(REUSE,),
        free=((0, 7), (7, 8)),
        question=(7, 8),
        candidates=0,
        budget=0,
        leading_exact=7,
    ),
    Case(
        "an exact chunk needs no recompute",
        100,
        ((10, 30), (40, 60)),
        (True, True),
        (True, False),
        actions=(REUSE, REUSE),
        free=((0, 10), (30, 40), (60, 100)),
        question=(60, 100),
        candidates=20,
        budget=3,
        leading_exact=40,
    ),
    Case(
        "exact chunks only",
        100,
        ((10, 30), (40, 60)),
        (True, True),
        (True, True),
        ratio=1.0,
        actions=(REUSE, REUSE),
        free=((0, 10), (30, 40), (60, 100)),
        question=(60, 100),
        leading_exact=100,
    ),
    Case(
        "ratio 0 recomputes nothing and still encodes what is missing",
        100,
        ((10, 30), (40, 60)),
        (True, False),
        (False, False),
        ratio=0.0,
        actions=(REUSE, ENCODE),
        free=((0, 10), (30, 40), (60, 100)),
        question=(60, 100),
        candidates=40,
        leading_exact=10,
    ),
    Case(
        "ratio 1 computes what is missing in place",
        100,
        ((10, 30), (40, 60)),
        (True, False),
        (False, False),
        ratio=1.0,
        actions=(REUSE, PREFILL),
        free=((0, 10), (30, 100)),
        question=(60, 100),
        candidates=20,
        budget=20,
        leading_exact=10,
    ),
    Case(
        "ratio 1 encodes what is missing where that is exact",
        100,
        ((10, 30),),
        (False,),
        (True,),
        ratio=1.0,
        actions=(ENCODE,),
        free=((0, 10), (30, 100)),
        question=(30, 100),
        leading_exact=100,
    ),
    Case(
        "ratio 1 with nothing stored is a full prefill",
        100,
        ((10, 30), (40, 60)),
        (False, False),
        (False, False),
        ratio=1.0,
        actions=(PREFILL, PREFILL),
        free=((0, 100),),
        question=(60, 100),
        leading_exact=100,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plan_says_what_happens(case: Case) -> None:
    plan = make_plan(case.num_tokens, case.spans, case.stored, case.exact, case.ratio)
    assert tuple(chunk.action for chunk in plan.chunks) == case.actions
    assert tuple((chunk.start, chunk.end) for chunk in plan.chunks) == case.spans
    assert tuple(chunk.is_exact for chunk in plan.chunks) == case.exact
    assert plan.question_range() == case.question
    assert plan.num_candidates == case.candidates
    assert plan.budget == case.budget
    assert plan.leading_exact == case.leading_exact
    free = [position for start, end in plan.free_ranges() for position in range(start, end)]
    assert free == [position for start, end in case.free for position in range(start, end)]


@pytest.mark.parametrize(
    ("num_tokens", "ratio", "budget"),
    [(100, 0.15, 15), (101, 0.15, 16), (1, 0.15, 1), (7, 0.5, 4), (100, 0.999, 100), (100, 0.0, 0), (100, 1e-9, 1)],
)
def test_the_budget_is_rounded_up(num_tokens: int, ratio: float, budget: int) -> None:
    plan = make_plan(num_tokens + 1, [(0, num_tokens)], [True], [False], ratio)
    assert plan.budget == budget


def test_the_budget_is_exact_where_the_ratio_gives_a_whole_number() -> None:
    for percent in range(101):
        plan = make_plan(101, [(0, 100)], [True], [False], percent / 100)
        assert plan.budget == percent


def test_the_budget_is_shared_by_all_chunks() -> None:
    plan = make_plan(25, [(0, 10), (10, 20)], [True, True], [False, False], 0.25)
    assert plan.budget == 5  # not twice ceil(2.5)


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        make_plan(25, [(0, 10), (10, 20)], [True], [False, False], 0.25)


@st.composite
def plans(draw: st.DrawFn) -> RequestPlan:
    num_tokens = draw(st.integers(1, 60))
    borders = sorted(draw(st.sets(st.integers(0, num_tokens), max_size=12)))
    spans = [span for span in pairwise(borders) if draw(st.booleans())]
    flags = st.lists(st.booleans(), min_size=len(spans), max_size=len(spans))
    ratio = draw(st.sampled_from([0.0, 0.15, 0.5, 1.0]))
    return make_plan(num_tokens, spans, draw(flags), draw(flags), ratio)


def covered(chunks: tuple[PlannedChunk, ...], last: int) -> list[int]:
    """Positions of the chunks that are not computed in place, without the last one of the prompt."""
    return [p for c in chunks if c.action is not PREFILL for p in range(c.start, min(c.end, last))]


@given(plans())
def test_free_tokens_and_chunks_cover_the_prompt_exactly_once(plan: RequestPlan) -> None:
    free = [position for start, end in plan.free_ranges() for position in range(start, end)]
    assert free == sorted(free)
    assert sorted(free + covered(plan.chunks, plan.num_tokens - 1)) == list(range(plan.num_tokens))
    assert free[-1] == plan.num_tokens - 1


@given(plans())
def test_figures_of_a_plan_stay_in_their_bounds(plan: RequestPlan) -> None:
    assert 0 <= plan.budget <= plan.num_candidates == len(covered(plan.approximate, plan.num_tokens - 1))
    start, end = plan.question_range()
    assert start < end == plan.num_tokens
    assert all(chunk.end <= start or end - start == 1 for chunk in plan.chunks)
    assert 0 <= plan.leading_exact <= plan.num_tokens
    assert all(chunk.start >= plan.leading_exact for chunk in plan.approximate)
    if plan.ratio == 1.0:
        assert plan.budget == plan.num_candidates
        assert all(chunk.action is not ENCODE or chunk.is_exact for chunk in plan.chunks)
    else:
        assert all(chunk.action is not PREFILL for chunk in plan.chunks)
    if plan.ratio == 0.0:
        assert plan.budget == 0
