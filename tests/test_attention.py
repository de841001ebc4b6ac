"""Attention of selected rows: equal to a plain masked softmax, whatever is skipped."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.attention import (
    QUERY_BLOCK,
    QueryBlock,
    attend,
    attend_with_mass,
    attention_mass,
    plan_blocks,
    sdpa_block,
    visible_keys,
)

HEADS = [(4, 4), (4, 2), (6, 1)]
DIM = 8


def visible(positions: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """Which keys every row may see, written out, ``[num_rows, num_keys]`` bool."""
    rows = [
        [key <= query and (window is None or key > query - window) for key in range(num_keys)]
        for query in positions.tolist()
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(len(rows), num_keys)


def seen(blocks: list[QueryBlock], num_rows: int, num_keys: int) -> torch.Tensor:
    """Which keys the blocks let every row see, ``[num_rows, num_keys]`` bool."""
    total = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    for block in blocks:
        (first, last), (first_key, last_key) = block.rows, block.keys
        inside = torch.ones(last - first, last_key - first_key, dtype=torch.bool)
        if block.is_causal:
            inside = inside.tril()
        if block.visible is not None:
            inside = inside & block.visible
        total[first:last, first_key:last_key] = inside
    return total


def positions_of(kind: str, num_keys: int) -> torch.Tensor:
    """Sorted query positions of several shapes."""
    generator = torch.Generator().manual_seed(5)
    last = num_keys - 1
    picked = {
        "all": torch.arange(num_keys),
        "one": torch.tensor([last]),
        "first": torch.tensor([0]),
        "tail": torch.arange(last - 40, num_keys),
        "head and tail": torch.cat([torch.arange(30), torch.arange(last - 20, num_keys)]),
        "scattered": torch.randperm(num_keys, generator=generator)[: num_keys // 3].sort().values,
        "start and scattered": torch.cat([torch.arange(2), torch.randperm(last - 2, generator=generator)[:60] + 2]),
    }[kind]
    positions: torch.Tensor = picked.unique()
    return positions


KINDS = ["all", "one", "first", "tail", "head and tail", "scattered", "start and scattered"]


def tensors(
    num_heads: int, num_kv_heads: int, num_rows: int, num_keys: int, dtype: torch.dtype, value_dim: int = DIM
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    query = torch.randn(1, num_heads, num_rows, DIM, generator=generator, dtype=torch.float64) * 2
    key = torch.randn(1, num_kv_heads, num_keys, DIM, generator=generator, dtype=torch.float64) * 2
    value = torch.randn(1, num_kv_heads, num_keys, value_dim, generator=generator, dtype=torch.float64)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def probabilities(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, scaling: float, softcap: float | None = None
) -> torch.Tensor:
    """Plain masked softmax in float64, ``[num_heads, num_rows, num_keys]``."""
    groups = query.shape[1] // key.shape[1]
    scores = query[0].double() @ key[0].double().repeat_interleave(groups, dim=0).transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights: torch.Tensor = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return weights


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """``[1, num_rows, num_heads, value_dim]`` in float64."""
    groups = query.shape[1] // key.shape[1]
    weights = probabilities(query, key, mask, scaling)
    return (weights @ value[0].double().repeat_interleave(groups, dim=0)).transpose(0, 1)[None]


def computed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    scaling: float,
    allow_causal: bool = True,
) -> torch.Tensor:
    return attend(query, key, value, plan_blocks(positions, window, allow_causal), partial(sdpa_block, scaling=scaling))


@settings(max_examples=150, deadline=None)
@given(
    positions=st.sets(st.integers(0, 500), min_size=1, max_size=300),
    run=st.integers(0, 200),
    window=st.none() | st.integers(1, 300),
    allow_causal=st.booleans(),
)
def test_blocks_cover_all_rows_in_order_and_show_each_what_it_may_see(
    positions: set[int], run: int, window: int | None, allow_causal: bool
) -> None:
    rows = torch.tensor(sorted(positions | set(range(run))))
    num_keys = int(rows[-1]) + 1
    blocks = plan_blocks(rows, window, allow_causal)
    assert [row for block in blocks for row in range(*block.rows)] == list(range(len(rows)))
    assert torch.equal(seen(blocks, len(rows), num_keys), visible_keys(rows, torch.arange(num_keys), window))
    assert allow_causal or not any(block.is_causal for block in blocks)


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
def test_visibility_is_causal_and_within_the_window(window: int | None) -> None:
    rows = torch.tensor([0, 3, 4, 19])
    assert torch.equal(visible_keys(rows, torch.arange(20), window), visible(rows, 20, window))


def test_no_block_has_more_masked_rows_than_the_limit() -> None:
    blocks = plan_blocks(torch.arange(1, 1000), None)
    assert max(last - first for first, last in (block.rows for block in blocks)) == QUERY_BLOCK


def test_a_whole_prompt_is_one_causal_block() -> None:
    (block,) = plan_blocks(torch.arange(1000), None)
    assert block.is_causal
    assert (block.rows, block.keys, block.visible) == ((0, 1000), (0, 1000), None)


def test_keys_behind_the_rows_of_a_block_are_never_read() -> None:
    blocks = plan_blocks(torch.arange(1, 1001), None)
    read = sum(
        (last - first) * (last_key - first_key)
        for (first, last), (first_key, last_key) in ((block.rows, block.keys) for block in blocks)
    )
    assert read < 0.6 * 1000 * 1001


def test_keys_before_the_window_are_never_read() -> None:
    for block in plan_blocks(torch.arange(500, 1000), 16):
        assert block.keys[1] - block.keys[0] <= QUERY_BLOCK + 15


def test_no_rows_make_no_blocks() -> None:
    assert plan_blocks(torch.empty(0, dtype=torch.long), None) == []


def test_a_single_row_needs_no_mask() -> None:
    (block,) = plan_blocks(torch.tensor([700]), 100)
    assert (block.keys, block.visible, block.is_causal) == ((601, 701), None, False)


def test_a_mask_is_made_once_per_dtype() -> None:
    block = plan_blocks(torch.tensor([3, 7]), None)[0]
    half, whole = (block.bias(dtype, torch.device("cpu")) for dtype in (torch.float16, torch.float32))
    assert half is not None
    assert whole is not None
    assert (half.dtype, whole.dtype, whole.shape) == (torch.float16, torch.float32, (1, 1, 2, 8))
    assert block.bias(torch.float32, torch.device("cpu")) is whole
    assert torch.equal(whole[0, 0] == 0, visible(torch.tensor([3, 7]), 8, None))
    assert torch.isfinite(half).all()


def test_a_mask_of_packed_heads_repeats_all_rows_for_every_head() -> None:
    block = plan_blocks(torch.tensor([3, 7]), None)[0]
    once, packed = (block.bias(torch.float32, torch.device("cpu"), repeats) for repeats in (1, 3))
    assert once is not None
    assert packed is not None
    assert torch.equal(packed[0, 0], torch.cat([once[0, 0]] * 3))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("window", [None, 1, 5, 100, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_a_plain_masked_softmax(
    kind: str, window: int | None, num_heads: int, num_kv_heads: int
) -> None:
    num_keys = 3 * QUERY_BLOCK + 17
    positions = positions_of(kind, num_keys)
    num_keys = int(positions[-1]) + 1
    mask = visible(positions, num_keys, window)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        query, key, value = tensors(num_heads, num_kv_heads, len(positions), num_keys, dtype)
        expected = reference(query, key, value, mask, 0.3)
        for allow_causal in (True, False):
            found = computed(query, key, value, positions, window, 0.3, allow_causal)
            assert found.dtype == dtype
            assert found.shape == (1, len(positions), num_heads, DIM)
            assert torch.allclose(found.double(), expected, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    positions=st.sets(st.integers(0, 300), min_size=1, max_size=200),
    window=st.none() | st.integers(1, 200),
    heads=st.sampled_from(HEADS),
)
def test_attention_of_any_rows_equals_a_plain_masked_softmax(
    positions: set[int], window: int | None, heads: tuple[int, int]
) -> None:
    rows = torch.tensor(sorted(positions))
    query, key, value = tensors(*heads, len(rows), int(rows[-1]) + 1, torch.float64)
    expected = reference(query, key, value, visible_keys(rows, torch.arange(key.shape[2]), window), 0.5)
    assert torch.allclose(computed(query, key, value, rows, window, 0.5), expected, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype: torch.dtype) -> None:
    positions = positions_of("scattered", 300)
    query, key, value = tensors(4, 2, len(positions), int(positions[-1]) + 1, dtype)
    expected = reference(query, key, value, visible(positions, key.shape[2], 50), 0.3)
    assert torch.allclose(computed(query, key, value, positions, 50, 0.3).double(), expected, atol=3e-2)


def test_values_may_have_another_width_than_keys() -> None:
    positions = positions_of("scattered", 300)
    query, key, value = tensors(4, 2, len(positions), int(positions[-1]) + 1, torch.float64, value_dim=3)
    expected = reference(query, key, value, visible(positions, key.shape[2], None), 0.3)
    assert torch.allclose(computed(query, key, value, positions, None, 0.3), expected, atol=1e-9)


def test_keys_behind_the_last_row_make_no_difference() -> None:
    positions = torch.tensor([4, 9, 11])
    query, key, value = tensors(4, 2, 3, 20, torch.float64)
    before = computed(query, key, value, positions, None, 0.3)
    key[:, :, 12:], value[:, :, 12:] = float("nan"), float("nan")
    assert torch.equal(computed(query, key, value, positions, None, 0.3), before)


def test_nothing_of_the_inputs_is_modified() -> None:
    positions = positions_of("start and scattered", 200)
    inputs = tensors(4, 2, len(positions), int(positions[-1]) + 1, torch.float32)
    copies = [tensor.clone() for tensor in inputs]
    computed(*inputs, positions, 30, 0.3)
    attention_mass(inputs[0], inputs[1], positions, 30, 0.3, 50.0)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("kind", ["all", "one", "scattered"])
def test_attention_mass_is_the_sum_of_the_attention(
    kind: str, softcap: float | None, window: int | None, num_heads: int, num_kv_heads: int
) -> None:
    positions = positions_of(kind, 150)
    num_keys = int(positions[-1]) + 1
    query, key, _ = tensors(num_heads, num_kv_heads, len(positions), num_keys, torch.float32)
    mass = attention_mass(query, key, positions, window, 0.3, softcap)
    expected = probabilities(query, key, visible(positions, num_keys, window), 0.3, softcap).sum(dim=(0, 1))
    assert mass.shape == (num_keys,)
    assert mass.dtype == torch.float32
    assert torch.allclose(mass.double(), expected, atol=1e-4)
    assert float(mass.sum()) == pytest.approx(num_heads * len(positions), rel=1e-4)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("kind", ["all", "one", "scattered"])
def test_attention_with_its_mass_equals_each_of_both(
    kind: str, window: int | None, num_heads: int, num_kv_heads: int
) -> None:
    positions = positions_of(kind, 2 * QUERY_BLOCK + 30)
    num_keys = int(positions[-1]) + 1
    query, key, value = tensors(num_heads, num_kv_heads, len(positions), num_keys, torch.float32, value_dim=3)
    output, mass = attend_with_mass(query, key, value, positions, window, 0.3)
    assert torch.equal(mass, attention_mass(query, key, positions, window, 0.3, None))
    assert output.shape == (1, len(positions), num_heads, 3)
    expected = reference(query, key, value, visible(positions, num_keys, window), 0.3)
    assert torch.allclose(output.double(), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_with_its_mass_stays_close_in_half_precision(dtype: torch.dtype) -> None:
    positions = positions_of("scattered", 300)
    query, key, value = tensors(4, 2, len(positions), int(positions[-1]) + 1, dtype)
    output, mass = attend_with_mass(query, key, value, positions, None, 0.3)
    assert (output.dtype, mass.dtype) == (dtype, torch.float32)
    mask = visible(positions, key.shape[2], None)
    assert torch.allclose(output.double(), reference(query, key, value, mask, 0.3), atol=4e-2)
    expected = probabilities(query, key, mask, 0.3).sum(dim=(0, 1))
    assert torch.allclose(mass.double(), expected, rtol=3e-2, atol=1e-3)


def test_attention_mass_of_half_precision_is_float32() -> None:
    positions = positions_of("scattered", 100)
    query, key, _ = tensors(4, 2, len(positions), int(positions[-1]) + 1, torch.bfloat16)
    mass = attention_mass(query, key, positions, None, 0.3, None)
    assert mass.dtype == torch.float32
    assert float(mass.sum()) == pytest.approx(4 * len(positions), rel=1e-3)


def test_a_soft_cap_makes_attention_more_even() -> None:
    positions = positions_of("one", 100)
    query, key, _ = tensors(4, 2, 1, 100, torch.float32)
    plain, capped = (attention_mass(query, key, positions, None, 1.0, cap) for cap in (None, 1.0))
    assert capped.max() < plain.max()
