"""One table over every way from a retriever to the chat model: chunks are reused, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware, dynamic_prompt
from langchain_classic.chains import (
    ConversationalRetrievalChain,
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.question_answering import load_qa_chain
from langchain_classic.chains.summarize import load_summarize_chain
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool, tool
from pydantic import BaseModel

from cachecraft_rag.prompt import EncodedPrompt
from cachecraft_rag.tool_calls import written_call
from langchain_cachecraft import ChatCacheCraft
from tests.conftest import passage
from tests.plain_data import find_tensors
from tests.scripted_engine import ScriptedEngine
from tests.tiny_tokenizers import byte_level

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")

TEXTS = tuple(f"\n{number}. TERM.\n\n{passage(number)}\n\t(a) “Notice” {{x}} it's;\n" for number in range(3))
PROMPT = ChatPromptTemplate.from_messages([("system", "Answer from the contracts.\n\n{context}"), ("human", "{input}")])
HISTORY = [HumanMessage("Which contract is it?"), AIMessage("The lease.")]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "lease"}}\n</tool_call>'


class ListRetriever(BaseRetriever):
    """Returns the same documents for every question."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return list(self.documents)


Build = Callable[[ChatCacheCraft, ListRetriever], Runnable[str, Any]]


@dataclass(frozen=True)
class Path:
    """A chain from a question to an answer, and what the model says on it."""

    build: Build
    script: tuple[str, ...] = ()


PATHS: dict[str, Path] = {}


def path(name: str, *script: str) -> Callable[[Build], Build]:
    """Put a chain into the table."""

    def add(build: Build) -> Build:
        PATHS[name] = Path(build, script)
        return build

    return add


