"""Answers and streams of text."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from cachecraft_rag.result import AnswerStream, GenerationResult
from cachecraft_rag.stats import RequestStats

ANSWER = GenerationResult("three parts.", (4, 5, 6), RequestStats(prompt_tokens=9), "stop")


def deltas(closed: list[bool] | None = None) -> Generator[str, None, GenerationResult]:
    try:
        yield "three"
        yield " parts"
        yield "."
    finally:
        if closed is not None:
            closed.append(True)
    return ANSWER


def failing() -> Generator[str, None, GenerationResult]:
    yield "three"
    raise OSError("device lost")


def test_the_deltas_come_in_order_and_then_the_result() -> None:
    stream = AnswerStream(deltas())
    assert "".join(stream) == "three parts."
    assert stream.result is ANSWER


def test_there_is_no_result_before_the_last_delta_was_taken() -> None:
    stream = AnswerStream(deltas())
    assert [next(stream), next(stream), next(stream)] == ["three", " parts", "."]
    with pytest.raises(RuntimeError, match="no result"):
        _ = stream.result


def test_nothing_is_computed_before_it_is_asked_for() -> None:
    started: list[bool] = []

    def slow() -> Generator[str, None, GenerationResult]:
        started.append(True)
        yield "late"
        return ANSWER

    stream = AnswerStream(slow())
    assert started == []
    assert next(stream) == "late"
    assert started == [True]


def test_a_finished_stream_stays_finished_and_keeps_its_result() -> None:
    stream = AnswerStream(deltas())
    assert len(list(stream)) == 3
    assert list(stream) == []
    with pytest.raises(StopIteration):
        next(stream)
    assert stream.result is ANSWER


def test_an_empty_answer_has_a_result() -> None:
    def nothing() -> Generator[str, None, GenerationResult]:
        yield from ()
        return ANSWER

    stream = AnswerStream(nothing())
    assert list(stream) == []
    assert stream.result is ANSWER


def test_closing_ends_the_generation_at_once() -> None:
    closed: list[bool] = []
    stream = AnswerStream(deltas(closed))
    assert next(stream) == "three"
    stream.close()
    assert closed == [True]
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="no result"):
        _ = stream.result


def test_dropping_the_stream_ends_the_generation() -> None:
    closed: list[bool] = []
    stream = AnswerStream(deltas(closed))
    assert next(stream) == "three"
    del stream
    assert closed == [True]


def test_closing_twice_or_after_the_end_is_harmless() -> None:
    stream = AnswerStream(deltas())
    assert len(list(stream)) == 3
    stream.close()
    stream.close()
    assert stream.result is ANSWER


def test_an_error_during_generation_comes_out_where_the_delta_is_taken() -> None:
    stream = AnswerStream(failing())
    assert next(stream) == "three"
    with pytest.raises(OSError, match="device lost"):
        next(stream)
    with pytest.raises(RuntimeError, match="no result"):
        _ = stream.result
