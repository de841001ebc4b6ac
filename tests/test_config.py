"""Settings: every bad value is refused by name, every legal edge is accepted."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from cachecraft_rag.config import (
    EncodeConfig,
    EngineConfig,
    PolicyName,
    RecomputeConfig,
    SamplingConfig,
    SchedulerConfig,
)
from cachecraft_rag.store_config import MemoryTierConfig, StoreConfig, parse_bytes

ALL_SETTINGS = (
    EncodeConfig,
    EngineConfig,
    RecomputeConfig,
    SamplingConfig,
    SchedulerConfig,
    StoreConfig,
    MemoryTierConfig,
)


def refusal(settings: type[BaseModel], **values: Any) -> str:
    """The message of the ValueError that these values raise."""
    with pytest.raises(ValueError, match=r".") as caught:
        settings(**values)
    return str(caught.value)


@pytest.mark.parametrize("settings", ALL_SETTINGS)
def test_every_setting_has_a_default(settings: type[BaseModel]) -> None:
    assert settings() == settings()


@pytest.mark.parametrize("settings", ALL_SETTINGS)
def test_an_unknown_option_is_refused_by_name(settings: type[BaseModel]) -> None:
    assert "recompute_rato" in refusal(settings, recompute_rato=0.5)


def test_an_unknown_option_deep_inside_is_refused_with_its_path() -> None:
    message = refusal(EngineConfig, store={"cold": {"sise": "4GiB"}})
    assert "store.cold.sise" in message


@pytest.mark.parametrize("settings", ALL_SETTINGS)
def test_settings_cannot_be_changed(settings: type[BaseModel]) -> None:
    config = settings()
    name = next(iter(settings.model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(config, name, getattr(config, name))


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0, 0, 1])
def test_the_ratio_may_be_anything_from_0_to_1(ratio: float) -> None:
    assert RecomputeConfig(ratio=ratio).ratio == ratio


@pytest.mark.parametrize("ratio", [1.2, -0.1, float("nan"), float("inf"), "much", None])
def test_any_other_ratio_is_refused_with_field_and_value(ratio: object) -> None:
    message = refusal(RecomputeConfig, ratio=ratio)
    assert "ratio" in message
    assert f"input_value={ratio!r}" in message


def test_a_ratio_above_1_is_refused_with_what_is_allowed() -> None:
    assert "less than or equal to 1" in refusal(RecomputeConfig, ratio=1.2)


def test_an_unknown_policy_is_refused_with_all_allowed_names() -> None:
    message = refusal(RecomputeConfig, policy="question_sensitvity")
    assert "policy" in message
    assert "question_sensitvity" in message
    assert all(repr(name) in message for name in get_args(PolicyName))


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_every_policy_name_is_accepted(policy: Any) -> None:
    assert RecomputeConfig(policy=policy).policy == policy


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("0", 0),
        ("7B", 7),
        ("1KB", 1000),
        ("500 MB", 500_000_000),
        ("2GB", 2_000_000_000),
        ("1KiB", 1024),
        ("16 MiB", 16 * 2**20),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("  1.5 GiB ", 3 * 2**29),
        ("1TiB", 2**40),
    ],
)
def test_a_size_may_be_a_number_or_a_text_with_a_unit(size: Any, expected: int) -> None:
    assert MemoryTierConfig(size=size).size == expected


@pytest.mark.parametrize("size", ["", "GiB", "4 XiB", "four GiB", "4GiB please", "-1GiB", "1e9", "0x10", "4,5GiB"])
def test_a_text_that_is_no_size_is_refused_with_the_units(size: str) -> None:
    message = refusal(MemoryTierConfig, size=size)
    assert "size" in message
    assert repr(size) in message
    assert "GiB" in message


@pytest.mark.parametrize("size", [-1, 1.5, None, [4]])
def test_a_size_that_is_no_number_of_bytes_is_refused(size: object) -> None:
    message = refusal(MemoryTierConfig, size=size)
    assert message.splitlines()[1] == "size"
    assert f"input_value={size!r}" in message


@given(st.integers(min_value=0, max_value=2**32), st.sampled_from([("KiB", 2**10), ("MB", 10**6), ("", 1)]))
def test_whole_sizes_are_exact(count: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{count} {unit[0]}") == count * unit[1]


def test_a_plain_dictionary_is_enough() -> None:
    values: dict[str, Any] = {"namespace": "tenant", "recompute": {"ratio": 1.0}, "store": {"cold": {"size": "500 MB"}}}
    config = EngineConfig(**values)
    assert config.recompute == RecomputeConfig(ratio=1.0)
    assert config.store == StoreConfig(cold=MemoryTierConfig(size=500_000_000))


def test_settings_survive_json() -> None:
    config = EngineConfig(namespace="tenant", recompute=RecomputeConfig(policy="random", ratio=0.3, seed=5))
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", ""),
        ("max_new_tokens", 0),
        ("context_window", 1),
        ("max_chunks", 0),
        ("encode", {"behind": "nothing"}),
        ("encode", {"sensitivity": "later"}),
        ("scheduler", {"max_batch": 0}),
        ("scheduler", {"max_waiting": 0}),
        ("scheduler", {"memory": -1}),
        ("scheduler", {"memory": "much"}),
    ],
)
def test_the_engine_refuses_values_that_make_no_sense(field: str, value: object) -> None:
    assert field in refusal(EngineConfig, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 1),
        ("temperature", 0.0),
        ("temperature", 2.5),
        ("top_p", 1.0),
        ("top_p", 0.01),
        ("top_k", 0),
        ("repetition_penalty", 0.5),
        ("seed", None),
        ("seed", 0),
        ("stop", ()),
    ],
)
def test_sampling_accepts_the_edges(field: str, value: object) -> None:
    assert getattr(SamplingConfig(**{field: value}), field) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("seed", "lucky"),
        ("stop", "one text"),
        ("stop", [""]),
    ],
)
def test_sampling_refuses_what_is_out_of_bounds(field: str, value: object) -> None:
    message = refusal(SamplingConfig, **{field: value})
    assert message.splitlines()[1].startswith(field)
    assert "input_value=" in message


def test_stop_texts_are_kept_as_a_tuple() -> None:
    assert SamplingConfig(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
