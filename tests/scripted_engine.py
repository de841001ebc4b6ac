"""An engine that says what a test wants, and computes its own answer all the same."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from cachecraft_rag import AnswerStream, CacheCraftEngine, GenerationResult
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level


class ScriptedEngine(CacheCraftEngine):
    """Computes every answer as ever, and says what its script says instead, while that lasts.

    A tiny model with random weights calls no tool by itself.

    Attributes:
        script: What is said next.
        computed: What the model would have said.
    """

    def __init__(self, chat_template: str | None = None) -> None:
        tokenizer = byte_level()
        tokenizer.chat_template = chat_template or tokenizer.chat_template
        super().__init__(make("llama", max_position_embeddings=8192), tokenizer)
        self.script: list[str] = []
        self.computed: list[str] = []

    def stream(self, *args: Any, **kwargs: Any) -> AnswerStream:
        return AnswerStream(self._say(super().stream(*args, **kwargs)))

    def _say(self, stream: AnswerStream) -> Generator[str, None, GenerationResult]:
        scripted = self.script.pop(0) if self.script else None
        for delta in stream:
            if scripted is None:
                yield delta
        self.computed.append(stream.result.text)
        yield from re.findall(r"(?s).{1,5}", scripted or "")
        return stream.result if scripted is None else replace(stream.result, text=scripted)
