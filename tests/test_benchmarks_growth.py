"""The growth and GPU benchmarks: their fits, their tables, and their parts on a tiny model."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import growth_parts as parts
from benchmarks.fit import causal_pairs, exponent, fit_costs
from benchmarks.gpu import Timed, as_table, main
from benchmarks.gpu_model import random_engine
from benchmarks.growth import as_markdown, as_rich, exponents
from benchmarks.growth_parts import Row, kv_bytes, made_up
from benchmarks.tiny import tiny_engine
from cachecraft_rag import EngineConfig, RagPrompt, RequestStats

TINY_SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def test_the_exponent_of_a_power_law_is_found() -> None:
    sizes = [1, 2, 4, 8, 32]
    assert exponent(sizes, [3 * size**1.7 for size in sizes]) == pytest.approx(1.7)
    assert exponent(sizes, [5.0] * 5) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("sizes", "values", "problem"),
    [([2, 2], [1, 2], "two different"), ([1, 2], [1], "two different"), ([1, 2], [0, 1], "above 0")],
)
def test_no_exponent_is_made_up(sizes: list[float], values: list[float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        exponent(sizes, values)


def test_costs_are_found_from_counts_and_are_never_negative() -> None:
    rows = [1000.0, 2000.0, 4000.0, 600.0]
    pairs = [causal_pairs(count, length) for count, length in zip(rows, [1000, 2000, 4000, 4000], strict=True)]
    seconds = [2e-3 * row + 1e-7 * pair for row, pair in zip(rows, pairs, strict=True)]
    costs = fit_costs(rows, pairs, seconds, [0, 0, 0, 4000], [0, 0, 0, 0.04])
    assert (costs.row, costs.pair, costs.placed) == (pytest.approx(2e-3), pytest.approx(1e-7), pytest.approx(1e-5))
    assert costs.seconds(600, pairs[3], 4000) == pytest.approx(seconds[3] + 0.04)
    falling = fit_costs(rows, pairs, [row**0.9 for row in rows], [0], [0])
    assert falling.row > 0
    assert falling.pair >= 0


def test_exponents_leave_out_what_was_simulated_and_what_is_zero() -> None:
    rows = [Row(size, {"s": 2.0 * size, "load": 0.0}) for size in (1, 2, 4)] + [Row(64, {"s": 1.0, "load": 1.0}, True)]
    assert exponents(rows) == {"s": pytest.approx(1.0)}
    assert exponents(rows[:1]) == {}
    text = as_markdown("tokens", rows)
    assert "| 64 (simulated) | 1 | 1 |" in text
    assert text.splitlines()[-1] == "| exponent | 1.00 |  |"
    assert as_rich("title", "tokens", rows, "note").row_count == 5


def test_stored_chunks_are_found_by_their_text_among_many() -> None:
    rows = parts.stored([10, 40], repeats=1)
    assert [row.size for row in rows] == [10, 40]
    assert rows[1].figures["stored MiB"] == pytest.approx(4 * rows[0].figures["stored MiB"], rel=0.05)
    assert all(value > 0 for row in rows for value in row.figures.values())


def test_context_and_chunks_are_measured_and_32k_is_simulated() -> None:
    with tiny_engine() as engine:
        rows = parts.context(engine, [512, 1024], repeats=1)
        assert [(row.size, row.is_simulated) for row in rows] == [(512, False), (1024, False), (32_768, True)]
        assert rows[2].figures["KV MiB"] == pytest.approx(32 * rows[1].figures["KV MiB"], rel=0.1)
        assert rows[2].figures["tokens computed"] < 0.4 * 32_768
        assert rows[1].figures["tokens computed"] < 0.6 * 1024
        assert [row.size for row in parts.chunks(engine, [1, 4], 512, repeats=1)] == [1, 4]


def test_users_are_answered_together_and_one_after_the_other() -> None:
    with tiny_engine() as engine:
        rows = parts.users(engine, [1, 3], length=512, max_new_tokens=3)
    assert [row.size for row in rows] == [1, 3]
    assert all(value > 0 for row in rows for value in row.figures.values())


def test_made_up_chunks_differ_and_their_kv_is_counted() -> None:
    with tiny_engine() as engine:
        texts = made_up(engine, 3, 40)
        assert len({*texts, *made_up(engine, 3, 40, seed=1)}) == 6
        assert all(36 <= len(engine.prompts.encode_chunk(text)) <= 40 for text in texts)
        engine.warm(texts[:1])
        tokens = len(engine.prompts.encode_chunk(texts[0]))
        assert kv_bytes(engine, tokens) <= engine.store.nbytes < 1.2 * kv_bytes(engine, tokens) + 4096


def test_a_random_model_of_a_given_shape_answers() -> None:
    config = EngineConfig.model_validate({"keep_exact": False})
    with random_engine(config, layers=2, device="cpu", **TINY_SHAPE) as engine:
        assert engine.model.dtype == torch.bfloat16
        engine.warm(["The lease ends.", "The garden begins."])
        stats = engine.generate(
            RagPrompt("Be brief.", ("The garden begins.", "The lease ends."), "Q"), max_new_tokens=3
        )
        assert stats.stats.chunk_hits == 2


def test_the_gpu_table_compares_with_full_prefill_of_the_same_request() -> None:
    def timed(*seconds: float) -> list[Timed]:
        return [Timed(one, RequestStats(prompt_tokens=10)) for one in seconds]

    table = as_table(1024, {"0.15": timed(0.1, 0.3, 0.4), "full": timed(1.0, 2.0, 4.0), "0": timed(0.1, 0.2, 0.4)})
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["full", "0", "0.15"]
    assert cells[2] == ["2000.00", "200.00", "300.00"]
    assert cells[3] == ["1.000", "0.100", "0.100"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_the_gpu_benchmark_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="no CUDA device here"):
        main()
