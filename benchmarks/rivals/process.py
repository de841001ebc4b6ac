"""An engine of the replay benchmark as seen from the benchmark: a process that answers JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.rivals.base import Prompt, Settings

ROOT = Path(__file__).resolve().parents[2]


class EngineError(Exception):
    """An engine can't be started, or failed at a request; the message is the engine's."""


class EngineProcess:
    """An engine that has been started and has loaded its model.

    Args:
        python: Interpreter of its environment.
        module: Its module in this package.
        settings: What it is given.
        log: Takes what it prints.

    Attributes:
        keeps: Whether earlier requests make later ones quicker.
        ready_s: Seconds that loading took.

    Raises:
        EngineError: It doesn't load.
    """

    def __init__(self, python: Path, module: str, settings: Settings, log: Path) -> None:
        threads = str(settings.threads)
        known = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        command = [str(python), "-m", "benchmarks.rivals.serve", module, json.dumps(asdict(settings))]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **known, **offline, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        ready = self._answer()
        self.keeps: bool = ready["keeps"]
        self.ready_s: float = ready["ready_s"]

    def index(self, chunks: Sequence[str]) -> dict[str, Any]:
        """Prepare for chunks; how long that took."""
        return self._call({"do": "index", "chunks": list(chunks)})

    def ask(self, prompt: Prompt, max_new_tokens: int) -> dict[str, Any]:
        """Answer: the fields of ``Reply`` and ``peak_bytes``."""
        return self._call({"do": "ask", "prompt": asdict(prompt), "max_new_tokens": max_new_tokens})

    def cold(self, prompt: Prompt, max_new_tokens: int) -> str:
        """The engine's answer with everything computed anew."""
        text: str = self._call({"do": "cold", "prompt": asdict(prompt), "max_new_tokens": max_new_tokens})["text"]
        return text

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"do": "close"}) + "\n")
            self._process.stdin.close()
        self._process.wait()

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # what it had to say is read below
            return self._answer()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"the process ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer
