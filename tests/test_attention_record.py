"""Recorded attention: equal to the sums of a plain softmax over the whole prompt."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cachecraft_rag import attention_record
from cachecraft_rag.attention import QUERY_BLOCK, visible_keys
from cachecraft_rag.attention_record import ChunkAttention, chunk_attention

HEADS = [(4, 4), (4, 2), (6, 1)]
DIM = 8
Bounds = list[tuple[int, int]]
BOUNDS: dict[str, Bounds] = {
    "side by side": [(0, 60), (60, 61), (61, 200), (200, 301)],
    "with text around": [(7, 60), (75, 140), (141, 290)],
    "one": [(20, 250)],
    "whole": [(0, 301)],
    "none": [],
}


def tensors(
    num_heads: int, num_kv_heads: int, num_rows: int, num_keys: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, num_heads, num_rows, DIM, generator=generator) * 2
    key = torch.randn(1, num_kv_heads, num_keys, DIM, generator=generator) * 2
    return query.to(dtype), key.to(dtype)


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    bounds: Bounds,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> ChunkAttention:
    """The same from the full matrix in float64, row by row and chunk by chunk."""
    groups = query.shape[1] // key.shape[1]
    scores = query[0].double() @ key[0].double().repeat_interleave(groups, dim=0).transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = visible_keys(positions, torch.arange(key.shape[2]), window)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).sum(dim=0)
    inter, intra = torch.zeros(len(bounds), len(bounds)), torch.zeros(len(bounds))
    per_token = torch.zeros(len(positions))
    for row, position in enumerate(positions.tolist()):
        for i, (start, end) in enumerate(bounds):
            if not start <= position < end:
                continue
            intra[i] += weights[row, start:position].sum()
            for j, (first, last) in enumerate(bounds[:i]):
                inter[i, j] += weights[row, first:last].sum()
                per_token[row] += weights[row, first:last].sum()
    return ChunkAttention(inter, intra, per_token)


def assert_equal(found: ChunkAttention, expected: ChunkAttention) -> None:
    for name, one, other in zip(ChunkAttention._fields, found, expected, strict=True):
        assert one.dtype == torch.float32
        assert one.shape == other.shape, name
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", BOUNDS)
def test_the_record_equals_the_sums_of_a_plain_softmax(
    kind: str, softcap: float | None, window: int | None, num_heads: int, num_kv_heads: int
) -> None:
    positions = torch.arange(301)
    query, key = tensors(num_heads, num_kv_heads, 301, 301)
    arguments = (query, key, positions, BOUNDS[kind], 0.3, window, softcap)
    assert_equal(chunk_attention(*arguments), naive(*arguments))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.sets(st.integers(0, 200), max_size=150),
    cuts=st.sets(st.integers(0, 220), max_size=8),
    first=st.booleans(),
    window=st.none() | st.integers(1, 150),
    heads=st.sampled_from(HEADS),
)
def test_the_record_of_any_rows_and_chunks_equals_a_plain_softmax(
    rows: set[int], cuts: set[int], first: bool, window: int | None, heads: tuple[int, int]
) -> None:
    edges = sorted(cuts)[0 if first else 1 :]
    bounds = list(zip(edges[::2], edges[1::2], strict=False))
    positions = torch.tensor(sorted(rows), dtype=torch.long)
    query, key = tensors(*heads, len(rows), 201)
    arguments = (query, key, positions, bounds, 0.4, window, None)
    assert_equal(chunk_attention(*arguments), naive(*arguments))


def test_equal_scores_give_shares_that_can_be_counted() -> None:
    # Five tokens, all scores equal: row p gives 1/(p+1) to each key, for each of two heads.
    # Chunk 0 is tokens 0-1, token 2 is text, chunk 1 is tokens 3-4.
    query, key = torch.zeros(1, 2, 5, DIM), torch.zeros(1, 1, 5, DIM)
    inter, intra, per_token = chunk_attention(query, key, torch.arange(5), [(0, 2), (3, 5)], 1.0, None, None)
    assert inter.tolist() == [[0.0, 0.0], [pytest.approx(2 * (2 / 4 + 2 / 5)), 0.0]]
    assert intra.tolist() == pytest.approx([2 * 1 / 2, 2 * 1 / 5])
    assert per_token.tolist() == pytest.approx([0.0, 0.0, 0.0, 2 * 2 / 4, 2 * 2 / 5])


def test_inter_intra_and_the_tokens_themselves_make_up_all_attention() -> None:
    query, key = tensors(4, 2, 200, 200)
    bounds: Bounds = [(0, 50), (50, 120), (120, 200)]
    inter, intra, per_token = chunk_attention(query, key, torch.arange(200), bounds, 0.3, None, None)
    alone = chunk_attention(query, key, torch.arange(200), [(p, p + 1) for p in range(200)], 0.3, None, None)
    to_itself = 4.0 - alone.per_token
    for chunk, (start, end) in enumerate(bounds):
        total = inter[chunk].sum() + intra[chunk] + to_itself[start:end].sum()
        assert float(total) == pytest.approx(4 * (end - start), rel=1e-4)
        assert float(per_token[start:end].sum()) == pytest.approx(float(inter[chunk].sum()), rel=1e-4)


def test_a_chunk_of_one_token_has_no_attention_inside() -> None:
    query, key = tensors(4, 2, 10, 10)
    record = chunk_attention(query, key, torch.arange(10), [(0, 4), (4, 5), (5, 10)], 0.3, None, None)
    assert float(record.intra[1]) == 0.0
    assert float(record.intra[0]) > 0.0


def test_chunks_beyond_the_window_get_nothing() -> None:
    query, key = tensors(4, 2, 60, 60)
    record = chunk_attention(query, key, torch.arange(60), [(0, 20), (20, 40), (40, 60)], 0.3, 10, None)
    assert float(record.inter[2, 0]) == 0.0
    assert float(record.inter[2, 1]) > 0.0
    assert (record.per_token[20:29] > 0).all()
    assert (record.per_token[29:40] == 0).all()


def test_few_scores_at_a_time_give_the_same_record(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = tensors(6, 3, 301, 301)
    arguments = (query, key, torch.arange(301), BOUNDS["with text around"], 0.3, None, None)
    expected = chunk_attention(*arguments)
    monkeypatch.setattr(attention_record, "_SCORES_AT_ONCE", 1)
    assert_equal(chunk_attention(*arguments), expected)


class _Largest(TorchDispatchMode):
    """Watches the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        made = [item.numel() for item in tree_leaves(output) if isinstance(item, torch.Tensor)]
        self.numel = max([self.numel, *made])
        return output


