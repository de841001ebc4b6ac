"""An engine behind JSON lines: python -m benchmarks.rivals.serve MODULE SETTINGS, requests on standard input.

A request is ``{"do": "index", "chunks": [...]}``, ``{"do": "ask" | "cold", "prompt": {...}, "max_new_tokens": n}`` or
``{"do": "close"}``. Every answer is one line of JSON, an error among them. The peak of memory counts from the end of
``index`` on. What the engine itself prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from typing import Any

from benchmarks.rivals.base import Engine, Prompt, Settings, forget_peak, peak_bytes


def main() -> None:
    """Load the engine, say so, and answer until told to close."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to standard output as they like
    module, settings = sys.argv[1], Settings(**json.loads(sys.argv[2]))

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        started = time.perf_counter()
        engine: Engine = importlib.import_module(f"benchmarks.rivals.{module}").load(settings)
        say({"ready_s": time.perf_counter() - started, "keeps": engine.keeps})
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        return
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "close":
            break
        try:
            say(_answer(engine, request))
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})
    engine.close()


def _answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "index":
        started = time.perf_counter()
        if request["chunks"]:
            engine.index(request["chunks"])
        index_s = time.perf_counter() - started
        forget_peak()
        return {"index_s": index_s}
    prompt = Prompt(**{**request["prompt"], "chunks": tuple(request["prompt"]["chunks"])})
    if request["do"] == "cold":
        return {"text": engine.cold(prompt, request["max_new_tokens"])}
    return {**asdict(engine.ask(prompt, request["max_new_tokens"])), "peak_bytes": peak_bytes()}


if __name__ == "__main__":
    main()
