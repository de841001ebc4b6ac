"""LlamaIndex counts as the model does, and its global ``Settings`` fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from llama_index.core import Settings
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import ChatMessage

from llama_index.llms.cachecraft import CacheCraftLLM, ChunkAlignedPromptHelper
from tests.conftest import passage

QUESTION = "What does the lease say?"


def test_llama_index_counts_tokens_as_the_engine_does(llm: CacheCraftLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_index.core.global_tokenizer", None)
    counter = TokenCountingHandler()
    llm.callback_manager = CallbackManager([counter])
    usage = llm.chat([ChatMessage(content=QUESTION)]).raw["usage"]
    list(llm.stream_chat([ChatMessage(content=QUESTION)]))
    assert counter.prompt_llm_token_count == 2 * usage["prompt_tokens"]
    assert counter.completion_llm_token_count == 2 * usage["completion_tokens"]


def test_settings_are_made_to_fit_by_one_call(
    make_llm: Callable[..., CacheCraftLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_index.core.global_tokenizer", None)
    for name in ("_llm", "_prompt_helper", "_chat_prompt_helper"):
        monkeypatch.setattr(Settings, name, None, raising=False)
    make_llm(context_window=300).configure_settings()
    llm = make_llm(context_window=500, max_new_tokens=9)
    llm.configure_settings()
    assert Settings.llm is llm
    assert (Settings.context_window, Settings.num_output) == (500, 9)
    assert getattr(Settings, "chat_context_window", 500) == 500  # older versions of LlamaIndex have none
    assert isinstance(Settings.prompt_helper, ChunkAlignedPromptHelper)
    assert len(Settings.tokenizer(passage(1))) == len(llm.engine.prompts.encode_chunk(passage(1)))
