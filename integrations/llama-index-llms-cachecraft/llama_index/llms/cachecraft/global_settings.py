"""LlamaIndex's global ``Settings``, made to fit one LLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_index.core import Settings
from llama_index.core.indices import prompt_helper

from llama_index.llms.cachecraft.prompt_helper import ChunkAlignedPromptHelper

if TYPE_CHECKING:
    from llama_index.llms.cachecraft.base import CacheCraftLLM


def use_everywhere(llm: CacheCraftLLM) -> None:
    """Set the LLM, the tokenizer that everything is counted with, and the prompt helpers.

    ``Settings`` keeps the first helper it made, with the context window of whatever LLM there was then.

    Args:
        llm: The LLM; loaded.
    """
    Settings.llm = llm
    Settings.tokenizer = llm.tokenize
    Settings.prompt_helper = ChunkAlignedPromptHelper.from_llm(llm)
    chat_helper = getattr(prompt_helper, "ChatPromptHelper", None)  # younger than our oldest llama-index-core
    if chat_helper is not None:
        Settings.chat_prompt_helper = chat_helper.from_llm_metadata(llm.metadata, tokenizer=llm.tokenize)
