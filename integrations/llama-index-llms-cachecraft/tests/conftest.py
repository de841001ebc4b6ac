"""Fixtures: a tiny model behind ``CacheCraftLLM``, what it read, and what LlamaIndex reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent

from cachecraft_rag.prompt import EncodedPrompt
from llama_index.llms.cachecraft import CacheCraftLLM
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

LLMMaker = Callable[..., CacheCraftLLM]
Recorder = Callable[[CacheCraftLLM], list[EncodedPrompt]]


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


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model with its tokenizer, to be loaded by name."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    make("llama").save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder
