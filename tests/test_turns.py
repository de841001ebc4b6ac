"""Whose turn it is, by how long things take."""

from __future__ import annotations

from cachecraft_rag.turns import Turns


class Steps:
    """Steps of given lengths, and which of the two would come next."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = Turns(lambda: self.now)

    def ahead(self, seconds: float) -> bool:
        with self.turns.ahead():
            self.now += seconds
        return self.turns.are_rows_due

    def rows(self, seconds: float) -> bool:
        with self.turns.rows():
            self.now += seconds
        return self.turns.are_rows_due


def test_the_first_step_is_a_prefill() -> None:
    assert not Steps().turns.are_rows_due


def test_behind_a_long_prefill_everyone_gets_a_token() -> None:
    steps = Steps()
    assert not steps.rows(0.1)
    assert steps.ahead(0.3)
    assert not steps.rows(0.1)


def test_prefills_that_are_short_beside_a_token_go_on_for_three_times_as_long() -> None:
    steps = Steps()
    steps.rows(1.0)
    assert [steps.ahead(0.8) for _ in range(4)] == [False, False, False, True]
    steps.rows(1.0)
    assert not steps.ahead(0.8)


def test_a_token_whose_time_is_unknown_is_due_behind_the_first_prefill() -> None:
    assert Steps().ahead(0.001)


def test_where_nobody_decodes_nothing_is_saved_up() -> None:
    steps = Steps()
    steps.rows(1.0)
    steps.ahead(2.9)
    steps.turns.rest()
    assert not steps.ahead(0.2)
