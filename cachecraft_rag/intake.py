"""From a prompt to a request: checked, its chunks registered and found, tokenised."""

from __future__ import annotations

import time
from collections.abc import Iterable

from cachecraft_rag.config import EngineConfig, RecomputeConfig, SamplingConfig
from cachecraft_rag.errors import PromptTooLongError
from cachecraft_rag.library import ChunkLibrary
from cachecraft_rag.prompt import PromptEncoder, RagPrompt
from cachecraft_rag.quality import Quality
from cachecraft_rag.request import Request


class Intake:
    """Takes prompts in.

    Args:
        prompts: Renders and tokenises.
        library: Where chunk texts are registered.
        config: Defaults of what a call leaves open.
        quality: What is known of the divergence.
        context_window: Largest prompt plus answer in tokens; ``None`` without a limit.

    Attributes:
        quality: As given.
    """

    def __init__(
        self,
        prompts: PromptEncoder,
        library: ChunkLibrary,
        config: EngineConfig,
        quality: Quality,
        context_window: int | None,
    ) -> None:
        self._prompts, self._library, self._config, self.quality = prompts, library, config, quality
        self._context_window = context_window

    def namespace(self, namespace: str | None) -> str:
        """The namespace of a call; ``None`` takes the engine's.

        Raises:
            ValueError: It is empty, or no text.
        """
        if namespace is None:
            return self._config.namespace
        if not _is_text(namespace) or not namespace:
            what = "empty" if namespace == "" else "no text"
            raise ValueError(f"namespace: {namespace!r} is {what}; give a name, or None for the engine's own")
        return namespace

    def take(
        self,
        prompt: RagPrompt,
        sampling: SamplingConfig,
        recompute: RecomputeConfig | None = None,
        namespace: str | None = None,
    ) -> Request:
        """Make a request, whose time runs from here on; its answer is cut to what the context window leaves.

        Raises:
            PromptTooLongError: The prompt fills the context window.
            TypeError: This is no ``RagPrompt``.
            ValueError: The prompt is empty, or the namespace is, or nothing is calibrated for the target or policy.
        """
        started = time.perf_counter()
        if not isinstance(prompt, RagPrompt):
            raise TypeError(
                f"prompt: {type(prompt).__name__} is no RagPrompt; see RagPrompt.from_text and from_messages"
            )
        namespace = self.namespace(namespace)
        recompute = self._config.recompute if recompute is None else RecomputeConfig.model_validate(recompute)
        goal, deviation = self.quality.goal(recompute), self.quality.deviation(recompute)
        since = self._library.forgetting.count(namespace)
        self._library.register(prompt.chunks, namespace)
        encoded = self._prompts.encode(prompt, self._library.registry, namespace, self._library.auto_chunks)
        num_tokens = len(encoded.token_ids)
        if num_tokens == 0:
            raise ValueError("prompt: '' renders to no tokens; give a question, a chunk or a message")
        if self._context_window is not None:
            if num_tokens >= self._context_window:
                raise PromptTooLongError(num_tokens, self._context_window)
            room = min(sampling.max_new_tokens, self._context_window - num_tokens)
            sampling = sampling.model_copy(update={"max_new_tokens": room})
        return Request(encoded, sampling, recompute, namespace, started, goal, deviation, since, prompt.question)


def as_texts(texts: Iterable[str]) -> list[str]:
    """Several texts as a list.

    Raises:
        ValueError: It is one string, which would be read as one text per character, or holds something else.
    """
    if isinstance(texts, str):
        raise ValueError(f"texts: {texts[:40]!r} is one string; give a list of strings")
    listed = list(texts)
    for index, text in enumerate(listed):
        if not _is_text(text):
            raise ValueError(f"texts[{index}]: {text!r} is no string; give a list of strings")
    return listed


def check_timeout(timeout_s: float | None) -> None:
    """Refuse a time limit that is none.

    Raises:
        ValueError: It is no number above 0.
    """
    if timeout_s is not None and (_is_text(timeout_s) or not timeout_s > 0):
        raise ValueError(f"timeout_s: {timeout_s!r} is not above 0; give seconds, or None for no limit")


def _is_text(value: object) -> bool:
    return isinstance(value, str)
