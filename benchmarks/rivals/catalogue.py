"""The engines of the replay benchmark: what they are called, where they live, whose full prefill they are judged by."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Entry:
    """An engine.

    Attributes:
        name: What it is called on the command line and in files.
        title: What it is called in tables.
        module: Its module in this package.
        environment: Folder of its environment among the rivals; ``None`` for the one that the benchmark runs in.
        cold: Engines with the same value answer alike by full prefill; only one of them is asked for that.
        options: What it alone is given.
    """

    name: str
    title: str
    module: str
    environment: str | None
    cold: str
    options: dict[str, Any] = field(default_factory=dict)

    def python(self, rivals: Path | None) -> Path | None:
        """Its interpreter; ``None`` where it isn't installed."""
        if self.environment is None:
            return Path(sys.executable)
        path = Path() if rivals is None else rivals.absolute() / self.environment / "bin" / "python"
        return path if rivals is not None and path.exists() else None


PRESETS = ("fast", "balanced", "high", "exact")

ENGINES = (
    Entry("transformers", "transformers, full prefill", "transformers_full", None, "transformers"),
    Entry("transformers-prefix", "transformers, prefix cache", "transformers_prefix", None, "transformers"),
    Entry("llamaindex", "LlamaIndex HuggingFaceLLM", "llama_index_llm", "llamaindex", "llamaindex"),
    Entry("kvboost", "kvboost", "kvboost_llm", "kvboost", "kvboost"),
    Entry("llamacpp", "llama.cpp, prompt cache", "llama_cpp", "llamacpp", "llamacpp"),
    Entry("llamacpp-reuse", "llama.cpp, --cache-reuse 64", "llama_cpp", "llamacpp", "llamacpp", {"reuse": 64}),
    Entry("vllm", "vLLM CPU, prefix caching", "vllm_apc", "vllm", "vllm"),
    *(
        Entry(f"ours-{name}", f"cachecraft-rag, {name}", "cachecraft", None, "ours", {"preset": name})
        for name in PRESETS
    ),
)
BY_NAME = {entry.name: entry for entry in ENGINES}
