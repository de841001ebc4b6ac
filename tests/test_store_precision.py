"""Precision codecs: how far unpacked KV may be from what was packed, and in how few bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.store.precision import GROUP, PRECISIONS, PackedKV, pack
from cachecraft_rag.store_config import Precision

LOSSY: tuple[Precision, ...] = ("k16v8", "int8", "int4")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def entry(
    num_tokens: int = 10,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scale: float = 1.0,
    value_dim: int | None = None,
) -> ChunkKV:
    """Random KV of 2 layers and 3 heads."""
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 3, num_tokens, head_dim, generator=draw) * scale
    values = torch.randn(2, 3, num_tokens, value_dim or head_dim, generator=draw) * scale
    sensitivity = torch.rand(2, num_tokens, generator=draw).to(torch.float16)
    return ChunkKV(keys.to(dtype), values.to(dtype), tuple(range(num_tokens)), 7, sensitivity)


def with_outliers(chunk_kv: ChunkKV) -> ChunkKV:
    """Key channels as models have them: a few far from zero at every token, with the ordinary spread around that."""
    offset = torch.zeros(chunk_kv.keys.shape[-1])
    offset[:3] = torch.tensor([100.0, -40.0, 15.0])
    return replace(chunk_kv, keys=(chunk_kv.keys.float() + offset).to(chunk_kv.keys.dtype))


def groups(numbers: torch.Tensor, axis: int) -> Iterator[slice]:
    return (slice(at, at + GROUP) for at in range(0, numbers.shape[axis], GROUP))


def half_steps(numbers: torch.Tensor, kind: str, name: str) -> torch.Tensor:
    """Largest quantisation error of each number, worked out group by group."""
    numbers = numbers.float()
    if kind == "full":
        return torch.zeros_like(numbers)
    if kind == "int8":
        if name == "values":
            return (numbers.abs().amax(-1, keepdim=True) / 127 / 2).expand_as(numbers)
        parts = [numbers[:, :, part] for part in groups(numbers, 2)]
        return torch.cat([(part.abs().amax(2, keepdim=True) / 127 / 2).expand_as(part) for part in parts], dim=2)
    bound = torch.zeros_like(numbers)
    axis = 2 if name == "keys" else 3
    for part in groups(numbers, axis):
        index = (slice(None),) * axis + (part,)
        spread = numbers[index].amax(axis, keepdim=True) - numbers[index].amin(axis, keepdim=True)
        bound[index] = spread / 15 / 2 * 2 ** (1 / 8)  # steps are kept in eighths of an octave, rounded up
    # Steps reach 32 octaves below the largest one of the head.
    return torch.maximum(bound, bound.amax(dim=(2, 3), keepdim=True) * 2.0**-31)


def assert_within_bounds(chunk_kv: ChunkKV, precision: Precision) -> None:
    unpacked = pack(chunk_kv, precision).unpack()
    kinds = {"model": ("full", "full"), "k16v8": ("full", "int8")}.get(precision, (precision, precision))
    for name, kind in zip(("keys", "values"), kinds, strict=True):
        before, after = getattr(chunk_kv, name), getattr(unpacked, name)
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        rounding = torch.finfo(before.dtype).eps * (before.float().abs() + half_steps(before, kind, name))
        if kind == "full":
            assert torch.equal(after, before)
        else:
            arithmetic = 1e-5 * before.float().abs().amax()
            allowed = half_steps(before, kind, name) * 1.001 + rounding + arithmetic
            excess = (after.float() - before.float()).abs() - allowed
            assert excess.max() <= 0


def assert_equal(left: ChunkKV, right: ChunkKV) -> None:
    assert torch.equal(left.keys, right.keys)
    assert torch.equal(left.values, right.values)
    assert (left.token_ids, left.base) == (right.token_ids, right.base)
    assert left.sensitivity is not None
    assert right.sensitivity is not None
    assert torch.equal(left.sensitivity, right.sensitivity)


def as_fields(packed: PackedKV) -> dict[str, Any]:
    return {field.name: getattr(packed, field.name) for field in fields(packed)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_unpacked_numbers_are_within_half_a_step(precision: Precision, num_tokens: int, dtype: torch.dtype) -> None:
    assert_within_bounds(entry(num_tokens, dtype=dtype), precision)
    assert_within_bounds(with_outliers(entry(num_tokens, dtype=dtype)), precision)


@settings(max_examples=60, deadline=None)
@given(
    precision=st.sampled_from(LOSSY),
    num_tokens=st.integers(1, 140),
    head_dim=st.integers(1, 140),
    value_dim=st.integers(1, 140),
    scale=st.sampled_from([1e-20, 1e-4, 1.0, 1e3]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 9),
)
def test_any_shape_and_scale_stays_within_half_a_step(
    precision: Precision, num_tokens: int, head_dim: int, value_dim: int, scale: float, dtype: torch.dtype, seed: int
) -> None:
    chunk_kv = entry(num_tokens, head_dim, dtype, seed, scale, value_dim)
    assert_within_bounds(chunk_kv, precision)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_an_outlier_channel_costs_the_other_key_channels_nothing(precision: Precision) -> None:
    plain = entry(512)
    outlying = replace(plain, keys=torch.cat([plain.keys[..., :1] * 1000, plain.keys[..., 1:]], dim=-1))
    errors = [
        (pack(chunk_kv, precision).unpack().keys - chunk_kv.keys)[..., 1:].square().mean().sqrt()
        for chunk_kv in (plain, outlying)
    ]
    assert errors[1] < 1.05 * errors[0]


def test_keys_with_outlier_channels_are_within_a_percent_of_a_channels_spread_in_int8() -> None:
    keys = with_outliers(entry(512)).keys
    error = (pack(with_outliers(entry(512)), "int8").unpack().keys - keys)[..., 3:]
    assert error.square().mean().sqrt() < 0.01
    scale = keys.abs().amax(-1, keepdim=True) / 127  # a scale per token, which the outliers would stretch
    per_token = ((keys / scale).round() * scale - keys)[..., 3:]
    assert error.square().mean() < per_token.square().mean() / 100


@pytest.mark.parametrize("precision", PRECISIONS)
def test_zeros_stay_zeros(precision: Precision) -> None:
    zeros = torch.zeros(2, 3, 70, 16, dtype=torch.bfloat16)
    unpacked = pack(ChunkKV(zeros, zeros, tuple(range(70)), 0), precision).unpack()
    assert not unpacked.keys.any()
    assert not unpacked.values.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constant", [-3.7, 1e-6, 250.3])
def test_constant_groups_are_exact_in_int4(constant: float, dtype: torch.dtype) -> None:
    chunk_kv = entry(70, dtype=dtype)
    chunk_kv.keys[..., 5] = constant
    chunk_kv.values[:, :, 9] = constant
    unpacked = pack(chunk_kv, "int4").unpack()
    assert torch.equal(unpacked.keys[..., 5], chunk_kv.keys[..., 5])
    assert torch.equal(unpacked.values[:, :, 9], chunk_kv.values[:, :, 9])


@pytest.mark.parametrize("precision", LOSSY)
def test_the_largest_numbers_of_float16_stay_finite(precision: Precision) -> None:
    chunk_kv = entry(70, dtype=torch.float16)
    for numbers in (chunk_kv.keys, chunk_kv.values):
        numbers[0, 0, :2] = torch.tensor([65504.0, -65504.0])[:, None]
    unpacked = pack(chunk_kv, precision).unpack()
    assert unpacked.keys.isfinite().all()
    assert unpacked.values.isfinite().all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("precision", LOSSY)
def test_what_is_not_finite_does_not_turn_into_numbers(precision: Precision, poison: float) -> None:
    chunk_kv = entry(70)
    for numbers in (chunk_kv.keys, chunk_kv.values):
        numbers[0, 1, 3, 4] = poison
    unpacked = pack(chunk_kv, precision).unpack()
    for numbers in (unpacked.keys, unpacked.values):
        assert not numbers[0, 1, 3].isfinite().all()
        assert numbers[1].isfinite().all()


def test_model_precision_keeps_the_tensors_themselves() -> None:
    chunk_kv = entry()
    unpacked = pack(chunk_kv, "model").unpack()
    assert unpacked.keys is chunk_kv.keys
    assert unpacked.values is chunk_kv.values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_packing_and_unpacking_change_nothing_of_what_they_read(precision: Precision, dtype: torch.dtype) -> None:
    chunk_kv, untouched = entry(70, dtype=dtype), entry(70, dtype=dtype)
    packed = pack(chunk_kv, precision)
    before = {name: part.clone() for name, part in packed.tensors().items()}
    first, second = packed.unpack(), packed.unpack()
    assert_equal(first, second)
    assert_equal(chunk_kv, untouched)
    assert all(torch.equal(part, before[name]) for name, part in packed.tensors().items())


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_writing_into_dequantised_numbers_leaves_the_packed_entry_whole(precision: Precision) -> None:
    packed = pack(entry(70), precision)
    expected = packed.unpack()
    damaged = packed.unpack()
    damaged.keys.fill_(9)
    damaged.values.fill_(9)
    assert_equal(packed.unpack(), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_everything_but_keys_and_values_is_kept_as_it_is(precision: Precision) -> None:
    chunk_kv = entry(70)
    packed = pack(chunk_kv, precision)
    unpacked = packed.unpack(torch.device("cpu"))
    assert (packed.precision, packed.num_tokens) == (precision, 70)
    assert (unpacked.token_ids, unpacked.base) == (chunk_kv.token_ids, 7)
    assert unpacked.sensitivity is chunk_kv.sensitivity
    assert pack(replace(chunk_kv, sensitivity=None), precision).unpack().sensitivity is None


@pytest.mark.parametrize(("precision", "share"), [("model", 1.0), ("k16v8", 0.77), ("int8", 0.54), ("int4", 0.28)])
def test_a_packed_entry_takes_so_small_a_share_of_bfloat16(precision: Precision, share: float) -> None:
    chunk_kv = entry(512, dtype=torch.bfloat16)
    packed = pack(chunk_kv, precision)
    assert packed.nbytes <= share * chunk_kv.nbytes
    assert packed.nbytes == sum(part.nbytes for part in packed.tensors().values()) + 4 * 512
    assert (precision == "model") == (packed.nbytes == chunk_kv.nbytes)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_entry_is_rebuilt_from_its_fields(precision: Precision) -> None:
    packed = pack(entry(65, head_dim=5, value_dim=3), precision)
    rebuilt = PackedKV(**{**as_fields(packed), "parts": packed.tensors()})
    assert_equal(rebuilt.unpack(), packed.unpack())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_tensor_begins_with_the_layers(precision: Precision) -> None:
    packed = pack(entry(), precision)
    assert {part.shape[0] for part in packed.tensors().values()} == {packed.num_layers} == {2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (65, 5), (130, 64), (512, 80)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layer_alone_is_bit_for_bit_that_of_the_whole(
    precision: Precision, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    packed = pack(with_outliers(entry(*shape, dtype=dtype, value_dim=33)), precision)
    whole = packed.complete()
    assert_equal(whole, packed.unpack())
    for layer_idx in range(packed.num_layers):
        packed.read(layer_idx)
        keys, values = packed.layer(layer_idx)
        assert torch.equal(keys, whole.keys[layer_idx])
        assert torch.equal(values, whole.values[layer_idx])
    assert packed.is_read
    assert packed.sensitivity is whole.sensitivity
    assert packed.matches(list(range(shape[0])))
    assert not packed.matches(range(1, shape[0] + 1))


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "int2"},
        {"precision": "int8"},
        {"dtype": torch.float16},
        {"key_dim": 63},
        {"value_dim": 66},
        {"token_ids": ()},
        {"token_ids": (1, 2)},
        {"parts": {}},
    ],
)
def test_parts_that_do_not_fit_the_other_fields_are_refused(change: dict[str, Any]) -> None:
    packed = pack(entry(), "int4")
    with pytest.raises(ValueError, match=r"precision|parts"):
        PackedKV(**{**as_fields(packed), **change})


@pytest.mark.parametrize("name", ["keys", "keys_low", "values_step", "values_top", "sensitivity"])
def test_a_part_of_another_shape_is_refused(name: str) -> None:
    packed = pack(entry(), "int4")
    with pytest.raises(ValueError, match="parts"):
        replace(packed, parts={**packed.parts, name: packed.parts[name][:1]})


def test_an_unknown_precision_and_an_empty_chunk_are_refused() -> None:
    with pytest.raises(ValueError, match=r"precision: 'int3' is none of model, k16v8, int8, int4"):
        pack(entry(), "int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"precision: 'int3'"):
        pack(entry(), "int8").lower("int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no tokens"):
        pack(entry(0), "model")


def test_lowering_step_by_step_adds_no_more_than_the_errors_of_the_steps() -> None:
    chunk_kv = with_outliers(entry(130, dtype=torch.bfloat16))
    stepwise = pack(chunk_kv, "model")
    for precision in LOSSY:
        larger, stepwise = stepwise, stepwise.lower(precision)
        assert stepwise.precision == precision
        assert stepwise.nbytes < larger.nbytes

    def error(packed: PackedKV, name: str) -> float:
        difference = getattr(packed.unpack(), name).float() - getattr(chunk_kv, name).float()
        return float(difference.square().mean().sqrt())

    steps: dict[str, tuple[Precision, ...]] = {"keys": ("int8", "int4"), "values": ("k16v8", "int8", "int4")}
    for name in steps:
        alone = [error(pack(chunk_kv, step), name) for step in steps[name]]
        assert error(stepwise, name) <= 1.1 * sum(alone)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_lowering_to_as_many_or_more_bits_is_the_entry_itself(precision: Precision) -> None:
    packed = pack(entry(), precision)
    for other in PRECISIONS[: PRECISIONS.index(precision) + 1]:
        assert packed.lower(other) is packed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_packed_entry_is_unpacked_on_the_device_it_is_wanted_on(precision: Precision) -> None:
    packed = pack(with_outliers(entry(130, dtype=torch.bfloat16)), precision)
    here, there = packed.unpack(), packed.unpack(torch.device("cuda:0"))
    assert there.keys.device.type == there.values.device.type == "cuda"
    for name in ("keys", "values"):  # one unit in the last place: fused multiply-add rounds once
        torch.testing.assert_close(getattr(there, name).cpu(), getattr(here, name), rtol=2**-7, atol=1e-6)
