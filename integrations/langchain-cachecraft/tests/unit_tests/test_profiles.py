"""What a chat model says it can do, before it is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag import CacheCraftEngine, EngineConfig
from langchain_cachecraft import ChatCacheCraft
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level, strict


def profile(**fields: Any) -> dict[str, Any]:
    return dict(ChatCacheCraft(**fields).profile or {})


def test_a_local_folder_tells_window_and_tools(model_folder: str) -> None:
    found = profile(model=model_folder)
    assert (found["max_input_tokens"], found["tool_calling"]) == (2048, True)
    assert (found["text_inputs"], found["image_inputs"]) == (True, False)
    assert profile(model=model_folder, engine_config=EngineConfig(context_window=100))["max_input_tokens"] == 100


def test_a_packaged_model_tells_them_once_it_was_used(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert "max_input_tokens" not in profile(model="smollm2-135m")
    shutil.copytree(model_folder, tmp_path / ".cache" / "cachecraft-rag" / "smollm2-135m")
    found = profile(model="smollm2-135m")
    assert (found["max_input_tokens"], found["tool_calling"]) == (2048, True)


def test_a_hub_id_is_not_asked_for() -> None:
    found = profile(model="some/model")
    assert "tool_calling" not in found
    assert "max_input_tokens" not in found


@pytest.mark.parametrize(
    ("tokenizer", "has_tools"), [(byte_level(), True), (strict(), False), (byte_level(chat_template=False), False)]
)
def test_a_ready_engine_tells_the_same(tokenizer: Any, has_tools: bool) -> None:
    with CacheCraftEngine(make("llama"), tokenizer, EngineConfig(context_window=64)) as engine:
        found = profile(engine=engine)
        assert (found["max_input_tokens"], found["tool_calling"]) == (64, has_tools)


def test_a_profile_of_the_users_own_stays(model_folder: str) -> None:
    assert profile(model=model_folder, profile={"max_input_tokens": 7}) == {"max_input_tokens": 7}
