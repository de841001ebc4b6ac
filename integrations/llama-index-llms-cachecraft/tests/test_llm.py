"""``CacheCraftLLM``: what the model reads and what comes back, by each of the eight methods."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import CacheControl, CachePoint
from llama_index.core.llms import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.prompts import PromptTemplate

from cachecraft_rag import PromptTooLongError, RagPrompt
from cachecraft_rag.prompt import EncodedPrompt
from llama_index.llms.cachecraft import CacheCraftLLM
from tests.conftest import passage

Answer = tuple[list[str], list[str], dict[str, Any]]
Asker = Callable[..., Awaitable[Answer]]
Recorder = Callable[[CacheCraftLLM], list[EncodedPrompt]]

QUESTION = "What does the lease say?"


async def complete(llm: CacheCraftLLM, **options: Any) -> Answer:
    response = llm.complete(QUESTION, **options)
    return [response.text], [], response.raw


async def acomplete(llm: CacheCraftLLM, **options: Any) -> Answer:
    response = await llm.acomplete(QUESTION, **options)
    return [response.text], [], response.raw


async def stream_complete(llm: CacheCraftLLM, **options: Any) -> Answer:
    steps = list(llm.stream_complete(QUESTION, **options))
    return [step.text for step in steps], [step.delta for step in steps], steps[-1].raw


async def astream_complete(llm: CacheCraftLLM, **options: Any) -> Answer:
    steps = [step async for step in await llm.astream_complete(QUESTION, **options)]
    return [step.text for step in steps], [step.delta for step in steps], steps[-1].raw


async def chat(llm: CacheCraftLLM, **options: Any) -> Answer:
    response = llm.chat([ChatMessage(content=QUESTION)], **options)
    assert response.message.role == MessageRole.ASSISTANT
    return [response.message.content], [], response.raw


async def achat(llm: CacheCraftLLM, **options: Any) -> Answer:
    response = await llm.achat([ChatMessage(content=QUESTION)], **options)
    assert response.message.role == MessageRole.ASSISTANT
    return [response.message.content], [], response.raw


async def stream_chat(llm: CacheCraftLLM, **options: Any) -> Answer:
    steps = list(llm.stream_chat([ChatMessage(content=QUESTION)], **options))
    assert {step.message.role for step in steps} == {MessageRole.ASSISTANT}
    return [step.message.content for step in steps], [step.delta for step in steps], steps[-1].raw


async def astream_chat(llm: CacheCraftLLM, **options: Any) -> Answer:
    steps = [step async for step in await llm.astream_chat([ChatMessage(content=QUESTION)], **options)]
    assert {step.message.role for step in steps} == {MessageRole.ASSISTANT}
    return [step.message.content for step in steps], [step.delta for step in steps], steps[-1].raw


STREAMS = (stream_complete, astream_complete, stream_chat, astream_chat)
ALL = (complete, acomplete, chat, achat, *STREAMS)
every_method = pytest.mark.parametrize("ask", ALL, ids=lambda ask: ask.__name__)
every_stream = pytest.mark.parametrize("ask", STREAMS, ids=lambda ask: ask.__name__)


@every_method
async def test_every_method_answers_like_the_engine(ask: Asker, llm: CacheCraftLLM) -> None:
    prompt = RagPrompt.from_messages([{"role": "user", "content": QUESTION}])
    expected = llm.engine.generate(prompt, max_new_tokens=8)
    texts, _, raw = await ask(llm)
    assert expected.text
    assert texts[-1] == expected.text
    assert raw["usage"] == {
        "prompt_tokens": expected.stats.prompt_tokens,
        "completion_tokens": 8,
        "total_tokens": expected.stats.prompt_tokens + 8,
    }
    assert raw["finish_reason"] == "length"
    assert raw["cachecraft"]["prompt_tokens"] == expected.stats.prompt_tokens


@every_method
async def test_the_model_reads_the_rendered_chat_template(
    ask: Asker, llm: CacheCraftLLM, read: list[EncodedPrompt]
) -> None:
    await ask(llm)
    [prompt] = read
    assert prompt.text == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert llm.engine.prompts.decode(prompt.token_ids) == prompt.text


@every_stream
async def test_a_stream_gives_deltas_and_the_text_so_far(ask: Asker, llm: CacheCraftLLM) -> None:
    texts, deltas, _ = await ask(llm)
    assert len(deltas) > 2
    assert texts == ["".join(deltas[: index + 1]) for index in range(len(deltas))]


@every_method
async def test_options_of_a_call_override_the_fields(ask: Asker, make_llm: Callable[..., CacheCraftLLM]) -> None:
    llm = make_llm(temperature=0.0, max_new_tokens=8)
    [*_, plain], _, _ = await ask(llm)
    drawn = {(await ask(llm, temperature=2.0, seed=seed))[0][-1] for seed in (1, 2, 1)}
    assert len(drawn) == 2
    [*_, stopped], _, raw = await ask(llm, stop=[plain[3:5]])
    assert stopped == plain[:3]
    assert raw["finish_reason"] == "stop"
    assert (await ask(llm, max_tokens=3))[2]["usage"]["completion_tokens"] == 3
    assert (await ask(llm, max_new_tokens=2, top_k=5, top_p=0.5))[2]["usage"]["completion_tokens"] == 2
    assert (await ask(llm, temperature=None, max_tokens=None))[0][-1] == plain


@every_method
async def test_an_unknown_option_is_refused_by_name(ask: Asker, llm: CacheCraftLLM) -> None:
    with pytest.raises(ValueError, match=r"beams, frobnicate: not an option of a call; allowed are max_new_tokens"):
        await ask(llm, frobnicate=1, beams=4)
    with pytest.raises(ValueError, match="temperature"):
        await ask(llm, temperature=-1.0)
    with pytest.raises(ValueError, match="max_tokens: 3 and max_new_tokens=4 mean the same"):
        await ask(llm, max_tokens=3, max_new_tokens=4)


@every_method
async def test_headers_that_llama_index_sends_to_every_llm_are_accepted(ask: Asker, llm: CacheCraftLLM) -> None:
    texts, _, _ = await ask(llm, extra_headers={"a": "b"})
    assert texts == (await ask(llm))[0]


@every_method
async def test_a_prompt_over_the_context_window_is_refused_with_both_numbers(
    ask: Asker, make_llm: Callable[..., CacheCraftLLM]
) -> None:
    llm = make_llm(context_window=20)
    with pytest.raises(PromptTooLongError, match=r"the prompt has \d+ tokens, but the context window holds 20"):
        await ask(llm)


@every_method
async def test_raw_is_plain_data(ask: Asker, llm: CacheCraftLLM) -> None:
    _, _, raw = await ask(llm)
    assert json.loads(json.dumps(raw)) == raw
    assert sorted(raw) == ["cachecraft", "finish_reason", "usage"]


def test_only_the_last_step_of_a_stream_has_statistics(llm: CacheCraftLLM) -> None:
    *steps, last = llm.stream_complete(QUESTION)
    assert [step.raw for step in steps] == [None] * len(steps)
    assert last.delta == ""
    assert last.raw is not None


def test_a_formatted_prompt_is_read_as_it_is(llm: CacheCraftLLM, read: list[EncodedPrompt]) -> None:
    text = "<|im_start|>user\nHello<|im_end|>\n"
    llm.complete(text, formatted=True)
    list(llm.stream_complete(text, formatted=True))
    assert [prompt.text for prompt in read] == [text, text]
    assert llm.engine.prompts.decode(read[0].token_ids) == text


def test_a_model_without_a_chat_template_reads_plain_text(
    make_llm: Callable[..., CacheCraftLLM], record: Recorder
) -> None:
    llm = make_llm(chat_template=False, system_prompt="Be brief.")
    read = record(llm)
    assert not llm.metadata.is_chat_model
    llm.complete(QUESTION)
    llm.chat([ChatMessage(content=QUESTION)])
    llm.predict(PromptTemplate("Say {word}."), word="yes")
    assert [prompt.text for prompt in read] == [
        f"Be brief.\n\n{QUESTION}",
        f"system: Be brief.\nuser: {QUESTION}\nassistant: ",
        "Be brief.\n\nSay yes.",
    ]


def test_the_system_prompt_is_read_once(make_llm: Callable[..., CacheCraftLLM], record: Recorder) -> None:
    llm = make_llm(system_prompt="Be brief.")
    read = record(llm)
    llm.complete("Hello")
    llm.chat([ChatMessage(content="Hello")])
    llm.predict(PromptTemplate("Hello"))
    head = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert [prompt.text for prompt in read] == [f"{head}<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"] * 3
    llm.chat([ChatMessage(role="system", content="Be long."), ChatMessage(content="Hello")])
    assert "Be brief." not in read[-1].text


def test_prompt_functions_of_the_user_replace_the_chat_template(
    make_llm: Callable[..., CacheCraftLLM], record: Recorder
) -> None:
    llm = make_llm(
        completion_to_prompt=lambda prompt: f"Q: {prompt}\nA:",
        messages_to_prompt=lambda messages: "|".join(f"{message.role.value}={message.content}" for message in messages),
    )
    read = record(llm)
    llm.complete("Hello")
    llm.chat([ChatMessage(role="system", content="S"), ChatMessage(content="Hello")])
    assert [prompt.text for prompt in read] == ["Q: Hello\nA:", "system=S|user=Hello"]


def test_roles_and_text_blocks_reach_the_template(llm: CacheCraftLLM, read: list[EncodedPrompt]) -> None:
    llm.chat(
        [
            ChatMessage(role="developer", content="D"),
            ChatMessage(role="user", content=[TextBlock(text="one"), TextBlock(text="two")]),
            ChatMessage(role="chatbot", content="C"),
            ChatMessage(role="model", content="M"),
            ChatMessage(role="function", content="F"),
            ChatMessage(role="tool", content="T", additional_kwargs={"tool_call_id": "1"}),
            ChatMessage(role="assistant", blocks=[]),
        ]
    )
    turns = [
        ("system", "D"),
        ("user", "one\ntwo"),
        ("assistant", "C"),
        ("assistant", "M"),
        ("tool", "F"),
        ("tool", "T"),
    ]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [*turns, ("assistant", "")])
    assert read[0].text == f"{expected}<|im_start|>assistant\n"


def test_a_text_block_before_a_cache_point_is_a_chunk(llm: CacheCraftLLM) -> None:
    def ask(question: str) -> dict[str, Any]:
        chunk = [TextBlock(text=passage(1)), CachePoint(cache_control=CacheControl(type="ephemeral"))]
        return llm.chat([ChatMessage(content=[*chunk, TextBlock(text=question)])]).raw["cachecraft"]

    assert ask("What?")["chunk_misses"] == 1
    assert ask("Why?")["chunk_hits"] == 1


def test_an_image_is_refused(make_llm: Callable[..., CacheCraftLLM]) -> None:
    picture = ChatMessage(content=[TextBlock(text="Look"), ImageBlock(image=b"R0lGODlh", image_mimetype="image/gif")])
    for llm in (make_llm(), make_llm(chat_template=False)):
        with pytest.raises(ValueError, match=r"messages\[1\]: a ImageBlock was given, but this model reads text only"):
            llm.chat([ChatMessage(content="Hello"), picture])


def test_an_empty_chat_is_refused(llm: CacheCraftLLM) -> None:
    with pytest.raises(ValueError, match="messages: an empty list"):
        llm.chat([])


def test_metadata_tells_the_truth_about_the_model(make_llm: Callable[..., CacheCraftLLM]) -> None:
    metadata = make_llm(max_new_tokens=77).metadata
    assert (metadata.context_window, metadata.num_output) == (8192, 77)
    assert metadata.is_chat_model
    assert not metadata.is_function_calling_model
    assert metadata.model_name == "LlamaForCausalLM"
    assert make_llm(context_window=500).metadata.context_window == 500


def test_it_is_an_llm_of_its_own_class() -> None:
    bases = [base.__name__ for base in CacheCraftLLM.__mro__]
    assert "BaseLLM" in bases
    assert "CustomLLM" not in bases
    assert CacheCraftLLM.class_name() == "CacheCraftLLM"
