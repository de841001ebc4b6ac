"""Tiny models with real tokenizers, in folders as a user would name them, and engines made from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from cachecraft_rag import CacheCraftEngine, EngineConfig
from langchain_cachecraft import ChatCacheCraft
from tests.conftest import passage
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

ChatMaker = Callable[..., ChatCacheCraft]
RetrieverMaker = Callable[..., BaseRetriever]


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))  # tiny tensors: more threads only wait for each other


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny Llama."""
    return _save(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model of another architecture."""
    return _save(tmp_path_factory.mktemp("tiny-qwen"), "qwen2")


@pytest.fixture
def make_chat(model_folder: str) -> Iterator[ChatMaker]:
    """Make chat models on the tiny Llama, which share an engine: ``make_chat(recompute_ratio=1.0)``."""
    chats: list[ChatCacheCraft] = []

    def maker(**fields: Any) -> ChatCacheCraft:
        chats.append(ChatCacheCraft(**{"model": model_folder, "max_tokens": 12, **fields}))
        return chats[-1]

    yield maker
    for chat in chats:
        chat.close()


@pytest.fixture
def engine() -> Iterator[CacheCraftEngine]:
    """A ready engine."""
    with CacheCraftEngine(make("llama"), byte_level(), EngineConfig(max_new_tokens=12)) as engine:
        yield engine


@pytest.fixture
def make_retriever() -> RetrieverMaker:
    """Make a vector store retriever over some passages that returns all of them, in an order given by the question."""

    def maker(*numbers: int) -> BaseRetriever:
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
        store.add_documents([Document(passage(number), metadata={"number": number}) for number in numbers])
        return store.as_retriever(search_kwargs={"k": len(numbers)})

    return maker


def _save(folder: Path, name: str) -> str:
    make(name).save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return str(folder)


CALLS: dict[str, dict[str, Any]] = {
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "my_adder_tool": {"a": 1, "b": 2},
    "get_weather": {"location": "San Francisco, CA"},
    "greeting_generator": {"answer_style": "pirate"},
    "unicode_customer": {"customer_name": "你好啊集团 こんにちは株式会社", "description": "a company"},
    "Joke": {"setup": "Why?", "punchline": "Because."},
    "JokeDict": {"setup": "Why?", "punchline": "Because."},
    "search": {"query": "lease"},
}
"""What the scripted model calls a tool with."""

_ANSWER = ["@answer", "It", " ends", " on", " the", " 9th", " of", " May."]
_JOKE = ["@joke", '{"setup": ', '"Why?", ', '"punchline": "Because."}']
_SCRIPTED_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools: {{ tools | tojson }}\n"
    "Call them within <tool_call></tool_call>.<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{%- for call in message.get('tool_calls') or [] %}\n<tool_call>\n{{ call | tojson }}\n</tool_call>{% endfor -%}"
    "<|im_end|>\n{% endfor -%}"
    "<|im_start|>assistant\n"
    "{%- if tools and messages[-1]['role'] != 'tool' %}@call {{ tools[0]['function']['name'] }}"
    "{%- elif 'setup' in messages[-1]['content'] %}@joke{% else %}@answer{% endif %}"
)


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model that calls tools and writes JSON.

    A tiny Llama whose layers add nothing, so that each token decides the next. The pieces of its answers are tokens of
    its tokenizer, and its chat template ends in a cue: tool calls where there are tools, a joke where the question
    names its fields, and an answer otherwise.
    """
    folder = tmp_path_factory.mktemp("scripted")
    chains = [_ANSWER, _JOKE]
    for name, arguments in CALLS.items():
        written = json.dumps(arguments, ensure_ascii=False)
        opening = f'<tool_call>\n{{"name": "{name}", "arguments":'
        chains.append([f"@call {name}", opening, f" {written[:-1]}", "}}", "\n</tool_call>"])
    first = json.dumps(CALLS["magic_function"])
    chains.append(['<tool_call>\n{"name": "', f'magic_function", "arguments": {first}}}', "\n</tool_call>"])
    tokenizer = byte_level()
    tokenizer.chat_template = _SCRIPTED_TEMPLATE
    pieces = dict.fromkeys(piece for chain in chains for piece in chain)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    ids = [[tokenizer.convert_tokens_to_ids(piece) for piece in chain] + [tokenizer.eos_token_id] for chain in chains]
    _scripted_model(len(tokenizer), ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _scripted_model(vocab_size: int, chains: list[list[int]]) -> LlamaForCausalLM:
    """A model that continues each of these chains of token ids."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    )
    known = sorted({token for chain in chains for token in chain})
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        rows = torch.eye(64)
        model.model.embed_tokens.weight[known] = rows[: len(known)]
        for chain in chains:
            for token, following in pairwise(chain):
                model.lm_head.weight[following] += rows[known.index(token)]
    return model
