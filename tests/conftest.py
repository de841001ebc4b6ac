"""Fixtures shared by the tests of the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig, SamplingConfig
from cachecraft_rag.request import Request
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
EngineMaker = Callable[..., CacheCraftEngine]


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))  # tiny tensors: more threads only wait for each other


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its tokenizer, as a command takes it."""
    folder = tmp_path_factory.mktemp("model")
    make("llama").save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder


@pytest.fixture
def make_engine() -> Iterator[EngineMaker]:
    """Make engines on tiny models: ``make_engine("llama", ratio=0.2)``; closed after the test."""
    engines: list[CacheCraftEngine] = []

    def maker(name: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> CacheCraftEngine:
        recompute = {key: options.pop(key) for key in ("policy", "ratio", "seed") if key in options}
        config = EngineConfig(recompute=RecomputeConfig(**recompute), **{"max_new_tokens": 8, **options})
        engines.append(CacheCraftEngine(make(name, dtype), byte_level(), config))
        return engines[-1]

    yield maker
    for engine in engines:
        engine.close()


class CountedPrompt(str):
    """A prompt that counts the characters taken out of it."""

    num_chars = 0

    def __getitem__(self, key: object) -> str:
        part = super().__getitem__(key)  # type: ignore[index]
        self.num_chars += len(part)
        return part


def passage(number: int, num_sentences: int = 8) -> str:
    """A text of its own for every number; about 25 tokens of the tiny tokenizer per sentence."""
    draw = random.Random(number)
    things = ("lease", "garden", "payment", "notice", "delivery", "warranty", "bench", "apple", "invoice", "term")
    verbs = ("ends", "begins", "covers", "excludes", "follows", "replaces", "limits", "names")
    return " ".join(
        f"The {draw.choice(things)} {draw.choice(verbs)} {draw.choice(things)} {draw.randint(10, 9999)}."
        for _ in range(num_sentences)
    )


def rag_prompt(*numbers: int, question: str = "What ends first?", **options: Any) -> RagPrompt:
    """A prompt over the passages of these numbers."""
    return RagPrompt(system="Be brief.", chunks=tuple(passage(n) for n in numbers), question=question, **options)


def prefill_logits(
    engine: CacheCraftEngine, prompt: RagPrompt, reuse: bool = True, **recompute: Any
) -> tuple[torch.Tensor, Request]:
    """Logits of the prompt's last token, ``[vocab_size]``, and the request that computed them."""
    encoded = engine.prompts.encode(prompt, engine.library.registry)
    settings = RecomputeConfig(**recompute) if recompute else engine.config.recompute
    request = Request(encoded, SamplingConfig(max_new_tokens=4), settings, engine.config.namespace, started=0.0)
    engine.prefill(request, reuse)
    assert request.logits is not None
    return request.logits, request
