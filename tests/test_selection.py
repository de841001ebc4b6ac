"""Selection policies against choices made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.config import PolicyName
from cachecraft_rag.selection import POLICIES, ScoringPolicy, SelectionContext
from cachecraft_rag.selection.base import per_layer_share, top_candidates

NUM_LAYERS = 2
# Two chunks of 4 and 3 tokens.
CHUNKS = (0, 0, 0, 0, 1, 1, 1)
OFFSETS = (0, 1, 2, 3, 0, 1, 2)
ATTENTION = ((1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0, 0.2, 0.3, 0.5))
SENSITIVITY = ((9.0, 4.0, 0.0, 1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 0.25))
DEVIATION = (5.0, 1.0, 2.0, 8.0, 0.5, 6.0, 7.0)
HISTORY = (0.0, 0.0, 0.0, 0.0, 0.6, 0.2, 0.0)
PREDICTED = ((3.0, 0.5, 0.1, 1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0, 4.0, 0.2, 1.0))
WITH_A_BUDGET = [name for name in POLICIES if name not in ("none", "all")]


class Context:
    """A context that counts how often a policy asks for a pass of the model."""

    def __init__(
        self,
        budget: int,
        seed: int = 0,
        attention: object = ATTENTION,
        sensitivity: object = SENSITIVITY,
        deviation: object = DEVIATION,
        offsets: tuple[int, ...] = OFFSETS,
        chunks: tuple[int, ...] = CHUNKS,
        history: object = None,
        predicted: object = PREDICTED,
    ) -> None:
        self.passes: list[str] = []
        self._predicted = torch.tensor(predicted)
        self._attention, self._deviation = torch.tensor(attention), torch.tensor(deviation)
        self.value = SelectionContext(
            positions=torch.arange(len(offsets)) + 10,
            chunk_index=torch.tensor(chunks),
            offset_in_chunk=torch.tensor(offsets),
            sensitivity=torch.tensor(sensitivity),
            budget=budget,
            seed=seed,
            question_attention=self.question_attention,
            key_deviation=self.key_deviation,
            history=None if history is None else torch.tensor(history),
            predicted_deviation=lambda: self._predicted,
        )

    def question_attention(self) -> torch.Tensor:
        self.passes.append("question_attention")
        return self._attention

    def key_deviation(self) -> torch.Tensor:
        self.passes.append("key_deviation")
        return self._deviation


def chosen(policy: str, budget: int, **options: object) -> list[int]:
    return POLICIES[policy].select(Context(budget, **options).value).tolist()  # type: ignore[arg-type]


def test_every_policy_of_the_configuration_exists_under_its_own_name() -> None:
    assert set(POLICIES) == set(get_args(PolicyName))
    assert all(policy.name == name for name, policy in POLICIES.items())


def test_only_the_policies_that_read_the_sensitivity_need_it() -> None:
    needing = {name for name, policy in POLICIES.items() if policy.needs_sensitivity}
    assert needing == {"question_sensitivity", "history", "predicted"}


def test_policies_that_weigh_tokens_give_scores() -> None:
    scoring = {name for name, policy in POLICIES.items() if isinstance(policy, ScoringPolicy)}
    assert scoring == set(WITH_A_BUDGET) - {"random", "chunk_start", "inter_attention"}


@pytest.mark.parametrize(
    ("policy", "passes"),
    [
        ("none", []),
        ("all", []),
        ("random", []),
        ("chunk_start", []),
        ("key_deviation", ["key_deviation"]),
        ("question_attention", ["question_attention"]),
        ("question_deviation", ["key_deviation", "question_attention"]),
        ("question_sensitivity", ["question_attention"]),
        ("history", ["question_attention"]),
        ("predicted", ["question_attention"]),
    ],
)
def test_a_policy_runs_the_passes_that_it_needs_and_no_others(policy: str, passes: list[str]) -> None:
    context = Context(3)
    POLICIES[policy].select(context.value)
    assert sorted(context.passes) == passes


@pytest.mark.parametrize(
    ("policy", "budget", "expected"),
    [
        ("none", 3, []),
        ("all", 3, [0, 1, 2, 3, 4, 5, 6]),
        ("chunk_start", 1, [0]),
        ("chunk_start", 2, [0, 4]),
        ("chunk_start", 3, [0, 1, 4]),
        ("chunk_start", 5, [0, 1, 2, 4, 5]),
        ("chunk_start", 7, [0, 1, 2, 3, 4, 5, 6]),
        ("key_deviation", 1, [3]),
        ("key_deviation", 3, [3, 5, 6]),
        ("key_deviation", 5, [0, 2, 3, 5, 6]),
        # Shares of layer 0: .1 .2 .3 .4 - - -, of layer 1: - - - - .2 .3 .5
        ("question_attention", 1, [6]),
        ("question_attention", 2, [3, 6]),
        ("question_attention", 3, [2, 3, 6]),
        ("question_attention", 4, [2, 3, 5, 6]),
        # Shares times deviation: .5 .2 .6 3.2 .1 1.8 3.5
        ("question_deviation", 1, [6]),
        ("question_deviation", 3, [3, 5, 6]),
        ("question_deviation", 5, [0, 2, 3, 5, 6]),
        # Shares times fourth roots of the sensitivity: .17 .28 0 .4 .2 .42 .35
        ("question_sensitivity", 1, [5]),
        ("question_sensitivity", 3, [3, 5, 6]),
        ("question_sensitivity", 4, [1, 3, 5, 6]),
        ("question_sensitivity", 5, [1, 3, 4, 5, 6]),
        ("question_sensitivity", 6, [0, 1, 3, 4, 5, 6]),
        # Shares times predicted deviation: .3 .1 .03 .4 .8 .06 .5
        ("predicted", 1, [4]),
        ("predicted", 3, [3, 4, 6]),
        ("predicted", 5, [0, 1, 3, 4, 6]),
        ("predicted", 6, [0, 1, 3, 4, 5, 6]),
    ],
)
def test_choices_are_those_made_by_hand(policy: str, budget: int, expected: list[int]) -> None:
    assert chosen(policy, budget) == expected


@pytest.mark.parametrize("history", [None, [0.0] * 7])
def test_without_earlier_answers_the_history_changes_nothing(history: list[float] | None) -> None:
    for context in (Context(3, history=history), Context(3, attention=SENSITIVITY, history=history)):
        assert torch.equal(
            POLICIES["history"].scores(context.value),  # type: ignore[attr-defined]
            POLICIES["question_sensitivity"].scores(context.value),  # type: ignore[attr-defined]
        )


def test_what_earlier_answers_looked_at_is_weighed_by_its_sensitivity_too() -> None:
    # Fourth roots of the sensitivity: 1.7 1.4 0 1 1 1 1 and 1 1 1 1 1 1.4 .7; half of the history is added in both
    # layers, so to the products .17 .28 0 .4 .2 .42 .35 come 0 0 0 0 .6 .24 0.
    assert chosen("history", 2, history=HISTORY) == [4, 5]
    assert chosen("history", 3, history=HISTORY) == [3, 4, 5]
    only_where_nothing_depends_on_context = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    nowhere = [[9.0, 4.0, 0.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0, 1.0, 4.0, 0.25]]
    for budget in range(1, 7):
        with_history = chosen("history", budget, history=only_where_nothing_depends_on_context, sensitivity=nowhere)
        assert with_history == chosen("question_sensitivity", budget, sensitivity=nowhere)


def test_the_history_of_many_chunks_counts_no_more_than_that_of_one_answer() -> None:
    once, often = [share / sum(HISTORY) for share in HISTORY], [9.0 * share for share in HISTORY]
    scores = [POLICIES["history"].scores(Context(3, history=h).value) for h in (once, often)]  # type: ignore[attr-defined]
    assert torch.allclose(scores[0], scores[1])
    assert scores[0].sum() > POLICIES["history"].scores(Context(3, history=HISTORY).value).sum()  # type: ignore[attr-defined]


def test_without_a_regressor_nothing_is_predicted() -> None:
    context = replace(Context(3).value, predicted_deviation=None)
    with pytest.raises(ValueError, match=r"'predicted'.*cachecraft calibrate"):
        POLICIES["predicted"].select(context)


def test_every_layer_counts_alike_however_much_attention_it_pays() -> None:
    # A thousand heads in layer 0 must not drown what layer 1 looks at.
    loud = (tuple(1000 * a for a in ATTENTION[0]), ATTENTION[1])
    for policy in ("question_attention", "question_deviation", "question_sensitivity", "history", "predicted"):
        for budget in range(1, 7):
            assert chosen(policy, budget, attention=loud) == chosen(policy, budget)


def test_sensitivity_is_read_layer_by_layer() -> None:
    # Token 0 is looked at in layer 0 only, where it does not depend on its context.
    attention, sensitivity = ((5.0, 5.0), (5.0, 5.0)), ((0.0, 1.0), (4.0, 2.25))
    options = {"attention": attention, "deviation": (0.0, 0.0), "offsets": (0, 1), "chunks": (0, 0)}
    assert chosen("question_sensitivity", 1, sensitivity=sensitivity, **options) == [1]  # 0 + 2 against 1 + 1.5


def test_without_measured_sensitivity_the_attention_decides() -> None:
    ones = torch.ones(NUM_LAYERS, 7).tolist()
    for budget in range(1, 7):
        assert chosen("question_sensitivity", budget, sensitivity=ones) == chosen("question_attention", budget)


def test_a_layer_without_any_attention_decides_nothing() -> None:
    attention = ((0.0,) * 7, ATTENTION[1])
    assert chosen("question_attention", 3, attention=attention) == [4, 5, 6]


@pytest.mark.parametrize(
    "policy",
    ["key_deviation", "question_attention", "question_deviation", "question_sensitivity", "history", "predicted"],
)
def test_equal_scores_are_taken_from_the_front(policy: str) -> None:
    ones = torch.ones(NUM_LAYERS, 7).tolist()
    equal = {"attention": ones, "sensitivity": ones, "deviation": [1.0] * 7, "history": [0.1] * 7, "predicted": ones}
    assert chosen(policy, 3, **equal) == [0, 1, 2]


def test_top_candidates_are_sorted_by_place_not_by_score() -> None:
    assert top_candidates(torch.tensor([1.0, 9.0, 3.0, 9.0]), 3).tolist() == [1, 2, 3]
    assert top_candidates(torch.tensor([1.0, 9.0]), 0).tolist() == []
    assert top_candidates(torch.tensor([1.0, 9.0]), 5).tolist() == [0, 1]


def test_shares_sum_to_one_in_every_layer() -> None:
    shares = per_layer_share(torch.tensor(ATTENTION))
    assert torch.allclose(shares.sum(dim=1), torch.ones(NUM_LAYERS))
    assert torch.allclose(shares[0], torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0, 0.0, 0.0]))


def test_chance_is_the_same_for_the_same_seed() -> None:
    assert chosen("random", 3, seed=5) == chosen("random", 3, seed=5)
    assert len({tuple(chosen("random", 3, seed=seed)) for seed in range(20)}) > 5


def test_chance_reaches_every_token_alike() -> None:
    counts = [0] * 7
    for seed in range(700):
        for index in chosen("random", 3, seed=seed):
            counts[index] += 1
    assert all(230 < count < 370 for count in counts)  # 300 expected


def test_chance_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    chosen("random", 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("policy", WITH_A_BUDGET)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_choice_has_the_size_of_the_budget_and_is_sorted(policy: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    offsets = tuple(offset for length in lengths for offset in range(length))
    chunks = tuple(chunk for chunk, length in enumerate(lengths) for _ in range(length))
    row = st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=len(offsets), max_size=len(offsets))
    attention, sensitivity, predicted = ([data.draw(row) for _ in range(NUM_LAYERS)] for _ in range(3))
    budget = data.draw(st.integers(0, len(offsets)))
    context = Context(
        budget, 3, attention, sensitivity, data.draw(row), offsets, chunks, data.draw(st.none() | row), predicted
    )
    selected = POLICIES[policy].select(context.value)
    assert selected.dtype == torch.long
    assert selected.tolist() == sorted(set(selected.tolist()))
    assert len(selected) == budget
    assert all(0 <= index < len(offsets) for index in selected.tolist())
