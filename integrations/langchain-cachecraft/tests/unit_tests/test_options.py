"""Options of a call over the fields of a chat model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cachecraft_rag import RecomputeConfig
from langchain_cachecraft import ChatCacheCraft
from langchain_cachecraft.options import CallOptions


@pytest.fixture
def chat() -> ChatCacheCraft:
    return ChatCacheCraft(model="some/model", temperature=0.5, max_tokens=9)


def test_an_option_of_the_call_replaces_the_field_and_none_does_not(chat: ChatCacheCraft) -> None:
    options = CallOptions.of(chat, {"max_tokens": 3, "reuse": False, "temperature": None})
    assert options == replace(CallOptions.of(chat, {}), max_tokens=3, reuse=False)
    assert options.sampling()["max_new_tokens"] == 3
    assert options.sampling()["temperature"] == 0.5


def test_an_unknown_option_is_refused_with_the_known_ones(chat: ChatCacheCraft) -> None:
    with pytest.raises(ValueError, match="temprature: no option of a call; allowed: stop, model, max_tokens, temperat"):
        CallOptions.of(chat, {"temprature": 1.0})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_tokens", 0, "greater than or equal to 1"),
        ("max_tokens", "many", "valid integer"),
        ("temperature", -1.0, "greater than or equal to 0"),
        ("top_p", 1.5, "less than or equal to 1"),
        ("recompute_ratio", 2.0, "less than or equal to 1"),
        ("preset", "best", "'fast'"),
        ("timeout", 0.0, "greater than 0"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_under_the_name_that_was_given(
    chat: ChatCacheCraft, name: str, value: object, allowed: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {value!r} is not allowed; .*{allowed}"):
        CallOptions.of(chat, {name: value})


def test_what_langchain_adds_for_itself_is_no_option(chat: ChatCacheCraft) -> None:
    assert CallOptions.of(chat, {"stream": True}) == CallOptions.of(chat, {})


def test_policy_and_ratio_that_are_not_given_are_the_engines(chat: ChatCacheCraft) -> None:
    default = RecomputeConfig(policy="chunk_start", ratio=0.4, seed=3)
    assert CallOptions.of(chat, {}).recompute(default) == default
    assert CallOptions.of(chat, {"recompute_ratio": 0.0}).recompute(default) == default.model_copy(
        update={"ratio": 0.0}
    )
    with pytest.raises(ValueError, match="ratio"):
        CallOptions.of(chat, {"recompute_ratio": 2.0}).recompute(default)


@pytest.mark.parametrize(
    "default",
    [
        RecomputeConfig(preset="high"),
        RecomputeConfig(target_divergence=0.1),
        RecomputeConfig(policy="chunk_start", ratio=0.4),
    ],
    ids=["preset", "target", "ratio"],
)
def test_what_a_call_gives_takes_the_place_of_whatever_decided_before(default: RecomputeConfig) -> None:
    chat = ChatCacheCraft(model="some/model", preset="fast")
    assert CallOptions.of(chat, {}).recompute(default).preset == "fast"
    assert CallOptions.of(chat, {"preset": "exact"}).recompute(default).ratio == 1.0
    assert CallOptions.of(chat, {"target_divergence": 0.2}).recompute(default).target == 0.2
    changed = CallOptions.of(chat, {"recompute_ratio": 0.5}).recompute(default)
    assert (changed.ratio, changed.target) == (0.5, None)
    assert CallOptions.of(chat, {"policy": "random"}).recompute(default).policy == "random"


def test_only_one_thing_decides_how_much_is_recomputed(chat: ChatCacheCraft) -> None:
    with pytest.raises(ValueError, match=r"preset: 'fast' beside recompute_ratio 0\.5"):
        CallOptions.of(chat, {"recompute_ratio": 0.5, "preset": "fast"})
    with pytest.raises(ValueError, match=r"preset: 'fast' beside target_divergence 0\.1"):
        ChatCacheCraft(model="some/model", target_divergence=0.1, preset="fast")
