"""Function calling with models whose template supports it: what the model reads, and what is made of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.tools import FunctionTool, RetrieverTool
from pydantic import BaseModel, Field

from cachecraft_rag.prompt import EncodedPrompt
from llama_index.llms.cachecraft import CacheCraftLLM, CacheCraftPrefillEvent

ARGUMENTS = '{"first": 2, "second": 3}'
CALL = '<tool_call>\n{"name": "add", "arguments": {"first": 2, "second": 3}}\n</tool_call>'


class Verdict(BaseModel):
    """When something ends."""

    year: int
    reason: str = Field(default="", description="Why then.")


def _add(first: int, second: int) -> int:
    return first + second


def _tools() -> list[FunctionTool]:
    return [
        FunctionTool.from_defaults(_add, name="add", description="Adds numbers."),
        FunctionTool.from_defaults(lambda: 0, name="rest", description="Does nothing."),
    ]


@pytest.fixture
def llm(make_llm: Callable[..., CacheCraftLLM], make_scripted: Callable[..., Any]) -> CacheCraftLLM:
    return make_llm(engine=make_scripted(tools=True))


def test_whether_it_calls_functions_follows_from_the_template(
    llm: CacheCraftLLM, make_llm: Callable[..., CacheCraftLLM]
) -> None:
    assert llm.metadata.is_function_calling_model
    assert not make_llm(chat_template=False).metadata.is_function_calling_model
    prints_no_calls = make_llm()  # its template lists tools, but drops the calls of a message
    assert not prints_no_calls.metadata.is_function_calling_model
    with pytest.raises(ValueError, match=r"tools: the chat template of .* use a ReActAgent"):
        prints_no_calls.chat([ChatMessage(content="Hello")], tools=_tools())


def test_agents_choose_function_calling_where_the_template_supports_it(
    llm: CacheCraftLLM, make_llm: Callable[..., CacheCraftLLM]
) -> None:
    for model, kind in [(llm, FunctionAgent), (make_llm(), ReActAgent)]:
        workflow = AgentWorkflow.from_tools_or_functions(_tools(), llm=model)
        assert [type(agent) for agent in workflow.agents.values()] == [kind]


def test_the_model_reads_the_tools_as_its_template_prints_them(llm: CacheCraftLLM, read: list[EncodedPrompt]) -> None:
    tools = _tools()
    llm.chat_with_tools(tools, user_msg="Add 2 and 3.", chat_history=[ChatMessage(role="system", content="Be brief.")])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add 2 and 3."}]
    described = [tool.metadata.to_openai_tool() for tool in tools]
    assert read[0].text == llm.engine.tokenizer.apply_chat_template(
        messages, tools=described, tokenize=False, add_generation_prompt=True
    )
    assert llm.engine.prompts.decode(read[0].token_ids) == read[0].text


@pytest.mark.parametrize("kind", ["chat", "achat", "stream", "astream"])
async def test_a_call_comes_back_as_a_block_and_what_was_said_before_as_text(kind: str, llm: CacheCraftLLM) -> None:
    llm.engine.script = [f"I add them [1].\n{CALL}"]
    steps = await _ask(kind, llm, _tools())
    said, call = steps[-1].message.blocks
    assert said.text == "I add them [1]."
    assert (call.tool_name, call.tool_kwargs) == ("add", {"first": 2, "second": 3})
    assert len(call.tool_call_id) == 9
    [selection] = llm.get_tool_calls_from_response(steps[-1])
    assert (selection.tool_id, selection.tool_name) == (call.tool_call_id, "add")
    listed = steps[-1].message.additional_kwargs["tool_calls"]
    assert json.loads(listed[0]["function"]["arguments"]) == {"first": 2, "second": 3}
    if "stream" in kind:
        assert "".join(step.delta for step in steps) == said.text
        assert len({step.message.content for step in steps[:-1]}) > 1
        assert all("tool_call" not in (step.message.content or "") for step in steps)


@pytest.mark.parametrize("kind", ["chat", "stream", "astream"])
@pytest.mark.parametrize(
    "text",
    [
        "It ends in 2030 [2], or later.",
        'An object: {"year": 2030} is <b>no</b> call.',
        '{"name": "subtract", "arguments": {}}',
        '<tool_call>\n{"name": "add", "arguments": {"first": 2,',
        "",
    ],
)
async def test_text_that_calls_no_tool_stays_text(kind: str, text: str, llm: CacheCraftLLM) -> None:
    llm.engine.script = [text]
    steps = await _ask(kind, llm, _tools())
    assert (steps[-1].message.content or "") == text
    assert kind == "chat" or "".join(step.delta for step in steps) == text
    assert llm.get_tool_calls_from_response(steps[-1], error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="it calls no tool, but says"):
        llm.get_tool_calls_from_response(steps[-1])


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        '[{"name": "add", "arguments": {"first": 2, "second": 3}}]',
        '[TOOL_CALLS][{"name": "add", "arguments": {"first": 2, "second": 3}, "id": "x"}]',
        '{"name": "add", "parameters": {"first": 2, "second": 3}}',
        '```json\n{"function": {"name": "add", "arguments": "{\\"first\\": 2, \\"second\\": 3}"}}\n```',
        '{"tool_calls": [{"name": "add", "arguments": {"first": 2, "second": 3}}]}',
    ],
    ids=["tags", "list", "mistral", "llama", "openai", "nested"],
)
def test_calls_are_read_however_the_model_wraps_them(text: str, llm: CacheCraftLLM) -> None:
    llm.engine.script = [text]
    response = llm.chat_with_tools(_tools(), "Add 2 and 3.")
    [selection] = llm.get_tool_calls_from_response(response)
    assert selection.tool_kwargs == {"first": 2, "second": 3}
    assert not response.message.content


def test_several_calls_come_back_only_where_they_are_allowed(llm: CacheCraftLLM) -> None:
    for is_allowed, num_calls in [(True, 2), (False, 1)]:
        llm.engine.script = [f"{CALL}\n{CALL}"]
        response = llm.chat_with_tools(_tools(), "Add.", allow_parallel_tool_calls=is_allowed)
        assert len(llm.get_tool_calls_from_response(response)) == num_calls


def test_a_tool_that_must_be_called_is_begun_for_the_model(llm: CacheCraftLLM, read: list[EncodedPrompt]) -> None:
    one, several = '<tool_call>\n{"name": "add", "arguments":', '<tool_call>\n{"name": "'
    for options, opening, continued in [
        ({"tool_required": True}, several, 'add", "arguments": {"first": 1, "second": 1}}'),
        ({"tool_choice": "required"}, several, 'add", "arguments": {"first": 1, "second": 1}}\n</tool_call>'),
        ({"tool_choice": "add"}, one, ' {"first": 1, "second": 1}}\n</tool_call>'),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, one, ' {"first": 1, "second": 1}'),
    ]:
        llm.engine.script = [continued]
        response = llm.chat_with_tools(_tools(), "Add 1 and 1.", **options)
        assert read[-1].text.endswith(f"<|im_start|>assistant\n{opening}")
        [selection] = llm.get_tool_calls_from_response(response)
        assert (selection.tool_name, selection.tool_kwargs) == ("add", {"first": 1, "second": 1})
    llm.chat_with_tools(_tools(), "Add 1 and 1.", tool_choice="none")
    assert "Adds numbers." not in read[-1].text
    with pytest.raises(ValueError, match=r"tool_choice: 'subtract' is not allowed; give .* one of \['add', 'rest'\]"):
        llm.chat_with_tools(_tools(), "Add 1 and 1.", tool_choice="subtract")
    with pytest.raises(ValueError, match="tools: 7 is neither a tool of LlamaIndex nor"):
        llm.chat([ChatMessage(content="Add")], tools=[7])


def test_calls_and_results_of_a_history_reach_the_template(llm: CacheCraftLLM, read: list[EncodedPrompt]) -> None:
    call = ToolCallBlock(tool_call_id="abcdefghi", tool_name="add", tool_kwargs={"first": 2, "second": 3})
    llm.chat(
        [
            ChatMessage(content="Add 2 and 3."),
            ChatMessage(role="assistant", blocks=[call]),
            ChatMessage(role="tool", content="5", additional_kwargs={"tool_call_id": "abcdefghi"}),
        ],
        tools=_tools(),
    )
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>tool\n5<|im_end|>" in read[0].text


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_name="add", tool_kwargs=ARGUMENTS)]),
        ChatMessage(
            role="assistant",
            content="",
            additional_kwargs={"tool_calls": [{"id": "1", "function": {"name": "add", "arguments": ARGUMENTS}}]},
        ),
        ChatMessage(
            role="assistant",
            content="",
            additional_kwargs={
                "tool_calls": [SimpleNamespace(id="1", function=SimpleNamespace(name="add", arguments=ARGUMENTS))]
            },
        ),
    ],
    ids=["block with text", "listed", "listed as an object"],
)
def test_calls_that_other_llms_left_in_a_history_reach_the_template(
    message: ChatMessage, llm: CacheCraftLLM, read: list[EncodedPrompt]
) -> None:
    llm.chat([ChatMessage(content="Add 2 and 3."), message, ChatMessage(role="tool", content="5")], tools=_tools())
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>tool\n5<|im_end|>" in read[0].text


def test_calls_of_a_history_reach_a_model_whose_template_prints_none(
    make_llm: Callable[..., CacheCraftLLM], record: Callable[..., list[EncodedPrompt]]
) -> None:
    llm = make_llm()
    read = record(llm)
    call = ToolCallBlock(tool_call_id="abcdefghi", tool_name="add", tool_kwargs={"first": 2, "second": 3})
    llm.chat([ChatMessage(content="Add"), ChatMessage(role="assistant", blocks=[call]), ChatMessage(content="Well?")])
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>" in read[0].text


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_function_agent_calls_its_retriever_whose_chunks_are_reused(
    is_streaming: bool, llm: CacheCraftLLM, retriever: Any, log: Any
) -> None:
    async def ask(question: str) -> str:
        llm.engine.script = [
            '<tool_call>\n{"name": "retriever_tool", "arguments": {"input": "end"}}\n</tool_call>',
            "Then.",
        ]
        tools = [RetrieverTool.from_defaults(retriever)]
        return str(await FunctionAgent(tools=tools, llm=llm, streaming=is_streaming).run(user_msg=question))

    assert await ask("What ends first?") == "Then."
    assert sum(event.stats["chunk_misses"] for event in log.of(CacheCraftPrefillEvent)) == 3
    log.events.clear()
    retriever.nodes.reverse()
    assert await ask("Who signs?") == "Then."
    assert [event.stats["chunk_hits"] for event in log.of(CacheCraftPrefillEvent)] == [0, 3]


def test_structured_answers_over_retrieved_chunks_reuse_them(llm: CacheCraftLLM, retriever: Any, log: Any) -> None:
    for name in ("chunk_misses", "chunk_hits"):
        llm.engine.script = [' {"year": 2030}}\n</tool_call>']
        log.events.clear()
        engine = RetrieverQueryEngine.from_args(retriever, llm=llm, output_cls=Verdict)
        assert engine.query("When?").response == Verdict(year=2030)
        [event] = log.of(CacheCraftPrefillEvent)
        assert event.stats[name] == 3


async def test_structured_predict_calls_the_schema_as_a_tool(llm: CacheCraftLLM, read: list[EncodedPrompt]) -> None:
    prompt = PromptTemplate("When does {what} end?")
    llm.engine.script = [' {"year": 2030, "reason": "Clause 2"}}\n</tool_call>'] * 2
    assert llm.structured_predict(Verdict, prompt, what="it") == Verdict(year=2030, reason="Clause 2")
    assert (await llm.astructured_predict(Verdict, prompt, what="it")).year == 2030
    assert read[0].text.endswith('<tool_call>\n{"name": "Verdict", "arguments":')
    assert "Why then." in read[0].text
    llm.engine.script = [f'{{"year": {year}}}' for year in (1, 2)]
    structured = llm.as_structured_llm(Verdict)
    assert structured.complete("When?").raw == Verdict(year=1)
    assert structured.chat([ChatMessage(content="When?")]).raw == Verdict(year=2)
    llm.engine.script = ["never"]
    with pytest.raises(ValueError, match="it calls no tool, but says"):
        llm.structured_predict(Verdict, prompt, what="it")


def test_streamed_structured_output_ends_in_the_object(llm: CacheCraftLLM) -> None:
    llm.engine.script = [CALL.replace("add", "Verdict").replace('"first": 2, "second": 3', '"year": 2030')]
    *_, last = llm.stream_structured_predict(Verdict, PromptTemplate("When does {what} end?"), what="it")
    assert last == Verdict(year=2030)


def test_tools_and_a_prompt_function_of_the_user_do_not_go_together(
    make_llm: Callable[..., CacheCraftLLM], make_scripted: Callable[..., Any]
) -> None:
    llm = make_llm(engine=make_scripted(tools=True), messages_to_prompt=lambda messages: "Hello")
    with pytest.raises(ValueError, match="tools: messages_to_prompt has no place for them"):
        llm.chat([ChatMessage(content="Hello")], tools=_tools())


async def _ask(kind: str, llm: CacheCraftLLM, tools: list[FunctionTool]) -> list[Any]:
    if kind == "chat":
        return [llm.chat_with_tools(tools, "Add 2 and 3.")]
    if kind == "achat":
        return [await llm.achat_with_tools(tools, "Add 2 and 3.")]
    if kind == "stream":
        return list(llm.stream_chat_with_tools(tools, "Add 2 and 3."))
    return [step async for step in await llm.astream_chat_with_tools(tools, "Add 2 and 3.")]
