"""LangChain's own unit tests for chat models."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_cachecraft import ChatCacheCraft


class TestChatCacheCraftUnit(ChatModelUnitTests):
    folder = ""

    @pytest.fixture(autouse=True)
    def _folder(self, model_folder: str) -> None:
        type(self).folder = model_folder

    @property
    def chat_model_class(self) -> type[ChatCacheCraft]:
        return ChatCacheCraft

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self.folder}
