"""Settings as a file: what is written comes back, and what is refused is named with its value and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachecraft_rag import EngineConfig, RecomputeConfig, StoreConfig


def written(folder: Path, values: object) -> Path:
    path = folder / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return path


def refusal(folder: Path, values: object) -> str:
    """The message with which a file of these values is refused."""
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        EngineConfig.from_file(written(folder, values))
    return str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(recompute=RecomputeConfig(preset="high"), calibration="calibration.json", chunk_tokens=512),
        EngineConfig(recompute=RecomputeConfig(target_divergence=0.05).changed(max_ratio=0.4)),
        EngineConfig(
            store=StoreConfig.model_validate(
                {"disk": {"path": "kv", "size": "3GiB"}, "remote": {"url": "redis://x", "ttl_s": None}, "load_ahead": 0}
            )
        ),
    ],
)
def test_what_is_written_comes_back(config: EngineConfig, tmp_path: Path) -> None:
    path = tmp_path / "new" / "config.json"
    config.to_file(path)
    assert EngineConfig.from_file(path) == config
    assert EngineConfig.from_file(str(path)) == config


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ratio=st.floats(0, 1),
    share=st.floats(0, 1),
    load_ahead=st.integers(0, 64),
    chunk_tokens=st.integers(2, 10_000),
    name=st.text(min_size=1, max_size=20),
)
def test_any_settings_come_back(
    tmp_path: Path, ratio: float, share: float, load_ahead: int, chunk_tokens: int, name: str
) -> None:
    store = StoreConfig(hot_share=share, load_ahead=load_ahead)
    config = EngineConfig(
        recompute=RecomputeConfig(ratio=ratio), store=store, chunk_tokens=chunk_tokens, namespace=name
    )
    config.to_file(tmp_path / "config.json")
    assert EngineConfig.from_file(tmp_path / "config.json") == config


def test_only_what_was_set_is_written(tmp_path: Path) -> None:
    EngineConfig(store=StoreConfig(hot_share=0.3)).to_file(tmp_path / "config.json")
    assert json.loads((tmp_path / "config.json").read_text()) == {"store": {"hot_share": 0.3}}
    (tmp_path / "config.json").write_text("{}")
    assert EngineConfig.from_file(tmp_path / "config.json") == EngineConfig()


def test_the_name_of_a_key_stays_a_name(tmp_path: Path) -> None:
    config = EngineConfig.from_file(written(tmp_path, {"store": {"master_key": "env:KV_KEY"}}))
    assert config.store.master_key == "env:KV_KEY"


def test_a_key_itself_is_not_written(tmp_path: Path) -> None:
    config = EngineConfig(store=StoreConfig(master_key=b"0123456789abcdef"))
    with pytest.raises(ValueError, match=r"store\.master_key: raw bytes") as caught:
        config.to_file(tmp_path / "config.json")
    assert "0123456789" not in str(caught.value)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"recompute": {"ratio": 1.5}}, ("recompute.ratio: 1.5", "less than or equal to 1")),
        ({"recompute": {"policy": "best"}}, ("recompute.policy: 'best'", "'question_sensitivity'")),
        ({"recompute": {"rato": 0.5}}, ("recompute.rato: there is no such setting", "preset, ratio, seed")),
        ({"store": {"disk": {"folder": "kv"}}}, ("store.disk.path", "store.disk.folder: there is no such", "path")),
        ({"chunk_size": 512}, ("chunk_size: there is no such setting", "chunk_tokens")),
        ({"chunk_tokens": 1}, ("chunk_tokens: 1", "greater than or equal to 2")),
        ({"store": {"cold": {"size": "much"}}}, ("store.cold.size: 'much'", "KiB")),
        ({"recompute": {"ratio": 0.5, "preset": "high"}}, ("recompute.ratio: 0.5 beside preset 'high'",)),
        ({"store": "disk"}, ("store: 'disk'",)),
        (["ratio"], ("['ratio'] is no JSON object",)),
        ('{"namespace": "a",}', ("no JSON", "line 1 column")),
        ('{"namespace": "a", "namespace": "b"}', ("namespace: is there twice",)),
        ('{"recompute": {"ratio": NaN}}', ("NaN is no JSON number",)),
    ],
)
def test_what_is_not_allowed_is_named(values: Any, expected: tuple[str, ...], tmp_path: Path) -> None:
    message = refusal(tmp_path, values)
    for part in expected:
        assert part in message


def test_every_problem_of_a_file_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, {"recompute": {"ratio": 2}, "namespace": "", "store": {"load_ahead": -1}})
    assert [line.split(": ")[1] for line in message.splitlines()] == [
        "namespace",
        "recompute.ratio",
        "store.load_ahead",
    ]


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, {"recompute": "x" * 10_000})) < 400


def test_a_missing_file_and_one_that_is_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        EngineConfig.from_file(tmp_path / "none.json")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"config\.json: this is no JSON"):
        EngineConfig.from_file(tmp_path / "config.json")


@pytest.mark.parametrize(("chunk_tokens", "limits"), [(768, (512, 768)), (256, (170, 256)), (3, (2, 3)), (2, (1, 2))])
def test_chunk_limits_are_two_thirds_and_all_of_the_chunk_size(chunk_tokens: int, limits: tuple[int, int]) -> None:
    assert tuple(EngineConfig(chunk_tokens=chunk_tokens).chunk_limits.values()) == limits


def test_a_setting_of_several_types_is_named_once_and_without_them(tmp_path: Path) -> None:
    message = refusal(tmp_path, {"store": {"master_key": 5}})
    assert len(message.splitlines()) == 1
    assert "store.master_key: Input should be a valid bytes; Input should be a valid string" in message


@pytest.mark.parametrize(
    "values",
    [
        {"store": {"master_key": ["0123456789abcdef"]}},
        {"store": {"master_key": {"key": "0123456789abcdef"}}},
        {"store": [{"master_key": "0123456789abcdef"}]},
        [{"store": {"master_key": "0123456789abcdef"}}],
    ],
)
def test_a_refused_key_is_not_shown(values: Any, tmp_path: Path) -> None:
    message = refusal(tmp_path, values)
    assert "master_key" in message
    assert "0123456789abcdef" not in message


def test_a_value_that_a_message_begins_with_is_said_once(tmp_path: Path) -> None:
    assert "store.cold.size: 'much' is not a size" in refusal(tmp_path, {"store": {"cold": {"size": "much"}}})


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"namespace": "legal"}', encoding="utf-8-sig")
    assert EngineConfig.from_file(tmp_path / "config.json").namespace == "legal"


@pytest.mark.parametrize(
    "remote", [["redis://user:hunter2@host"], {"url": ["redis://:hunter2@host"]}, "redis://:hunter2@h"]
)
def test_a_password_in_a_url_is_never_shown(tmp_path: Path, remote: object) -> None:
    message = refusal(tmp_path, {"store": {"remote": remote}})
    assert "hunter2" not in message
    assert "store.remote" in message
