"""Packs prompts chunk by chunk, so that the model reads whole chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.llm import LLM
from llama_index.core.node_parser.text.utils import truncate_text
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools import BaseTool
from llama_index.core.utilities.token_counting import TokenCounter

from cachecraft_rag import RagPrompt

if TYPE_CHECKING:
    from llama_index.llms.cachecraft.base import CacheCraftLLM

_SEPARATOR = "\n\n"
_TOKENS_PER_MESSAGE = 3  # around the role and the text, as LlamaIndex has it


class _OwnTokenCounter(TokenCounter):
    """Counts messages with the tokenizer it was given; LlamaIndex's own takes the global one for their text."""

    def estimate_tokens_in_messages(self, messages: list[ChatMessage]) -> int:
        texts = [text for message in messages for text in (message.role.value, message.content or "")]
        return sum(map(self.get_string_tokens, texts)) + _TOKENS_PER_MESSAGE * len(messages)


class ChunkAlignedPromptHelper(PromptHelper):
    """A prompt helper that never cuts a node that fits into a prompt.

    LlamaIndex's own joins all nodes and cuts the whole where a prompt is full, mostly in the middle of a node, so that
    two prompts hold a piece of it each and none can be reused whole. This one begins a new prompt with that node.
    A node that is too long for any prompt is cut as LlamaIndex does.

    Args:
        template_tokens: Tokens that the chat template adds to a prompt.
        **fields: Those of LlamaIndex's ``PromptHelper``: ``context_window``, ``num_output``, ``tokenizer``, ...

    Examples:
        >>> Settings.prompt_helper = ChunkAlignedPromptHelper.from_llm(llm)
    """

    template_tokens: int = Field(default=0, ge=0, description="Tokens that the chat template adds to a prompt.")

    def __init__(self, *args: Any, template_tokens: int = 0, **fields: Any) -> None:
        super().__init__(*args, **fields)
        if template_tokens < 0:
            raise ValueError(f"template_tokens: {template_tokens!r} is negative; give 0 or more")
        self.template_tokens = template_tokens
        self._token_counter = _OwnTokenCounter(self._token_counter.tokenizer)

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialisation."""
        return "ChunkAlignedPromptHelper"

    @classmethod
    def from_llm(cls, llm: CacheCraftLLM, **fields: Any) -> ChunkAlignedPromptHelper:
        """A helper that counts with an LLM's own tokenizer and leaves room for its chat template; loads the model.

        Args:
            llm: The LLM.
            **fields: Other fields, such as ``chunk_size_limit``.
        """
        metadata, prompts = llm.metadata, llm.engine.prompts
        template_tokens = 0
        if metadata.is_chat_model:
            template_tokens = len(prompts.encode(RagPrompt.from_messages([{"role": "user", "content": ""}])).token_ids)
        given: dict[str, Any] = {
            "context_window": metadata.context_window,
            "num_output": metadata.num_output,
            "tokenizer": llm.tokenize,
            "template_tokens": template_tokens,
        }
        return cls(**{**given, **fields})

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """Join texts into as few as fit the prompt, cutting only those that are too long by themselves.

        Args:
            prompt: The prompt they go into.
            text_chunks: The texts.
            padding: Tokens to leave free.
            llm: Whose prompt it is.
            tools: Tools that are described in the prompt.
        """
        splitter = self.get_text_splitter_given_prompt(prompt, padding=padding, llm=llm, tools=tools)
        packed: list[str] = []
        for text in (text.strip() for text in text_chunks if text.strip()):
            joined = f"{packed[-1]}{_SEPARATOR}{text}" if packed else text
            if packed and self._count(joined) <= splitter.chunk_size:
                packed[-1] = joined
            else:
                packed += [text] if self._count(text) <= splitter.chunk_size else splitter.split_text(text)
        return packed or [""]  # as LlamaIndex does: without any text, tree_summarize would call itself for ever

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """Shorten texts until all of them fit one prompt: the longest ones, and the others not at all.

        Args:
            prompt: The prompt they go into.
            text_chunks: The texts.
            padding: Tokens to leave free per text.
            llm: Whose prompt it is.
            tools: Tools that are described in the prompt.
        """
        if not text_chunks:
            return []
        splitter = self.get_text_splitter_given_prompt(prompt, len(text_chunks), padding, llm, tools)
        room = len(text_chunks) * splitter.chunk_size
        limit = _fair_limit([self._count(text) for text in text_chunks], room)
        splitter.chunk_size, splitter.chunk_overlap = limit, int(self.chunk_overlap_ratio * limit)
        return [text if self._count(text) <= limit else truncate_text(text, splitter) for text in text_chunks]

    def _count(self, text: str) -> int:
        return self._token_counter.get_string_tokens(text)

    def _get_available_context_size(self, num_prompt_tokens: int) -> int:
        return super()._get_available_context_size(num_prompt_tokens + self.template_tokens)


def _fair_limit(lengths: Sequence[int], room: int) -> int:
    """The largest length to which texts must be shortened so that all fit: what short ones leave, long ones get."""
    limit = 0
    for index, length in enumerate(sorted(lengths)):
        limit = room // (len(lengths) - index)
        if length > limit:
            return limit
        room -= length
    return max(limit, *lengths)
