"""The KV of one chunk."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cachecraft_rag.chunk_kv import ChunkKV

LAYERS, HEADS, TOKENS, DIM = 3, 2, 5, 8


def chunk_kv(**changes: object) -> ChunkKV:
    generator = torch.Generator().manual_seed(0)
    fields: dict[str, object] = {
        "keys": torch.randn(LAYERS, HEADS, TOKENS, DIM, generator=generator),
        "values": torch.randn(LAYERS, HEADS, TOKENS, DIM, generator=generator),
        "token_ids": (5, 6, 7, 8, 9),
        "base": 4,
    }
    return ChunkKV(**{**fields, **changes})  # type: ignore[arg-type]


def test_it_knows_its_length() -> None:
    assert chunk_kv().num_tokens == TOKENS


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": torch.zeros(LAYERS - 1, HEADS, TOKENS, DIM)},
        {"keys": torch.zeros(LAYERS, HEADS + 1, TOKENS, DIM)},
        {"values": torch.zeros(LAYERS, HEADS, TOKENS - 1, DIM)},
        {"token_ids": (5, 6, 7, 8)},
        {"token_ids": (5, 6, 7, 8, 9, 10)},
    ],
)
def test_tensors_that_disagree_are_refused_with_their_shapes(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"keys \(.*values \(.*token_ids"):
        chunk_kv(**changes)


def test_values_may_have_another_width_than_keys() -> None:
    assert chunk_kv(values=torch.zeros(LAYERS, HEADS, TOKENS, 2 * DIM)).num_tokens == TOKENS


def test_its_size_counts_all_tensors_and_ids() -> None:
    both = 2 * LAYERS * HEADS * TOKENS * DIM * 4
    assert chunk_kv().nbytes == both + 4 * TOKENS
    measured = chunk_kv().with_sensitivity(torch.zeros(LAYERS, TOKENS, dtype=torch.float16))
    assert measured.nbytes == both + 4 * TOKENS + 2 * LAYERS * TOKENS


def test_its_size_follows_the_dtype() -> None:
    half = chunk_kv(
        keys=torch.zeros(LAYERS, HEADS, TOKENS, DIM, dtype=torch.bfloat16),
        values=torch.zeros(LAYERS, HEADS, TOKENS, DIM, dtype=torch.bfloat16),
    )
    assert half.nbytes == 2 * LAYERS * HEADS * TOKENS * DIM * 2 + 4 * TOKENS


def test_it_matches_its_own_tokens_in_any_sequence_type() -> None:
    assert chunk_kv().matches((5, 6, 7, 8, 9))
    assert chunk_kv().matches([5, 6, 7, 8, 9])


@pytest.mark.parametrize("other", [(), (5, 6, 7, 8), (5, 6, 7, 8, 10), (9, 8, 7, 6, 5), (5, 6, 7, 8, 9, 9)])
def test_it_matches_no_other_tokens(other: tuple[int, ...]) -> None:
    assert not chunk_kv().matches(other)


def test_measuring_leaves_the_original_alone_and_shares_the_tensors() -> None:
    before = chunk_kv()
    sensitivity = torch.ones(LAYERS, TOKENS, dtype=torch.float16)
    after = before.with_sensitivity(sensitivity)
    assert before.sensitivity is None
    assert after.sensitivity is sensitivity
    assert after.keys is before.keys
    assert after.values is before.values
    assert (after.token_ids, after.base) == (before.token_ids, before.base)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        chunk_kv().base = 0  # type: ignore[misc]


def test_moving_to_the_device_it_is_on_does_nothing() -> None:
    entry = chunk_kv()
    assert entry.to(torch.device("cpu")) is entry


def test_moving_to_another_device_moves_keys_and_values() -> None:
    moved = chunk_kv(sensitivity=torch.ones(LAYERS, TOKENS)).to(torch.device("meta"))
    assert {moved.keys.device.type, moved.values.device.type} == {"meta"}
    assert (moved.token_ids, moved.base) == ((5, 6, 7, 8, 9), 4)


def test_it_gives_its_layers_and_is_complete() -> None:
    entry = chunk_kv()
    assert entry.num_layers == LAYERS
    for layer_idx in range(LAYERS):
        keys, values = entry.layer(layer_idx)
        assert torch.equal(keys, entry.keys[layer_idx])
        assert torch.equal(values, entry.values[layer_idx])
    assert entry.complete() is entry