def format_docs(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


@path("stuff")
def _stuff(chat: ChatCacheCraft, retriever: ListRetriever) -> Runnable[str, Any]:
    return {"input": RunnablePassthrough(), "context": retriever} | create_stuff_documents_chain(chat, PROMPT)


@path("retrieval chain")
def _retrieval(chat: ChatCacheCraft, retriever: ListRetriever) -> Runnable[str, Any]:
    return _named("input") | create_retrieval_chain(retriever, create_stuff_documents_chain(chat, PROMPT))


@path("RetrievalQA")
def _retrieval_qa(chat: ChatCacheCraft, retriever: ListRetriever) -> Runnable[str, Any]:
    return _named("query") | RetrievalQA.from_chain_type(chat, retriever=retriever)


@path("LCEL with format_docs")
def _formatted(chat: ChatCacheCraft, retriever: ListRetriever) -> Runnable[str, Any]:
    return {"context": retriever | format_docs, "input": RunnablePassthrough()} | PROMPT | chat


@path("LCEL without format_docs")
def _unformatted(chat: ChatCacheCraft, retriever: ListRetriever) -> Runnable[str, Any]:
    return {"context": retriever, "input": RunnablePassthrough()} | PROMPT | chat


def _over_documents(chain: Callable[[ChatCacheCraft], Any]) -> Build:
    def build(chat: ChatCacheCraft, retriever: ListRetriever) -> Runnable[str, Any]:
        return {"input_documents": retriever, "question": RunnablePassthrough()} | chain(chat)

    return build


for kind in ("stuff", "refine", "map_reduce"):
    path(f"{kind}, question")(_over_documents(lambda chat, kind=kind: load_qa_chain(chat, chain_type=kind)))
    path(f"{kind}, summary")(_over_documents(lambda chat, kind=kind: load_summarize_chain(chat, chain_type=kind)))


@path("history-aware retriever")
def _history_aware(chat: ChatCacheCraft, retriever: ListRetriever) -> Runnable[str, Any]:
    condense = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "{input}"), ("human", "Ask that in one sentence.")]
    )
    answer = ChatPromptTemplate.from_messages(
        [("system", "Answer from:\n{context}"), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    found = create_history_aware_retriever(chat, retriever, condense)
    chain = create_retrieval_chain(found, create_stuff_documents_chain(chat, answer))
    return RunnableLambda(lambda question: {"input": question, "chat_history": HISTORY}) | chain


@path("conversational retrieval")
def _conversational(chat: ChatCacheCraft, retriever: ListRetriever) -> Runnable[str, Any]:
    chain = ConversationalRetrievalChain.from_llm(chat, retriever)
    return RunnableLambda(lambda question: {"question": question, "chat_history": HISTORY}) | chain


for response_format in ("content", "content_and_artifact"):

    @path(f"agent with a retriever tool, {response_format}", CALL, "In May.")
    def _retriever_tool(
        chat: ChatCacheCraft, retriever: ListRetriever, response_format: Any = response_format
    ) -> Runnable[str, Any]:
        search = create_retriever_tool(retriever, "search", "Search.", response_format=response_format)
        return _asked | create_agent(chat, [search])


@path("agent with a tool that returns documents", CALL, "In May.")
def _documents_tool(chat: ChatCacheCraft, retriever: ListRetriever) -> Runnable[str, Any]:
    @tool
    def search(query: str) -> list[Document]:
        """Search."""
        return retriever.invoke(query)

    return _asked | create_agent(chat, [search])


class Verdict(BaseModel):
    """When something ends."""

    year: int


@path(
    "agent with a structured answer",
    'search", "arguments": {"query": "lease"}}',
    'Verdict", "arguments": {"year": 2030}}',
)
def _structured(chat: ChatCacheCraft, retriever: ListRetriever) -> Runnable[str, Any]:
    search = create_retriever_tool(retriever, "search", "Search.", response_format="content_and_artifact")
    return _asked | create_agent(chat, [search], response_format=Verdict)


@path("agent with a dynamic prompt")
def _dynamic_prompt(chat: ChatCacheCraft, retriever: ListRetriever) -> Runnable[str, Any]:
    @dynamic_prompt
    def with_documents(request: Any) -> str:
        return f"Answer from:\n{format_docs(retriever.invoke(request.state['messages'][-1].text))}"

    return _asked | create_agent(chat, [], middleware=[with_documents])


@path("agent that summarizes its history", CALL, "The lease ends.", "In May.")
def _summarizing(chat: ChatCacheCraft, retriever: ListRetriever) -> Runnable[str, Any]:
    search = create_retriever_tool(retriever, "search", "Search.")
    summarize = SummarizationMiddleware(
        chat, trigger=("messages", 3), keep=("messages", 1), trim_tokens_to_summarize=None
    )
    return _asked | create_agent(chat, [search], middleware=[summarize])


def _named(name: str) -> Runnable[str, Any]:
    return RunnableLambda(lambda question: {name: question})


_asked = RunnableLambda(lambda question: {"messages": [HumanMessage(question)]})

every_path = pytest.mark.parametrize("name", PATHS)
both_ways = pytest.mark.parametrize("way", ["invoke", "ainvoke"])


def _content(message: BaseMessage) -> str:
    """What the model reads of a message: a template that prints no calls gets them in the content."""
    calls = message.tool_calls if isinstance(message, AIMessage) else []
    return "\n".join(filter(None, [message.text, *(written_call(call["name"], call["args"]) for call in calls)]))


class Recorder(BaseCallbackHandler):
    """What LangChain gave to the chat model, and what came back."""

    def __init__(self) -> None:
        self.rendered: list[str] = []
        self.results: list[LLMResult] = []

    def on_chat_model_start(self, serialized: Any, messages: list[list[BaseMessage]], **kwargs: Any) -> None:
        tools = kwargs["invocation_params"].get("tools")
        roles = {"human": "user", "ai": "assistant"}
        for chat in messages:
            turns = [{"role": roles.get(message.type, message.type), "content": _content(message)} for message in chat]
            text = byte_level().apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=True)
            is_begun = kwargs["invocation_params"].get("tool_choice") == "any"
            self.rendered.append(text + ('{"name": "' if is_begun else ""))

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.results.append(response)

    def sums(self, *names: str) -> int:
        """Sum of some figures over all answers."""
        generations: list[Any] = [one for result in self.results for (one,) in result.generations]
        return sum(one.message.response_metadata["cachecraft"][name] for one in generations for name in names)


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
def read(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> list[EncodedPrompt]:
    """Every prompt that the model reads."""
    prompts: list[EncodedPrompt] = []
    encode = engine.prompts.encode

    def recording(*args: Any) -> EncodedPrompt:
        prompts.append(encode(*args))
        return prompts[-1]

    monkeypatch.setattr(engine.prompts, "encode", recording)
    return prompts


@pytest.fixture
def retriever() -> ListRetriever:
    return ListRetriever(documents=[Document(text, metadata={"source": f"{n}.pdf"}) for n, text in enumerate(TEXTS)])


async def answer(name: str, way: str, chat: ChatCacheCraft, retriever: ListRetriever, question: str) -> Any:
    """Ask a question on a path; what comes out, and what LangChain saw of it."""
    assert isinstance(chat.engine, ScriptedEngine)
    chat.engine.script = list(PATHS[name].script)
    recorder, chain = Recorder(), PATHS[name].build(chat, retriever)
    config: Any = {"callbacks": [recorder]}
    result = chain.invoke(question, config) if way == "invoke" else await chain.ainvoke(question, config)
    assert chat.engine.script == []
    return result, recorder


@both_ways
@every_path
async def test_a_second_question_reuses_95_percent_of_the_chunk_tokens(
    name: str, way: str, engine: ScriptedEngine, read: list[EncodedPrompt], retriever: ListRetriever
) -> None:
    chat = ChatCacheCraft(engine=engine, max_tokens=8)
    await answer(name, way, chat, retriever, "What ends first?")
    read.clear()
    retriever.documents.reverse()
    result, recorder = await answer(name, way, chat, retriever, "Who signs?")
    assert len(recorder.results) == len(read)
    num_expected = sum(_chunk_tokens(engine, prompt) for prompt in read)
    assert num_expected >= 3 * 100
    assert recorder.sums("reused_tokens", "recomputed_tokens") >= 0.95 * num_expected
    assert recorder.sums("chunk_misses") == 0
    assert find_tensors([result, recorder.results]) == []


@both_ways
@every_path
async def test_answers_at_ratio_1_are_those_of_a_full_prefill_and_every_prompt_is_read_as_rendered(
    name: str, way: str, engine: ScriptedEngine, read: list[EncodedPrompt], retriever: ListRetriever
) -> None:
    plain = ChatCacheCraft(engine=engine, max_tokens=8, reuse=False)
    _, recorder = await answer(name, way, plain, retriever, "What ends first?")
    assert recorder.sums("chunk_hits", "reused_tokens", "recomputed_tokens") == 0
    assert sorted(engine.prompts.decode(prompt.token_ids) for prompt in read) == sorted(recorder.rendered)
    expected = sorted(engine.computed)
    assert all(expected)
    for _ in range(2):  # computed, then reused
        engine.computed.clear()
        chat = ChatCacheCraft(engine=engine, max_tokens=8, recompute_ratio=1.0)
        _, recorder = await answer(name, way, chat, retriever, "What ends first?")
        assert sorted(engine.computed) == expected
    assert recorder.sums("chunk_hits") >= 3


def _chunk_tokens(engine: ScriptedEngine, prompt: EncodedPrompt) -> int:
    """Tokens of the retrieved texts in a prompt, as they are or as Python prints them; found without the engine."""
    forms = {form for text in TEXTS for form in (text.strip(), repr(text)[1:-1].strip())}
    return sum(prompt.text.count(form) * len(engine.prompts.encode_chunk(form)) for form in forms)
