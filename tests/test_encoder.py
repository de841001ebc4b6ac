"""KV of single chunks."""

from __future__ import annotations

import torch

from cachecraft_rag.encoder import ChunkEncoder
from cachecraft_rag.keys import context_hash
from cachecraft_rag.model_adapter import ModelAdapter
from tests.tiny_models import make

PREFIX, NEUTRAL, CHUNK = tuple(range(3, 20)), tuple(range(100, 160)), tuple(range(200, 240))


def test_a_chunk_is_computed_behind_the_prefix() -> None:
    adapter = ModelAdapter(make("llama"))
    encoder = ChunkEncoder(adapter, PREFIX, NEUTRAL)
    chunk_kv = encoder.encode(CHUNK, with_sensitivity=False)
    kv = adapter.new_kv(len(PREFIX) + len(CHUNK))
    adapter.forward_plain(torch.tensor(PREFIX + CHUNK), kv)
    assert torch.allclose(chunk_kv.keys, kv.keys[:, 0, :, len(PREFIX) :], atol=1e-5)
    assert torch.allclose(chunk_kv.values, kv.values[:, 0, :, len(PREFIX) :], atol=1e-5)
    assert (chunk_kv.base, chunk_kv.token_ids, chunk_kv.sensitivity) == (len(PREFIX), CHUNK, None)
    assert encoder.context == context_hash(PREFIX)


def test_without_a_prefix_a_chunk_is_computed_alone() -> None:
    adapter = ModelAdapter(make("llama"))
    chunk_kv = ChunkEncoder(adapter, (), NEUTRAL).encode(CHUNK, with_sensitivity=False)
    alone = adapter.capture(torch.tensor(CHUNK), torch.arange(len(CHUNK)), adapter.num_layers)
    assert torch.allclose(chunk_kv.values, torch.stack([values[0] for _, values in alone]), atol=1e-5)
    assert chunk_kv.base == 0


def test_sensitivity_is_the_relative_change_of_the_values_behind_the_neutral_passage() -> None:
    adapter = ModelAdapter(make("llama"))
    chunk_kv = ChunkEncoder(adapter, PREFIX, NEUTRAL).encode(CHUNK, with_sensitivity=True)
    other = ChunkEncoder(adapter, NEUTRAL, PREFIX).encode(CHUNK, with_sensitivity=False)
    change = (chunk_kv.values - other.values).square().sum(dim=(1, 3))
    scale = chunk_kv.values.square().sum(dim=(1, 3)).mean(dim=1, keepdim=True)
    assert chunk_kv.sensitivity is not None
    assert chunk_kv.sensitivity.shape == (adapter.num_layers, len(CHUNK))
    assert torch.allclose(chunk_kv.sensitivity.float(), change / scale, rtol=1e-2, atol=1e-3)


def test_layer_0_values_depend_on_no_context() -> None:
    chunk_kv = ChunkEncoder(ModelAdapter(make("llama")), PREFIX, NEUTRAL).encode(CHUNK, with_sensitivity=True)
    assert chunk_kv.sensitivity is not None
    assert chunk_kv.sensitivity[0].max() < 1e-6
    assert chunk_kv.sensitivity[1:].min() > 0


def test_measuring_later_equals_measuring_at_once() -> None:
    encoder = ChunkEncoder(ModelAdapter(make("qwen2")), PREFIX, NEUTRAL)
    later = encoder.measure(encoder.encode(CHUNK, with_sensitivity=False)).sensitivity
    at_once = encoder.encode(CHUNK, with_sensitivity=True).sensitivity
    assert later is not None
    assert at_once is not None
    assert torch.equal(later, at_once)
