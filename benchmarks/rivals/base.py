"""What every engine of the replay benchmark looks like. Needs nothing but the standard library, as rivals' environments
differ."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        text: The prompt as the model reads it, chat template applied.
        system: The system message in it.
        chunks: The chunks in it, in their order.
        question: What follows the chunks.
    """

    text: str
    system: str
    chunks: tuple[str, ...]
    question: str


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        text: The answer, without special tokens.
        ttft_s: Seconds from the call to the first token; tokenising the prompt is part of it.
        total_s: Seconds from the call until the engine takes the next one.
        decode_s: Seconds from the first token to the last.
        prompt_tokens: Length of the prompt.
        computed_tokens: Tokens computed before the first one of the answer, every pass over a token counted as far as
            it goes through the layers.
        output_tokens: Length of the answer.
    """

    text: str
    ttft_s: float
    total_s: float
    decode_s: float
    prompt_tokens: int
    computed_tokens: float
    output_tokens: int


@dataclass(frozen=True)
class Settings:
    """What all engines of a run are given alike.

    Attributes:
        model: Folder of the model.
        dtype: Precision of weights and KV, as PyTorch calls it.
        threads: Threads that may compute.
        memory: Byte budget for kept KV.
        window: Longest prompt and answer in tokens.
        options: What this engine alone is given.
    """

    model: str
    dtype: str
    threads: int
    memory: int
    window: int
    options: dict[str, Any]


class Engine(ABC):
    """An engine in a process of its own; greedy decoding, one request at a time.

    Attributes:
        keeps: Whether a request leaves something behind that makes later ones quicker.
    """

    keeps: ClassVar[bool] = True

    @abstractmethod
    def ask(self, prompt: Prompt, max_new_tokens: int) -> Reply:
        """Answer as quickly as the engine can."""

    @abstractmethod
    def cold(self, prompt: Prompt, max_new_tokens: int) -> str:
        """The answer after everything was computed anew; called when no more is measured."""

    def index(self, chunks: list[str]) -> None:  # noqa: B027 - most engines can't
        """Prepare for chunks that will be asked about, as an application does when it takes documents in."""

    def close(self) -> None:  # noqa: B027 - most end with their process
        """End what was started."""


class Clock:
    """Times of one call: made when it begins."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def token(self) -> None:
        """Another token of the answer is there."""
        self._times.append(time.perf_counter())

    def reply(self, text: str, prompt_tokens: int, computed_tokens: float, output_tokens: int | None = None) -> Reply:
        """The answer, complete now; without ``output_tokens`` they are counted as they came."""
        begun, *tokens = self._times
        now = time.perf_counter()
        first, last = (tokens[0], tokens[-1]) if tokens else (now, now)
        count = len(tokens) if output_tokens is None else output_tokens
        return Reply(text, first - begun, now - begun, last - first, prompt_tokens, computed_tokens, count)


def peak_bytes() -> int:
    """Largest resident memory so far of this process and of those it started, added up; Linux tells it."""
    return sum(_peak(pid) for pid in [os.getpid(), *_descendants(os.getpid())])


def forget_peak() -> None:
    """Let ``peak_bytes`` count from now on."""
    for pid in [os.getpid(), *_descendants(os.getpid())]:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended meanwhile
        return 0
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            found += [child, *_descendants(child)]
    return found
