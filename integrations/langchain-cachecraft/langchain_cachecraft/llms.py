"""``CacheCraftLLM``: a local Hugging Face model as a LangChain text model that reuses the KV of retrieved chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LangSmithParams
from langchain_core.outputs import GenerationChunk, LLMResult
from pydantic import ConfigDict, Field, model_validator
from typing_extensions import Self

from cachecraft_rag import GenerationResult, RagPrompt
from cachecraft_rag.steps import Steps
from cachecraft_rag.tool_calls import ToolAnswer
from langchain_cachecraft._version import __version__
from langchain_cachecraft.answers import PROVIDER, Answer
from langchain_cachecraft.options import CallOptions
from langchain_cachecraft.served_model import ServedModel


class CacheCraftLLM(ServedModel, BaseLLM):
    """A local Hugging Face model for chains of texts; chunks, engine and options are those of ``ChatCacheCraft``.

    The model continues the prompt as it is. An instruction-tuned model answers better with ``chat_template=True``, or
    as ``ChatCacheCraft``.

    Example:
        ```python
        from langchain_cachecraft import CacheCraftLLM

        llm = CacheCraftLLM(model="Qwen/Qwen2.5-0.5B", max_tokens=64, stop=["\\n\\n"])
        llm.invoke("A warranty is")
        ```
    """

    model_config = ConfigDict(populate_by_name=True, extra="forbid")

    chat_template: bool = Field(
        default=False, description="Whether the prompt is put into the model's chat template, as a user's message."
    )

    @model_validator(mode="after")
    def _set_version(self) -> Self:
        self._add_version("langchain-cachecraft", __version__)
        return self

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text by the model's own tokenizer, or by ``custom_get_token_ids``."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.get_engine().prompts.encode_text(text))

    @property
    def _llm_type(self) -> str:
        return f"{PROVIDER}-llm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**self._identity(), "chat_template": self.chat_template}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=self.stop if stop is None else stop, **kwargs)
        return self._named(params, kwargs.get("model"))

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = CallOptions.of(self, kwargs)
        if options.timeout is not None:
            return _llm_result([_last(self._answer(prompt, stop, kwargs)) for prompt in prompts])
        asked = [self._asked(prompt) for prompt in prompts]
        results = self._answers_to(self.get_engine(options.model), asked, stop, options)
        return _llm_result([Answer(result, options.model, ToolAnswer(result.text)) for result in results])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        answers = []
        for prompt in prompts:
            with closing(Steps(self._answer(prompt, stop, kwargs))) as steps:
                answer = await steps.take_last()
            assert isinstance(answer, Answer)
            answers.append(answer)
        return _llm_result(answers)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with closing(self._answer(prompt, stop, kwargs)) as items:
            for item in items:
                chunk = _chunk(item)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        with closing(Steps(self._answer(prompt, stop, kwargs))) as steps:
            while (item := await steps.take()) is not None:
                chunk = _chunk(item)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _answer(
        self, prompt: str, stop: list[str] | None, given: dict[str, Any]
    ) -> Generator[str | Answer, None, None]:
        """Yield the pieces of an answer and at last the whole."""
        options = CallOptions.of(self, given)
        engine = self.get_engine(options.model)
        with closing(self._answer_to(engine, self._asked(prompt), stop, options)) as items:
            for item in items:
                if isinstance(item, GenerationResult):
                    yield Answer(item, options.model, ToolAnswer(item.text))
                else:
                    yield item

    def _asked(self, prompt: str) -> RagPrompt:
        if self.chat_template:
            return RagPrompt.from_messages([{"role": "user", "content": prompt}])
        return RagPrompt.from_text(prompt)


def _last(items: Iterator[str | Answer]) -> Answer:
    *_, answer = items
    assert isinstance(answer, Answer)
    return answer


def _chunk(item: str | Answer) -> GenerationChunk:
    return item.last_text_chunk() if isinstance(item, Answer) else GenerationChunk(text=item)


def _llm_result(answers: Sequence[Answer]) -> LLMResult:
    usage: dict[str, int] = {}
    for answer in answers:
        for name, count in answer.token_usage().items():
            usage[name] = usage.get(name, 0) + count
    output = {"model_name": answers[0].model, "token_usage": usage} if answers else {}
    return LLMResult(generations=[[answer.generation()] for answer in answers], llm_output=output)
