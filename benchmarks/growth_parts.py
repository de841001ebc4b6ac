"""The measurements of ``growth.py``."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.fit import causal_pairs, fit_costs
from benchmarks.tiny import tiny_engine
from cachecraft_rag import CacheCraftEngine, RagPrompt, RequestStats

SIMULATED = 32_768
CHUNK_TOKENS = 512
SYSTEM = "Answer the question using only the passages."
QUESTION = "Question: When does the term end?\nAnswer:"
_WORDS = (
    "the party shall deliver notice of any change in writing within thirty days after this agreement ends unless "
    "both parties agree otherwise and no payment is due for goods that were returned before the last date of term"
)


@dataclass(frozen=True)
class Row:
    """Figures at one size.

    Attributes:
        size: What grows.
        figures: By name; times in seconds unless named otherwise.
        is_simulated: Whether they come from counts and not from a run.
    """

    size: int
    figures: dict[str, float]
    is_simulated: bool = False


def made_up(engine: CacheCraftEngine, number: int, tokens: int, seed: int = 0) -> list[str]:
    """Different chunks of so many tokens, of made-up sentences."""
    draw, words = random.Random(seed), _WORDS.split()
    encode, decode = engine.prompts.encode_chunk, engine.prompts.decode
    texts = (f"{seed}.{index}. " + " ".join(draw.choices(words, k=2 * tokens)) for index in range(number))
    return [decode(encode(text)[:tokens]).strip() for text in texts]


def context(engine: CacheCraftEngine, contexts: Sequence[int], repeats: int) -> list[Row]:
    """Full prefill and reuse at every length, and both simulated at 32k."""
    texts = made_up(engine, max(contexts) // CHUNK_TOKENS, CHUNK_TOKENS)
    engine.warm(texts, show_progress=True)
    rows: list[Row] = []
    full: list[RequestStats] = []
    reused: list[RequestStats] = []
    for length in contexts:
        pairs = _both(engine, texts[: length // CHUNK_TOKENS], repeats)
        full.append(_middle([whole for whole, _ in pairs]))
        reused.append(_middle([stats for _, stats in pairs]))
        rows.append(_row(length, engine, full[-1].ttft_s, reused[-1]))
    costs = fit_costs(
        [_computed(one) for one in [*full, *reused]],
        [causal_pairs(_computed(one), one.prompt_tokens) for one in [*full, *reused]],
        [one.select_s + one.prefill_s for one in [*full, *reused]],
        [0.0 for _ in full] + [float(one.prompt_tokens) for one in reused],
        [0.0 for _ in full] + [one.load_s for one in reused],
    )
    free = statistics.median(one.prompt_tokens for one in reused) - statistics.median(contexts)
    charged = statistics.median((_computed(one) - free) / (one.prompt_tokens - free) for one in reused)
    total = SIMULATED + free
    computed = free + charged * SIMULATED
    load_s = costs.placed * total
    figures = {
        "full prefill s": costs.seconds(total, causal_pairs(total, total), 0),
        "TTFT s": costs.seconds(computed, causal_pairs(computed, total), total),
        "load s": load_s,
        "tokens computed": computed,
        "KV MiB": rows[-1].figures["KV MiB"] / contexts[-1] * SIMULATED,
    }
    return [*rows, Row(SIMULATED, {name: figures[name] for name in rows[0].figures}, is_simulated=True)]


def chunks(engine: CacheCraftEngine, numbers: Sequence[int], length: int, repeats: int) -> list[Row]:
    """The same context cut into more and more chunks."""
    rows = []
    for number in numbers:
        texts = made_up(engine, number, length // number, seed=number)
        engine.warm(texts)
        pairs = _both(engine, texts, repeats)
        full_s = statistics.median(whole.ttft_s for whole, _ in pairs)
        rows.append(_row(number, engine, full_s, _middle([stats for _, stats in pairs])))
    return rows


def stored(numbers: Sequence[int], repeats: int, tokens: int = 80, per_prompt: int = 8) -> list[Row]:
    """Finding and loading a prompt's chunks among more and more stored ones, which the prompt does not name."""
    rows = []
    for number in numbers:
        with tiny_engine() as engine:
            texts = made_up(engine, number, tokens)
            started = time.perf_counter()
            engine.warm(texts)
            warm_s = time.perf_counter() - started
            draw = random.Random(number)
            found: list[RequestStats] = []
            for _ in range(repeats + 1):
                content = "\n\n".join([*draw.sample(texts, min(per_prompt, number)), QUESTION])
                prompt = RagPrompt.from_messages([{"role": "user", "content": content}])
                found.append(engine.generate(prompt, max_new_tokens=1).stats)
            if any(stats.chunk_misses or not stats.chunk_hits for stats in found):
                raise SystemExit(f"not every chunk was found among {number}: {found[-1]}")
            stats = _middle(found[1:])
            parts = stats.load_s + stats.select_s + stats.prefill_s + stats.encode_s
            figures = {
                "find ms": 1e3 * (stats.ttft_s - parts),
                "load ms": 1e3 * stats.load_s,
                "TTFT ms": 1e3 * stats.ttft_s,
                "store ms per chunk": 1e3 * warm_s / number,
                "stored MiB": engine.store.nbytes / 2**20,
            }
            rows.append(Row(number, figures))
    return rows


