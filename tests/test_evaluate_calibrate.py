"""Calibrating on prompts some of which don't fit into the context window."""

from __future__ import annotations

import pytest

from cachecraft_rag.evaluate.calibrate import calibrate, fitting
from tests.conftest import EngineMaker, rag_prompt

SHORT = [rag_prompt(1, 2), rag_prompt(3, 4)]
LONG = rag_prompt(*range(5, 15))


def test_prompts_that_are_too_long_are_left_out(make_engine: EngineMaker) -> None:
    engine = make_engine(context_window=600)
    before = len(engine.library.registry)
    assert fitting(engine, [LONG, *SHORT]) == SHORT
    assert len(engine.library.registry) == before
    found = calibrate(engine, [LONG, *SHORT], (0.1, 0.4), answer_tokens=2)
    assert found.num_questions == 2
    assert found.scale == pytest.approx(calibrate(engine, SHORT, (0.1, 0.4), answer_tokens=2).scale)


def test_fewer_than_two_that_fit_are_refused(make_engine: EngineMaker) -> None:
    with pytest.raises(ValueError, match="prompts: 2 of 3 are longer than the model's context window"):
        calibrate(make_engine(context_window=600), [LONG, SHORT[0], LONG])
