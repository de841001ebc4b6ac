"""Settings of the engine from a file, such as ``cachecraft tune`` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachecraft_rag import EngineConfig, RecomputeConfig
from langchain_cachecraft import CacheCraftLLM, ChatCacheCraft


@pytest.mark.parametrize("kind", [ChatCacheCraft, CacheCraftLLM])
def test_settings_come_from_a_file(kind: type[ChatCacheCraft] | type[CacheCraftLLM], tmp_path: Path) -> None:
    config = EngineConfig(recompute=RecomputeConfig(ratio=0.3), chunk_tokens=300)
    config.to_file(tmp_path / "config.json")
    for given in (tmp_path / "config.json", str(tmp_path / "config.json")):
        assert kind(model="none", engine_config=given).engine_config == config  # type: ignore[arg-type]


def test_a_bad_file_is_refused_with_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"recompute": {"ratio": 2}}')
    with pytest.raises(ValueError, match=r"recompute\.ratio: 2: .*less than or equal to 1"):
        ChatCacheCraft(model="none", engine_config=path)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        ChatCacheCraft(model="none", engine_config=tmp_path / "none.json")  # type: ignore[arg-type]