def users(engine: CacheCraftEngine, numbers: Sequence[int], length: int, max_new_tokens: int = 16) -> list[Row]:
    """Many requests at the same time, and the same ones by full prefill one after the other."""
    texts = made_up(engine, 2 * length // CHUNK_TOKENS + 1, CHUNK_TOKENS)
    engine.warm(texts)
    draw = random.Random(0)
    one_by_one = partial(engine.generate, reuse=False, max_new_tokens=max_new_tokens)
    together = partial(engine.generate, max_new_tokens=max_new_tokens)
    rows = []
    for number in numbers:
        prompts = [
            RagPrompt(SYSTEM, tuple(draw.sample(texts, length // CHUNK_TOKENS)), QUESTION) for _ in range(number)
        ]
        together(prompts[0])
        started = time.perf_counter()
        with ThreadPoolExecutor(number) as pool:
            answers = list(pool.map(together, prompts))
        wall_s = time.perf_counter() - started
        waits, plain_s = [], 0.0
        for prompt in prompts:  # who comes later waits for all before
            stats = one_by_one(prompt).stats
            waits.append(plain_s + stats.ttft_s)
            plain_s += stats.ttft_s + stats.decode_s
        ttft = [answer.stats.ttft_s for answer in answers]
        tokens = sum(answer.stats.output_tokens for answer in answers)
        figures = {
            "TTFT p50 s": float(np.percentile(ttft, 50)),
            "TTFT p95 s": float(np.percentile(ttft, 95)),
            "all s": wall_s,
            "tokens/s": tokens / wall_s,
            "plain TTFT p95 s": float(np.percentile(waits, 95)),
            "p95 / plain": float(np.percentile(ttft, 95) / np.percentile(waits, 95)),
            "plain all s": plain_s,
        }
        rows.append(Row(number, figures))
    return rows


def kv_bytes(engine: CacheCraftEngine, tokens: int) -> int:
    """Bytes of the KV of so many tokens in the model's dtype."""
    config = engine.model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return int(tokens * per_token * engine.model.dtype.itemsize)


def _both(engine: CacheCraftEngine, texts: Sequence[str], repeats: int) -> list[tuple[RequestStats, RequestStats]]:
    """Figures of full prefill and of reuse, in turns, chunks in a new order every time; the first is left out."""
    draw = random.Random(len(texts))
    found = []
    for _ in range(repeats + 1):
        prompt = RagPrompt(SYSTEM, tuple(draw.sample(list(texts), len(texts))), QUESTION)
        whole = engine.generate(prompt, reuse=False, max_new_tokens=1).stats
        found.append((whole, engine.generate(prompt, max_new_tokens=1).stats))
    return found[1:]


def _row(size: int, engine: CacheCraftEngine, full_s: float, stats: RequestStats) -> Row:
    figures = {
        "full prefill s": full_s,
        "TTFT s": stats.ttft_s,
        "load s": stats.load_s,
        "tokens computed": _computed(stats),
        "KV MiB": kv_bytes(engine, stats.prompt_tokens) / 2**20,
    }
    return Row(size, figures)


def _computed(stats: RequestStats) -> float:
    return stats.charged_ratio * stats.prompt_tokens


def _middle(stats: list[RequestStats]) -> RequestStats:
    """The request of median time to the first token."""
    return sorted(stats, key=lambda one: one.ttft_s)[len(stats) // 2]
