"""The largest memory of a process that answers, against what it has to hold."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from benchmarks.growth_parts import CHUNK_TOKENS, QUESTION, SYSTEM, Row, kv_bytes, made_up
from benchmarks.rivals.base import peak_bytes
from benchmarks.tiny import tiny_engine
from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt

ALLOWANCE = 1.15


def measure_memory(model: str, dtype: str, contexts: Sequence[int], tier: str) -> list[Row]:
    """One new process for every length, so that none inherits the peak of another."""
    run = partial(_measure, model, dtype, tier)
    rows = []
    for length in contexts:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            rows.append(pool.submit(run, length).result())
    return rows


def _measure(model: str, dtype: str, tier: str, length: int) -> Row:
    with tiny_engine() as engine:  # loads what PyTorch and transformers load when they are first used
        engine.generate(RagPrompt(SYSTEM, tuple(made_up(engine, 2, 80)), QUESTION), max_new_tokens=2)
    before = peak_bytes()
    config = EngineConfig.model_validate({"store": {"cold": {"size": tier}}, "keep_exact": False})
    with CacheCraftEngine.from_pretrained(model, config, dtype=dtype) as engine:
        weights = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in engine.model.parameters()}.values())
        loaded = peak_bytes() - before
        texts = made_up(engine, length // CHUNK_TOKENS, CHUNK_TOKENS)
        engine.warm(texts)
        prompt = RagPrompt(SYSTEM, tuple(reversed(texts)), QUESTION)
        stats = engine.generate(prompt, max_new_tokens=8).stats
        peak, tiers = peak_bytes() - before, engine.store.nbytes
        bound = ALLOWANCE * (weights + tiers + kv_bytes(engine, stats.prompt_tokens + 8))
        engine.generate(prompt, max_new_tokens=8, reuse=False)
        whole = peak_bytes() - before
    figures = {
        "libraries MiB": before,
        "weights MiB": weights,
        "peak of loading MiB": loaded,
        "tiers MiB": tiers,
        "peak MiB": peak,
        "bound MiB": bound,
        "peak with full prefill MiB": whole,
    }
    return Row(length, {**{name: value / 2**20 for name, value in figures.items()}, "peak / bound": peak / bound})
