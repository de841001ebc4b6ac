"""The buffer of one prompt."""

from __future__ import annotations

import pytest
import torch

from cachecraft_rag.prompt_kv import PromptKV

LAYERS, HEADS, KEY_DIM, VALUE_DIM, CAPACITY = 3, 2, 8, 6, 20


def buffer(dtype: torch.dtype = torch.float32) -> PromptKV:
    shape = (LAYERS, 1, HEADS, CAPACITY)
    return PromptKV(torch.zeros(*shape, KEY_DIM, dtype=dtype), torch.zeros(*shape, VALUE_DIM, dtype=dtype))


def chunk(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(LAYERS, HEADS, num_tokens, KEY_DIM, generator=generator)
    return keys, torch.randn(LAYERS, HEADS, num_tokens, VALUE_DIM, generator=generator)


def test_a_new_buffer_holds_no_tokens() -> None:
    kv = buffer(torch.bfloat16)
    assert kv.capacity == CAPACITY
    assert kv.length == 0


def test_a_buffer_is_given_back_once_and_of_no_use_afterwards() -> None:
    given: list[int] = []
    shape = (LAYERS, 1, HEADS, CAPACITY)
    kv = PromptKV(torch.zeros(*shape, KEY_DIM), torch.zeros(*shape, VALUE_DIM), lambda: given.append(1))
    kv.release()
    kv.release()
    assert given == [1]
    with pytest.raises(IndexError):
        kv.layer(0)


def test_a_chunk_stands_where_it_was_placed_and_nowhere_else() -> None:
    kv, (keys, values) = buffer(), chunk(5)
    kv.place(7, keys, values)
    assert torch.equal(kv.keys[:, 0, :, 7:12], keys)
    assert torch.equal(kv.values[:, 0, :, 7:12], values)
    outside = [*range(7), *range(12, CAPACITY)]
    assert not kv.keys[:, 0, :, outside].any()
    assert not kv.values[:, 0, :, outside].any()


def test_a_chunk_fits_exactly_to_the_end() -> None:
    kv, (keys, values) = buffer(), chunk(5)
    kv.place(CAPACITY - 5, keys, values)
    assert torch.equal(kv.keys[:, 0, :, -5:], keys)


def test_placing_copies_and_converts_to_the_dtype_of_the_buffer() -> None:
    kv, (keys, values) = buffer(torch.bfloat16), chunk(4)
    kv.place(0, keys, values)
    expected = keys.to(torch.bfloat16)
    keys.zero_()
    assert torch.equal(kv.keys[:, 0, :, :4], expected)


def test_a_slice_gives_back_what_was_placed() -> None:
    kv, (keys, values) = buffer(), chunk(5)
    kv.place(3, keys, values)
    found_keys, found_values = kv.slice(3, 8)
    assert torch.equal(found_keys, keys)
    assert torch.equal(found_values, values)


def test_a_slice_is_a_copy_that_does_not_keep_the_buffer_alive() -> None:
    kv, (keys, values) = buffer(), chunk(5)
    kv.place(0, keys, values)
    found, _ = kv.slice(0, 5)
    kv.keys.zero_()
    assert torch.equal(found, keys)
    assert found.untyped_storage().nbytes() == found.nbytes


def test_later_chunks_overwrite_earlier_ones() -> None:
    kv, (keys, values), (other_keys, other_values) = buffer(), chunk(5, seed=1), chunk(5, seed=2)
    kv.place(0, keys, values)
    kv.place(3, other_keys, other_values)
    assert torch.equal(kv.keys[:, 0, :, :3], keys[:, :, :3])
    assert torch.equal(kv.keys[:, 0, :, 3:8], other_keys)
