"""Decoding speed against transformers' ``generate`` with its dynamic and its static cache.

    python benchmarks/decode.py --model FOLDER [--data docs.jsonl] [--contexts 512 2048 4096] [--tokens 64]

All decode as many tokens behind the same prompt, ours behind KV that was reused in part, one after the other in random
order. The time is that from the first token to the last; medians over the prompts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

import torch
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.token_times import TokenTimes
from benchmarks.workload import load_workload, machine
from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt

SYSTEM = "You answer questions about contracts."
QUESTION = "List every obligation of each party, one per line, with the number of its clause."
CACHES = ("dynamic", "static")
OURS = "ours"


def main() -> None:
    """Measure and print one table."""
    arguments = _arguments()
    config = EngineConfig(keep_exact=False)
    with CacheCraftEngine.from_pretrained(arguments.model, config, dtype=arguments.dtype) as engine:
        most = max(arguments.contexts) // arguments.chunk_tokens
        workload = load_workload(engine, arguments.data, arguments.chunk_tokens, most + most // 2)
        engine.warm(workload.chunks, show_progress=True)
        draw = random.Random(arguments.seed)
        rows = []
        for context in arguments.contexts:
            measured: dict[str, list[float]] = {name: [] for name in (OURS, *CACHES)}
            for _ in tqdm(range(arguments.prompts), desc=f"{context} tokens", unit="prompt"):
                chunks = draw.sample(workload.chunks, context // arguments.chunk_tokens)
                prompt = RagPrompt(SYSTEM, tuple(chunks), QUESTION)
                for name in draw.sample((OURS, *CACHES), len(CACHES) + 1):
                    measured[name].append(tokens_per_s(engine, prompt, name, arguments.tokens))
            rows.append((context, {name: statistics.median(speeds) for name, speeds in measured.items()}))
        print(f"{arguments.model}, {arguments.dtype}, {machine()}")
    print("| context | ours tokens/s | dynamic cache | static cache | ours / static |\n|---|---|---|---|---|")
    for context, speed in rows:
        cells = (f"{speed[name]:.1f}" for name in (OURS, *CACHES))
        print(f"| {context} | {' | '.join(cells)} | {speed[OURS] / speed['static']:.2f} |")


def tokens_per_s(engine: CacheCraftEngine, prompt: RagPrompt, name: str, num_tokens: int) -> float:
    """Decoding speed of one engine behind one prompt.

    Raises:
        SystemExit: Our answer ended too early to tell.
    """
    if name == OURS:
        result = engine.generate(prompt, max_new_tokens=num_tokens)
        if len(result.token_ids) < 8:
            raise SystemExit(f"the answer has {len(result.token_ids)} tokens: too few to measure; try another --seed")
        return (len(result.token_ids) - 1) / result.stats.decode_s
    ids = torch.tensor([engine.prompts.encode(prompt).token_ids], device=engine.model.device)
    clock = TokenTimes()
    engine.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        streamer=clock,
        cache_implementation=name,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    first, last = clock.times[1], clock.times[num_tokens]  # the prompt comes before the first token
    return (num_tokens - 1) / (last - first)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, alias or hub id")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--data", type=Path, help="JSONL file of documents; default: the sample contracts")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
