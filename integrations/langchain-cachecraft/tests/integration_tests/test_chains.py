"""RAG chains as users write them: every chunk is recognised without wiring, and reuse does not change the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from cachecraft_rag import RagPrompt
from langchain_cachecraft import ChatCacheCraft
from langchain_cachecraft.messages import chat_messages
from tests.conftest import passage

PROMPT = ChatPromptTemplate.from_messages([("system", "Answer from the contracts.\n\n{context}"), ("human", "{input}")])
QUESTIONS = ["What ends first?", "Which garden is named?", "Who pays the invoice?"]


class Recorder(BaseCallbackHandler):
    """Keeps the messages that went into the chat model and the figures that came out."""

    def __init__(self) -> None:
        self.prompts: list[list[BaseMessage]] = []
        self.stats: list[dict[str, Any]] = []

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        self.prompts += messages

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        generation: Any = response.generations[0][0]
        self.stats.append(generation.message.response_metadata["cachecraft"])

    def figures(self, name: str) -> list[Any]:
        return [stats[name] for stats in self.stats]


def format_docs(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def stuff_chain(chat: ChatCacheCraft, retriever: Runnable[str, Any]) -> Runnable[str, str]:
    chain = create_stuff_documents_chain(chat, PROMPT)
    return {"input": RunnablePassthrough(), "context": retriever} | chain


def retrieval_chain(chat: ChatCacheCraft, retriever: Runnable[str, Any]) -> Runnable[str, str]:
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(chat, PROMPT))
    return (lambda question: {"input": question}) | chain.pick("answer")


def formatted_chain(chat: ChatCacheCraft, retriever: Runnable[str, Any]) -> Runnable[str, str]:
    inputs = {"context": retriever | format_docs, "input": RunnablePassthrough()}
    return inputs | PROMPT | chat | StrOutputParser()


def unformatted_chain(chat: ChatCacheCraft, retriever: Runnable[str, Any]) -> Runnable[str, str]:
    """What beginners write: the documents reach the prompt as Python prints them."""
    inputs = {"context": retriever, "input": RunnablePassthrough()}
    return inputs | PROMPT | chat | StrOutputParser()


chains = pytest.mark.parametrize(
    "make_chain", [stuff_chain, retrieval_chain, formatted_chain, unformatted_chain], ids=lambda chain: chain.__name__
)


@chains
def test_every_chunk_is_found_and_reused_by_the_next_question(
    make_chain: Any, make_chat: Any, make_retriever: Any
) -> None:
    recorder, usage = Recorder(), UsageMetadataCallbackHandler()
    chain = make_chain(make_chat(), make_retriever(1, 2, 3))
    for question in QUESTIONS:
        assert chain.invoke(question, config={"callbacks": [recorder, usage]})
    assert recorder.figures("chunk_misses") == [3, 0, 0]
    assert recorder.figures("chunk_hits") == [0, 3, 3]
    assert recorder.figures("fallback_reason") == [None] * 3
    (total,) = usage.usage_metadata.values()
    assert total["input_token_details"]["cache_read"] == sum(recorder.figures("reused_tokens")) > 0


@chains
def test_recomputing_everything_gives_the_answer_of_the_plain_model(
    make_chain: Any, make_chat: Any, make_retriever: Any
) -> None:
    recorder, retriever = Recorder(), make_retriever(1, 2, 3)
    reusing = make_chain(make_chat(recompute_ratio=1.0), retriever)
    plain = make_chain(make_chat(reuse=False), retriever)
    make_chain(make_chat(), retriever).invoke(QUESTIONS[0])
    for question in QUESTIONS:
        assert reusing.invoke(question, config={"callbacks": [recorder]}) == plain.invoke(question)
    assert recorder.figures("chunk_hits") == [3] * 3


@chains
def test_the_model_reads_exactly_the_rendered_prompt(make_chain: Any, make_chat: Any, make_retriever: Any) -> None:
    recorder, chat = Recorder(), make_chat()
    make_chain(chat, make_retriever(1, 2, 3)).invoke(QUESTIONS[0], config={"callbacks": [recorder]})
    engine, messages = chat.get_engine(), chat_messages(recorder.prompts[0])
    rendered = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    encoded = engine.prompts.encode(RagPrompt.from_messages(messages), engine.library.registry, engine.config.namespace)
    assert len(encoded.spans) == 3
    assert len(encoded.token_ids) == recorder.stats[0]["prompt_tokens"]
    assert engine.prompts.decode(encoded.token_ids) == rendered


@chains
def test_a_streamed_chain_gives_the_text_of_invoke(make_chain: Any, make_chat: Any, make_retriever: Any) -> None:
    recorder = Recorder()
    chain = make_chain(make_chat(), make_retriever(1, 2, 3))
    config: Any = {"callbacks": [recorder]}
    chain.invoke(QUESTIONS[0])
    chain.invoke(QUESTIONS[1])
    assert "".join(chain.stream(QUESTIONS[0], config=config)) == chain.invoke(QUESTIONS[0], config=config)
    assert recorder.figures("chunk_hits") == [3, 3]


@chains
def test_a_batch_gives_the_answers_of_single_calls_in_order(
    make_chain: Any, make_chat: Any, make_retriever: Any
) -> None:
    chain = make_chain(make_chat(recompute_ratio=1.0), make_retriever(1, 2, 3))
    questions = QUESTIONS * 2
    assert chain.batch(questions) == [chain.invoke(question) for question in questions]


@chains
async def test_async_chains_find_the_same_chunks(make_chain: Any, make_chat: Any, make_retriever: Any) -> None:
    recorder = Recorder()
    chain = make_chain(make_chat(recompute_ratio=1.0), make_retriever(1, 2, 3))
    config: Any = {"callbacks": [recorder]}
    answer = await chain.ainvoke(QUESTIONS[0], config=config)
    parts = [part async for part in chain.astream(QUESTIONS[0], config=config)]
    (batched,) = await chain.abatch([QUESTIONS[0]], config=config)
    assert answer == "".join(parts) == batched
    assert recorder.figures("chunk_misses") == [3, 0, 0]
    assert recorder.figures("chunk_hits") == [0, 3, 3]


def test_chunks_retrieved_before_the_chat_model_was_loaded_are_found(make_chat: Any, make_retriever: Any) -> None:
    chat = make_chat(namespace="late")
    documents = make_retriever(31, 32).invoke("ends")
    answer = chat.invoke(PROMPT.format_messages(context=format_docs(documents), input=QUESTIONS[0]))
    assert answer.response_metadata["cachecraft"]["chunk_misses"] == 2


def test_namespaces_share_no_chunk(make_chat: Any, make_retriever: Any) -> None:
    retriever, recorder = make_retriever(1, 2), Recorder()
    for namespace in ("a", "b", "a"):
        chain = formatted_chain(make_chat(namespace=namespace), retriever)
        chain.invoke(QUESTIONS[0], config={"callbacks": [recorder]})
    assert recorder.figures("chunk_hits") == [0, 0, 2]


def test_a_chat_model_without_automatic_registration_learns_nothing(model_folder: str, make_retriever: Any) -> None:
    chat, recorder = ChatCacheCraft(model=model_folder, auto_register=False, namespace="manual"), Recorder()
    chain = formatted_chain(chat, make_retriever(1, 2))
    for _ in range(2):
        chain.invoke(QUESTIONS[0], config={"callbacks": [recorder]})
    assert recorder.figures("chunk_hits") == recorder.figures("chunk_misses") == [0, 0]
    chat.get_engine().register([passage(1)], "manual")
    chain.invoke(QUESTIONS[0], config={"callbacks": [recorder]})
    assert recorder.figures("chunk_misses")[-1] == 1
    chat.close()
