"""llama.cpp's server, on the same weights converted to GGUF; keys and values in its default precision, float16.

Its prompt cache keeps earlier prompts in host memory; with ``reuse`` it also shifts what is common after the first
difference, as ``--cache-reuse`` does.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.rivals.base import Clock, Engine, Prompt, Reply, Settings

_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_START_S = 300.0


class LlamaCpp(Engine):
    """A server process that is spoken to over the loopback interface."""

    def __init__(self, settings: Settings) -> None:
        folder = Path(sys.prefix)
        server = folder / "build" / "bin" / "llama-server"
        if not server.exists():
            raise RuntimeError(f"llama-server is not built; see {folder}.log")
        weights = convert(Path(settings.model), _TYPES[settings.dtype], folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        options = {
            "--model": weights,
            "--host": "127.0.0.1",
            "--port": self._port,
            "--ctx-size": settings.window,
            "--threads": settings.threads,
            "--threads-batch": settings.threads,
            "--parallel": 1,
            "--cache-ram": settings.memory // 2**20,
            "--cache-reuse": settings.options.get("reuse", 0),
        }
        arguments = [str(part) for option in options.items() for part in option]
        self._server = subprocess.Popen([str(server), *arguments], stdout=sys.stderr)
        self._wait()

    def ask(self, prompt: Prompt, max_new_tokens: int) -> Reply:
        """Answer, what the prompt cache holds reused."""
        return self._complete(prompt, max_new_tokens, keep=True)

    def cold(self, prompt: Prompt, max_new_tokens: int) -> str:
        """Answer without the prompt cache."""
        return self._complete(prompt, max_new_tokens, keep=False).text

    def close(self) -> None:
        """End the server."""
        self._server.terminate()
        self._server.wait()

    def _complete(self, prompt: Prompt, max_new_tokens: int, keep: bool) -> Reply:
        request = {
            "prompt": prompt.text,
            "n_predict": max_new_tokens,
            "temperature": 0.0,
            "stream": True,
            "cache_prompt": keep,
        }
        if not keep:
            request["n_cache_reuse"] = 0
        clock, text = Clock(), ""
        timings: dict[str, Any] = {}
        for event in self._events(request):
            if event.get("tokens") or event.get("content"):
                clock.token()
            text += event.get("content", "")
            timings = event.get("timings", timings)
        computed, cached = timings["prompt_n"], timings["cache_n"]
        return clock.reply(text, computed + cached, computed, timings["predicted_n"])

    def _events(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"llama-server says {response.status}: {response.read().decode()[:500]}")
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line[len(b"data: ") :])
        finally:
            connection.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:  # it doesn't listen yet
                if self._server.poll() is not None:
                    raise RuntimeError(f"llama-server ended with {self._server.returncode} while it loaded") from None
            finally:
                connection.close()
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"llama-server does not answer after {_START_S:.0f} s")
            time.sleep(0.1)


def convert(model: Path, kind: str, folder: Path) -> Path:
    """The weights as a GGUF file; made once for every model and precision."""
    name = str(model.resolve()).strip("/").replace("/", "-")
    path = folder / "models" / f"{name}-{kind}.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        script = folder / "source" / "llama.cpp" / "convert_hf_to_gguf.py"
        half = path.with_suffix(".part")
        command = [sys.executable, str(script), str(model), "--outtype", kind, "--outfile", str(half)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            print(done.stdout, file=sys.stderr)
            raise RuntimeError(f"conversion to GGUF failed: {done.stdout.strip().splitlines()[-1]}")
        half.replace(path)
    return path


def load(settings: Settings) -> Engine:
    """The engine."""
    return LlamaCpp(settings)