def test_no_tensor_is_as_large_as_the_scores_of_one_head() -> None:
    query, key = tensors(4, 4, 3000, 3000)
    with _Largest() as largest:
        chunk_attention(query, key, torch.arange(3000), [(0, 1000), (1000, 3000)], 0.3, None, None)
    assert 0 < largest.numel <= 4 * QUERY_BLOCK * 3000 < 3000 * 3000


def test_evenly_spaced_rows_give_about_the_same_ratio_of_outside_to_inside() -> None:
    query, key = tensors(4, 2, 600, 600)
    bounds: Bounds = [(0, 200), (200, 400), (400, 600)]
    rows = torch.arange(0, 600, 4)
    whole = chunk_attention(query, key, torch.arange(600), bounds, 0.1, None, None)
    sample = chunk_attention(query[:, :, rows], key, rows, bounds, 0.1, None, None)
    assert torch.allclose(sample.per_token, whole.per_token[rows], rtol=1e-4, atol=1e-4)
    for chunk in (1, 2):
        ratios = [float(record.inter[chunk].sum() / record.intra[chunk]) for record in (whole, sample)]
        assert ratios[1] == pytest.approx(ratios[0], rel=0.05)


def test_half_precision_stays_close_and_gives_float32() -> None:
    query, key = tensors(4, 2, 301, 301, torch.bfloat16)
    arguments = (query, key, torch.arange(301), BOUNDS["side by side"], 0.3, None, None)
    found, expected = chunk_attention(*arguments), naive(*arguments)
    assert found.inter.dtype == torch.float32
    assert torch.allclose(found.inter, expected.inter, rtol=2e-2, atol=0.5)
    assert torch.allclose(found.intra, expected.intra, rtol=2e-2, atol=0.5)


def test_nothing_of_the_inputs_is_modified() -> None:
    inputs = tensors(4, 2, 301, 301)
    copies = [tensor.clone() for tensor in inputs]
    chunk_attention(*inputs, torch.arange(301), BOUNDS["side by side"], 0.3, 50, 2.0)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))


def test_keys_behind_the_last_row_make_no_difference() -> None:
    query, key = tensors(4, 2, 100, 150)
    before = chunk_attention(query, key, torch.arange(100), [(0, 40), (40, 140)], 0.3, None, None)
    key[:, :, 100:] = math.nan
    after = chunk_attention(query, key, torch.arange(100), [(0, 40), (40, 140)], 0.3, None, None)
    assert torch.equal(before.inter, after.inter)
    assert torch.equal(before.intra, after.intra)


@pytest.mark.parametrize("bounds", [[(5, 5)], [(4, 2)], [(0, 5), (4, 8)], [(-1, 4)], [(5, 8), (0, 3)]])
def test_bounds_out_of_order_are_refused(bounds: Bounds) -> None:
    query, key = tensors(4, 2, 10, 10)
    with pytest.raises(ValueError, match="bounds: "):
        chunk_attention(query, key, torch.arange(10), bounds, 0.3, None, None)
