"""Errors: one tree, messages that tell what to do."""

from __future__ import annotations

import pickle

import pytest

from cachecraft_rag.errors import (
    CacheCraftError,
    CorruptEntryError,
    DeadlineExceededError,
    EngineBusyError,
    PromptTooLongError,
    RequestCancelledError,
    StoreError,
    StoreUnavailableError,
    UnsupportedModelError,
)

BRANCHES = (
    UnsupportedModelError,
    PromptTooLongError,
    EngineBusyError,
    DeadlineExceededError,
    RequestCancelledError,
    StoreError,
)


@pytest.mark.parametrize("error", BRANCHES)
def test_every_error_is_a_cachecraft_error(error: type[Exception]) -> None:
    assert issubclass(error, CacheCraftError)


@pytest.mark.parametrize("error", [StoreUnavailableError, CorruptEntryError])
def test_errors_of_the_tiers_are_store_errors(error: type[Exception]) -> None:
    assert issubclass(error, StoreError)


def test_errors_of_different_branches_do_not_catch_each_other() -> None:
    assert not any(issubclass(a, b) for a in BRANCHES for b in BRANCHES if a is not b)


def test_a_cachecraft_error_is_no_value_error() -> None:
    # Bad arguments are ValueErrors; catching those must not swallow the engine's own errors.
    assert not issubclass(CacheCraftError, ValueError)


def test_a_busy_engine_says_how_many_may_wait_and_what_to_do() -> None:
    assert EngineBusyError(256).max_waiting == 256
    for part in ("256 requests", "try again later", "max_waiting", "max_batch", "memory"):
        assert part in str(EngineBusyError(256))


def test_a_deadline_is_a_timeout_for_whoever_catches_those() -> None:
    error = DeadlineExceededError(2.5)
    assert isinstance(error, TimeoutError)
    assert error.timeout_s == 2.5
    assert "2.5 s" in str(error)


def test_a_prompt_that_is_too_long_names_both_numbers() -> None:
    error = PromptTooLongError(5000, 4096)
    assert (error.prompt_tokens, error.context_window) == (5000, 4096)
    assert "5000" in str(error)
    assert "4096" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedModelError("no RoPE"),
        PromptTooLongError(5000, 4096),
        EngineBusyError(256),
        DeadlineExceededError(2.5),
        RequestCancelledError(),
    ],
)
def test_an_error_survives_the_way_to_another_process(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
