"""Fixtures: a tiny model behind ``CacheCraftLLM``, what it read, and what LlamaIndex reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from cachecraft_rag.prompt import EncodedPrompt
from llama_index.llms.cachecraft import CacheCraftLLM
from tests import plain_data
from tests.conftest import passage
from tests.scripted_engine import ScriptedEngine
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

LLMMaker = Callable[..., CacheCraftLLM]
Recorder = Callable[[CacheCraftLLM], list[EncodedPrompt]]


TEXTS = tuple(f"\n{number}. TERM.\n\n{passage(number)}\n\t(a) “Notice” {{x}};\n" for number in range(3))

# Qwen's way of printing tools and calls, shortened.
TOOL_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nCall one of:{% for tool in tools %} {{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}"
    "{%- if message.content %}{{ '\n' + message.content }}{% endif -%}"
    "{%- for call in message.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)


@pytest.fixture
def make_scripted() -> Callable[..., ScriptedEngine]:
    """``make_scripted()`` for an engine with the usual template, ``make_scripted(tools=True)`` for one with tools."""
    return lambda tools=False: ScriptedEngine(TOOL_TEMPLATE if tools else None)


class ListRetriever(BaseRetriever):
    """Returns the same nodes for every query."""

    def __init__(self, nodes: list[TextNode]) -> None:
        super().__init__()
        self.nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0) for node in self.nodes]


@pytest.fixture
def make_retriever() -> Callable[[list[TextNode]], BaseRetriever]:
    """Make a retriever of given nodes."""
    return ListRetriever


@pytest.fixture
def retriever() -> ListRetriever:
    """Three contract clauses with line breaks, quotes, braces and tabs, with metadata; ``retriever.nodes`` has them."""
    return ListRetriever([TextNode(text=text, metadata={"page_label": str(i)}) for i, text in enumerate(TEXTS)])


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture
def make_llm() -> Iterator[LLMMaker]:
    """Make LLMs on tiny models: ``make_llm(max_new_tokens=4)``; closed after the test."""
    made: list[CacheCraftLLM] = []

    def maker(chat_template: bool = True, **fields: Any) -> CacheCraftLLM:
        if "engine" not in fields:
            model = make("llama", max_position_embeddings=8192)
            fields |= {"hf_model": model, "tokenizer": byte_level(chat_template)}
        made.append(CacheCraftLLM(**{"max_new_tokens": 8, **fields}))
        return made[-1]

    yield maker
    for llm in made:
        llm.close()


@pytest.fixture
def llm(make_llm: LLMMaker) -> CacheCraftLLM:
    return make_llm()


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """``record(llm)`` is a list to which every prompt is added that the LLM's model reads, as its engine encoded it."""

    def recorder(llm: CacheCraftLLM) -> list[EncodedPrompt]:
        prompts: list[EncodedPrompt] = []
        encode = llm.engine.prompts.encode
        monkeypatch.setattr(llm.engine.prompts, "encode", lambda *args: prompts.append(encode(*args)) or prompts[-1])
        return prompts

    return recorder


@pytest.fixture
def read(llm: CacheCraftLLM, record: Recorder) -> list[EncodedPrompt]:
    """Every prompt that ``llm``'s model reads."""
    return record(llm)


class EventLog(BaseEventHandler):
    """Keeps every event of LlamaIndex."""

    events: list[BaseEvent] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "EventLog"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    def of(self, *kinds: type[BaseEvent]) -> list[Any]:
        """Events of some kinds, in order."""
        return [event for event in self.events if isinstance(event, kinds)]

    def take_stats(self) -> list[dict[str, Any]]:
        """Statistics of the answers since the last call of this method."""
        ends = self.of(LLMChatEndEvent, LLMCompletionEndEvent)
        self.events.clear()
        return [end.response.raw["cachecraft"] for end in ends]


@pytest.fixture
def log() -> Iterator[EventLog]:
    """What LlamaIndex reports from now on."""
    handler = EventLog()
    root = get_dispatcher()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers = [other for other in root.event_handlers if other is not handler]


@pytest.fixture
def find_tensors() -> Callable[[Any], list[Any]]:
    """``find_tensors(thing)``: every tensor and module that an object holds, through containers and attributes."""
    return plain_data.find_tensors


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model with its tokenizer, to be loaded by name."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    make("llama").save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder
