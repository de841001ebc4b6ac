"""vLLM's CPU build with automatic prefix caching, in this process, one step after the other."""

from __future__ import annotations

import importlib
import os
import uuid
from typing import Any

from benchmarks.rivals.base import Clock, Engine, Prompt, Reply, Settings


class VLLM(Engine):
    """Blocks of 128 tokens behind the same beginning are reused."""

    def __init__(self, settings: Settings) -> None:
        # Read when vLLM is imported: no process of its own, no threads pinned to cores that others use too.
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, settings.memory // 2**30)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(settings.threads),
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._vllm: Any = importlib.import_module("vllm")
        window = {"max_model_len": settings.window, "max_num_seqs": 1}
        llm = self._vllm.LLM(settings.model, dtype=settings.dtype, enable_prefix_caching=True, seed=0, **window)
        self._engine: Any = llm.llm_engine

    def ask(self, prompt: Prompt, max_new_tokens: int) -> Reply:
        """Answer, cached blocks reused."""
        return self._complete({"prompt": prompt.text}, max_new_tokens)

    def cold(self, prompt: Prompt, max_new_tokens: int) -> str:
        """Answer under a salt that no cached block has."""
        return self._complete({"prompt": prompt.text, "cache_salt": uuid.uuid4().hex}, max_new_tokens).text

    def _complete(self, prompt: dict[str, str], max_new_tokens: int) -> Reply:
        clock, text, length, cached = Clock(), "", 0, 0
        deltas = self._vllm.sampling_params.RequestOutputKind.DELTA
        sampling = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_new_tokens, output_kind=deltas)
        self._engine.add_request(uuid.uuid4().hex, prompt, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                for _ in output.outputs[0].token_ids:
                    clock.token()
                text += output.outputs[0].text
                length, cached = len(output.prompt_token_ids), output.num_cached_tokens or cached
        return clock.reply(text, length, length - cached)


def load(settings: Settings) -> Engine:
    """The engine."""
    return VLLM(settings)
