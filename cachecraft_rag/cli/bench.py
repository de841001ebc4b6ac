"""``cachecraft bench``: time to first token against full prefill, and where a request's time goes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cachecraft_rag.cli import output
from cachecraft_rag.cli.arguments import settings
from cachecraft_rag.config import EngineConfig, RecomputeConfig
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.prompt import RagPrompt
from cachecraft_rag.stats import RequestStats

if TYPE_CHECKING:
    from cachecraft_rag.engine import CacheCraftEngine

_TRIES = 5  # of what is timed alone
_SYSTEM = "Answer the question using only the passages."
_QUESTION = "What does the second passage say?"
_WORDS = (
    "the party shall deliver notice of any change in writing within thirty days after this agreement ends unless "
    "both parties agree otherwise and no payment is due for goods that were returned before the last date of term"
)


def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, alias or hub id.")],
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Text that is cut into chunks; else made-up sentences."),
    ] = None,
    num_chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks per request.")] = 8,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="Length of a chunk.")] = 512,
    ratio: Annotated[
        float, typer.Option("--ratio", min=0.0, max=1.0, help="Share of the chunk tokens that is recomputed.")
    ] = RecomputeConfig().ratio,
    requests: Annotated[int, typer.Option("--requests", min=1, help="How many are measured.")] = 5,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")] = 16,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show the parts of a request and the top operators.")
    ] = False,
    top: Annotated[int, typer.Option("--top", min=1, help="How many operators.")] = 12,
    dtype: Annotated[str, typer.Option("--dtype", help="A torch dtype, or auto.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Draws the order of the chunks.")] = 0,
) -> None:
    """Measure the time to first token with stored chunks, in a new order for every request, against full prefill."""
    from cachecraft_rag.engine import CacheCraftEngine

    try:
        recompute = settings(RecomputeConfig, {"ratio": ratio}, {"ratio": "--ratio"})
        with CacheCraftEngine.from_pretrained(model, EngineConfig(recompute=recompute), dtype=dtype) as engine:
            chunks = _chunks(engine, text, chunk_tokens, num_chunks)
            prompts = _prompts(chunks, requests, seed)
            engine.warm(chunks, show_progress=True)
            full, reused = _measure(engine, prompts, max_new_tokens)
            _show_times(full, reused)
            if profile:
                _show_parts(engine, prompts[-1], reused)
                _show_operators(lambda: engine.generate(prompts[-1], max_new_tokens=max_new_tokens), top)
    except (ValueError, ImportError, OSError, RuntimeError, CacheCraftError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def _chunks(engine: CacheCraftEngine, path: Path | None, chunk_tokens: int, number: int) -> list[str]:
    """Different chunks of so many tokens.

    Raises:
        ValueError: The text is too short, or no UTF-8.
    """
    from cachecraft_rag.evaluate.text_file import read_text

    encode, decode = engine.prompts.encode_chunk, engine.prompts.decode
    if path is None:
        drawn = random.Random(number)
        texts = [" ".join(drawn.choices(_WORDS.split(), k=2 * chunk_tokens)) for _ in range(number)]
        return [decode(encode(text)[:chunk_tokens]).strip() for text in texts]
    ids = encode(read_text(path))
    starts = range(0, len(ids) - chunk_tokens + 1, chunk_tokens)
    found = list(dict.fromkeys(decode(ids[start : start + chunk_tokens]).strip() for start in starts))
    if len(found) < number:
        raise ValueError(f"--text: {path} holds {len(found)} chunks of {chunk_tokens} tokens; {number} are wanted")
    return found[:number]


def _prompts(chunks: list[str], number: int, seed: int) -> list[RagPrompt]:
    """The chunks in a new order every time; one more than is measured, to warm up."""
    draw = random.Random(seed)
    return [RagPrompt(_SYSTEM, tuple(draw.sample(chunks, len(chunks))), _QUESTION) for _ in range(number + 1)]


def _measure(
    engine: CacheCraftEngine, prompts: list[RagPrompt], max_new_tokens: int
) -> tuple[list[RequestStats], list[RequestStats]]:
    """Figures of full prefill and of reuse, taken in turns; the first prompt is left out."""
    full, reused = [], []
    for prompt in prompts:
        full.append(engine.generate(prompt, reuse=False, max_new_tokens=max_new_tokens).stats)
        reused.append(engine.generate(prompt, max_new_tokens=max_new_tokens).stats)
    return full[1:], reused[1:]


def _show_times(full: list[RequestStats], reused: list[RequestStats]) -> None:
    names = ("", "TTFT", "of full prefill", "computed", "tokens/s", "from")
    table = output.new_table(*names, numbers=names[1:5], texts=names[5:])
    whole = _median(full, "ttft_s")
    for name, stats in (("full prefill", full), ("chunks reused", reused)):
        ttft, decode_s = _median(stats, "ttft_s"), sum(one.decode_s for one in stats)
        speed = sum(max(one.output_tokens - 1, 0) for one in stats) / decode_s if decode_s else 0.0
        tiers = ", ".join(f"{tier} {count}" for tier, count in stats[-1].hits_by_tier.items())
        figures = (_ms(ttft), f"{ttft / whole:.1%}", f"{_median(stats, 'charged_ratio'):.1%}", f"{speed:.1f}")
        table.add_row(name, *figures, tiers)
    typer.echo(f"{reused[-1].prompt_tokens:,} tokens, {reused[-1].chunk_hits} stored chunks, {len(full)} requests")
    output.show(table)
    if reused[-1].fallback_reason is not None:
        typer.echo(f"nothing was reused: {reused[-1].fallback_reason}")


def _show_parts(engine: CacheCraftEngine, prompt: RagPrompt, reused: list[RequestStats]) -> None:
    """Medians of the parts; what the figures of a request don't tell apart is timed alone, on one prompt."""
    ttft_s, count = _median(reused, "ttft_s"), max(reused[-1].output_tokens - 1, 1)
    tokenise_s, look_up_s, read_s = _alone(engine, prompt)
    parts = {"tokenise and find chunks": tokenise_s}
    if reused[-1].fallback_reason is None:
        parts |= {
            "look up": look_up_s,
            "load": read_s,
            "place": max(_median(reused, "load_s") - look_up_s - read_s, 0.0),
            "compute what was not stored": _median(reused, "encode_s"),
            "select": _median(reused, "select_s"),
            "recompute, all layers": _median(reused, "prefill_s"),
        }
    else:
        parts["full prefill"] = _median(reused, "prefill_s")
    parts["other"] = max(ttft_s - sum(parts.values()), 0.0)
    table = output.new_table("part", "time", "of TTFT", numbers=("time", "of TTFT"))
    for name, seconds in parts.items():
        table.add_row(name, _ms(seconds), f"{seconds / ttft_s:.1%}")
    table.add_row("first token", _ms(ttft_s), "100.0%")
    table.add_row("decode, per token", _ms(_median(reused, "decode_s") / count), "")
    table.add_row("after the answer", _ms(_median(reused, "store_s")), "")
    output.show(table)


