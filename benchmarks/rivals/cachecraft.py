"""cachecraft-rag at one of its presets."""

from __future__ import annotations

import torch

from benchmarks.rivals.base import Clock, Engine, Prompt, Reply, Settings
from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt


class CacheCraft(Engine):
    """Chunks are reused wherever they stand in a prompt."""

    def __init__(self, settings: Settings) -> None:
        self._shared = settings.options.get("shared")
        torch.set_num_threads(settings.threads)
        config = EngineConfig.model_validate(
            {
                "recompute": {"preset": settings.options["preset"]},
                "calibration": settings.options.get("calibration"),
                "store": {"cold": {"size": settings.memory}},
            }
        )
        self._engine = CacheCraftEngine.from_pretrained(settings.model, config, dtype=settings.dtype, device="cpu")

    def index(self, chunks: list[str]) -> None:
        """Take the KV of chunks into memory: from the folder that all presets share, where a first one computed it."""
        if self._shared is None:
            self._engine.warm(chunks)
            return
        store = {"cold": {"size": 1}, "disk": {"path": self._shared, "size": "1TB"}}  # one byte of memory keeps nothing
        config = EngineConfig.model_validate({"store": store})
        with CacheCraftEngine(self._engine.model, self._engine.tokenizer, config) as keeper:
            keeper.warm(chunks)
            keeper.store.flush()
            for key in [info.key for info in keeper.store.entries()]:
                chunk_kv = keeper.store.get(key)
                assert chunk_kv is not None, f"{key} was stored and is gone"
                self._engine.store.put(key, chunk_kv)
        self._engine.register(chunks)

    def ask(self, prompt: Prompt, max_new_tokens: int) -> Reply:
        """Answer with chunks reused; computed are the layers of tokens that the engine charges, in whole tokens."""
        clock = Clock()
        stream = self._engine.stream(_parts(prompt), max_new_tokens=max_new_tokens)
        for _ in stream:
            continue
        result = stream.result
        reply = clock.reply(result.text, 0, 0.0)
        stats = result.stats
        computed = stats.charged_ratio * stats.prompt_tokens
        times = (stats.ttft_s, reply.total_s, stats.decode_s)
        return Reply(result.text, *times, stats.prompt_tokens, computed, stats.output_tokens)

    def cold(self, prompt: Prompt, max_new_tokens: int) -> str:
        """Answer by the engine's own full prefill."""
        return self._engine.generate(_parts(prompt), reuse=False, max_new_tokens=max_new_tokens).text

    def close(self) -> None:
        """Let go of the stored KV."""
        self._engine.close()


def _parts(prompt: Prompt) -> RagPrompt:
    return RagPrompt(system=prompt.system, chunks=prompt.chunks, question=prompt.question)


def load(settings: Settings) -> Engine:
    """The engine."""
    return CacheCraft(settings)
