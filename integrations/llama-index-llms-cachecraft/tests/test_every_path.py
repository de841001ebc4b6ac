"""One table over every way from a retriever to the LLM: chunks are reused, and nothing else changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent, LLMCompletionStartEvent
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.tools import RetrieverTool
from pydantic import BaseModel

from cachecraft_rag.prompt import EncodedPrompt
from llama_index.llms.cachecraft import CacheCraftLLM, CacheCraftPrefillEvent
from tests.tiny_tokenizers import byte_level

Path = Callable[[CacheCraftLLM, Any, str], Awaitable[Any]]

PATHS: dict[str, Path] = {}
SCRIPTS: dict[str, list[str]] = {}


class Verdict(BaseModel):
    """When something ends."""

    year: int


def path(name: str, script: list[str] | None = None) -> Callable[[Path], Path]:
    """Put a path into the table, with what the model says on it."""

    def add(run: Path) -> Path:
        PATHS[name], SCRIPTS[name] = run, script or []
        return run

    return add


def _query_engine(**options: Any) -> Path:
    async def run(llm: CacheCraftLLM, retriever: Any, question: str) -> Any:
        return await RetrieverQueryEngine.from_args(retriever, llm=llm, **options).aquery(question)

    return run


def _sync_query_engine(**options: Any) -> Path:
    async def run(llm: CacheCraftLLM, retriever: Any, question: str) -> Any:
        return RetrieverQueryEngine.from_args(retriever, llm=llm, **options).query(question)

    return run


for mode in (
    ResponseMode.COMPACT,
    ResponseMode.REFINE,
    ResponseMode.TREE_SUMMARIZE,
    ResponseMode.ACCUMULATE,
    ResponseMode.COMPACT_ACCUMULATE,
    ResponseMode.SIMPLE_SUMMARIZE,
):
    path(mode.value)(_query_engine(response_mode=mode))
    path(f"{mode.value}, sync")(_sync_query_engine(response_mode=mode))
path("structured output", ['{"year": 2030}'])(_query_engine(output_cls=Verdict))
path("structured output, sync", ['{"year": 2030}'])(_sync_query_engine(output_cls=Verdict))


@path("context chat")
async def _context_chat(llm: CacheCraftLLM, retriever: Any, question: str) -> Any:
    return await ContextChatEngine.from_defaults(retriever, llm=llm).achat(question)


@path("condense plus context chat, second turn")
async def _condense_chat(llm: CacheCraftLLM, retriever: Any, question: str) -> Any:
    engine = CondensePlusContextChatEngine.from_defaults(retriever, llm=llm)
    await engine.achat("Which contract is it?")
    return await engine.achat(question)


@path("citation query engine")
async def _citation(llm: CacheCraftLLM, retriever: Any, question: str) -> Any:
    return await CitationQueryEngine(retriever, llm=llm).aquery(question)


@path(
    "ReAct agent",
    [
        'Thought: I must look it up.\nAction: retriever_tool\nAction Input: {"input": "end"}',
        "Thought: I can answer without using any more tools.\nAnswer: The lease.",
    ],
)
async def _react_agent(llm: CacheCraftLLM, retriever: Any, question: str) -> Any:
    return await ReActAgent(tools=[RetrieverTool.from_defaults(retriever)], llm=llm).run(user_msg=question)


@path("structured predict", ['{"year": 2030}'])
async def _structured_predict(llm: CacheCraftLLM, retriever: Any, question: str) -> Any:
    found = await retriever.aretrieve(question)
    prompt = PromptTemplate("{passages}\n\n{question}")
    passages = "\n".join(node.get_content() for node in found)
    return await llm.astructured_predict(Verdict, prompt, passages=passages, question=question)


every_path = pytest.mark.parametrize("name", PATHS)


@every_path
async def test_a_second_question_reuses_95_percent_of_the_chunk_tokens(
    name: str,
    make_scripted: Callable[[], Any],
    make_llm: Callable[..., CacheCraftLLM],
    record: Callable[[CacheCraftLLM], list[EncodedPrompt]],
    retriever: Any,
    log: Any,
    find_tensors: Callable[[Any], list[Any]],
) -> None:
    llm = make_llm(engine=make_scripted())
    read = record(llm)
    llm.engine.script = list(SCRIPTS[name])
    assert str(await PATHS[name](llm, retriever, "What ends first?"))
    read.clear()
    log.events.clear()
    retriever.nodes.reverse()
    llm.engine.script = list(SCRIPTS[name])
    response = await PATHS[name](llm, retriever, "Who signs?")
    assert str(response)
    assert find_tensors([response, log.events]) == []
    stats = [event.stats for event in log.of(CacheCraftPrefillEvent)]
    assert len(stats) == len(read)
    num_expected = sum(_chunk_tokens(llm, retriever, prompt) for prompt in read)
    assert num_expected >= 3 * 100
    assert sum(one["reused_tokens"] + one["recomputed_tokens"] for one in stats) >= 0.95 * num_expected
    assert sum(one["chunk_misses"] for one in stats) == 0


@every_path
async def test_answers_at_ratio_1_are_those_of_a_full_prefill_and_every_prompt_is_read_as_rendered(
    name: str,
    make_scripted: Callable[[], Any],
    make_llm: Callable[..., CacheCraftLLM],
    record: Callable[[CacheCraftLLM], list[EncodedPrompt]],
    retriever: Any,
    log: Any,
) -> None:
    engine = make_scripted()
    reference = make_llm(engine=engine, reuse=False)
    read = record(reference)
    engine.script = list(SCRIPTS[name])
    await PATHS[name](reference, retriever, "What ends first?")
    assert sorted(engine.prompts.decode(prompt.token_ids) for prompt in read) == sorted(_rendered(log))
    expected = sorted(engine.computed)
    assert all(expected)
    for _ in range(2):  # computed, then reused
        engine.computed.clear()
        engine.script = list(SCRIPTS[name])
        log.events.clear()
        await PATHS[name](make_llm(engine=engine, recompute_ratio=1.0), retriever, "What ends first?")
        assert sorted(engine.computed) == expected
    assert sum(event.stats["chunk_hits"] for event in log.of(CacheCraftPrefillEvent)) >= 3


async def test_generation_and_modes_without_an_llm_have_no_chunks(
    llm: CacheCraftLLM, retriever: Any, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "_llm", llm)  # no_text asks for it although it needs none
    for mode, num_calls in [
        (ResponseMode.GENERATION, 1),
        (ResponseMode.NO_TEXT, 0),
        (ResponseMode.CONTEXT_ONLY, 0),
    ]:
        log.events.clear()
        await RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode).aquery("What ends first?")
        stats = log.of(CacheCraftPrefillEvent)
        assert len(stats) == num_calls
        assert all(event.stats["fallback_reason"] == "no known chunk in the prompt" for event in stats)


def _chunk_tokens(llm: CacheCraftLLM, retriever: Any, prompt: EncodedPrompt) -> int:
    """Tokens of the retrieved texts in a prompt, as they are or as Python prints them; found without the engine."""
    count = 0
    for node in retriever.nodes:
        text = node.text.strip()
        for form in {text, repr(node.text)[1:-1].strip()}:
            count += prompt.text.count(form) * len(llm.engine.prompts.encode_chunk(form))
    return count


def _rendered(log: Any) -> list[str]:
    """The prompts of LlamaIndex's own events, rendered by the tokenizer itself."""
    tokenizer = byte_level()
    prompts = []
    for event in log.of(LLMChatStartEvent, LLMCompletionStartEvent):
        if isinstance(event, LLMChatStartEvent):
            turns = [(message.role.value, message.content) for message in event.messages]
        else:
            turns = [("user", event.prompt)]
        messages = [{"role": role, "content": content} for role, content in turns]
        prompts.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return prompts