def _alone(engine: CacheCraftEngine, prompt: RagPrompt) -> tuple[float, float, float]:
    """Seconds to tokenise a prompt, to look its chunks up, and to read their KV where it lies in a slow tier.

    Medians, as the other parts are; the first try only warms up.
    """
    tries = [_tried(engine, prompt) for _ in range(1 + _TRIES)][1:]
    tokenise_s, look_up_s, read_s = (float(median(seconds)) for seconds in zip(*tries, strict=True))
    return tokenise_s, look_up_s, read_s


def _tried(engine: CacheCraftEngine, prompt: RagPrompt) -> tuple[float, float, float]:
    times = [time.perf_counter()]
    encoded = engine.prompts.encode(prompt, engine.library.registry, engine.config.namespace)
    times.append(time.perf_counter())
    chunks = engine.library.look_up(encoded, engine.library.keys(engine.config.namespace))
    times.append(time.perf_counter())
    for chunk_kv in (chunk.chunk_kv for chunk in chunks if chunk.chunk_kv is not None and not chunk.chunk_kv.is_read):
        for layer_idx in range(engine.model.config.num_hidden_layers):
            chunk_kv.layer(layer_idx)
    times.append(time.perf_counter())
    engine.library.settle(chunks)
    return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def _show_operators(call: Callable[[], Any], top: int) -> None:
    """What PyTorch's profiler sees in one request: operators by the time spent in themselves."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        call()
    column = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: getattr(event, column), reverse=True)
    whole = sum(getattr(event, column) for event in events) or 1.0
    table = output.new_table("operator", "calls", "time", "share", numbers=("calls", "time", "share"))
    for event in events[:top]:
        own = getattr(event, column)
        table.add_row(output.plain(event.key), f"{event.count:,}", _ms(own / 1e6), f"{own / whole:.1%}")
    typer.echo(f"operators of one request, answer included, by {'GPU' if on_gpu else 'CPU'} time of their own")
    output.show(table)


def _median(stats: list[RequestStats], field: str) -> float:
    return float(median(getattr(one, field) for one in stats))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
