"""KV of single chunks."""

from __future__ import annotations

import pytest
import torch

from cachecraft_rag.config import EncodeConfig
from cachecraft_rag.encoder import ChunkEncoder
from cachecraft_rag.keys import context_hash
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.prompt import PromptEncoder
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

PREFIX, NEUTRAL, CHUNK = tuple(range(3, 20)), tuple(range(100, 160)), tuple(range(200, 240))
CONTEXTS = [tuple(range(start, start + 30)) for start in (3, 40, 77, 111)]


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    return ModelAdapter(make("llama"))


def test_a_chunk_is_computed_behind_the_first_context(adapter: ModelAdapter) -> None:
    encoder = ChunkEncoder(adapter, (PREFIX, NEUTRAL))
    chunk_kv = encoder.encode(CHUNK, with_sensitivity=False)
    kv = adapter.new_kv(len(PREFIX) + len(CHUNK))
    adapter.forward_plain(torch.tensor(PREFIX + CHUNK), kv)
    assert torch.allclose(chunk_kv.keys, kv.keys[:, 0, :, len(PREFIX) :], atol=1e-5)
    assert torch.allclose(chunk_kv.values, kv.values[:, 0, :, len(PREFIX) :], atol=1e-5)
    assert (chunk_kv.base, chunk_kv.token_ids, chunk_kv.sensitivity) == (len(PREFIX), CHUNK, None)
    assert encoder.context == context_hash(PREFIX)


def test_behind_nothing_a_chunk_is_computed_alone(adapter: ModelAdapter) -> None:
    chunk_kv = ChunkEncoder(adapter, ((), NEUTRAL)).encode(CHUNK, with_sensitivity=False)
    alone = adapter.capture(torch.tensor(CHUNK), torch.arange(len(CHUNK)), adapter.num_layers)
    assert torch.allclose(chunk_kv.values, torch.stack([values[0] for _, values in alone]), atol=1e-5)
    assert chunk_kv.base == 0


def test_sensitivity_is_the_relative_change_of_the_values_between_two_contexts(adapter: ModelAdapter) -> None:
    chunk_kv = ChunkEncoder(adapter, (PREFIX, NEUTRAL)).encode(CHUNK, with_sensitivity=True)
    other = ChunkEncoder(adapter, (NEUTRAL, PREFIX)).encode(CHUNK, with_sensitivity=False)
    change = (chunk_kv.values - other.values).square().sum(dim=(1, 3))
    scale = ((chunk_kv.values + other.values) / 2).square().sum(dim=(1, 3)).mean(dim=1, keepdim=True)
    assert chunk_kv.sensitivity is not None
    assert chunk_kv.sensitivity.shape == (adapter.num_layers, len(CHUNK))
    assert torch.allclose(chunk_kv.sensitivity.float(), change / scale, rtol=1e-2, atol=1e-3)


def test_averaged_kv_and_its_sensitivity_are_mean_and_variance_over_all_contexts(adapter: ModelAdapter) -> None:
    chunk_kv = ChunkEncoder(adapter, CONTEXTS, average=True).encode(CHUNK, with_sensitivity=True)
    single = [ChunkEncoder(adapter, (one, NEUTRAL)).encode(CHUNK, with_sensitivity=False) for one in CONTEXTS]
    keys, values = (torch.stack([getattr(kv, name) for kv in single]) for name in ("keys", "values"))
    assert torch.allclose(chunk_kv.keys, keys.mean(dim=0), atol=1e-5)
    assert torch.allclose(chunk_kv.values, values.mean(dim=0), atol=1e-5)
    expected = 2 * values.var(dim=0).sum(dim=(1, 3)) / values.mean(dim=0).square().sum(dim=(1, 3)).mean(1, keepdim=True)
    assert chunk_kv.sensitivity is not None
    assert torch.allclose(chunk_kv.sensitivity.float(), expected, rtol=1e-2, atol=1e-3)


def test_before_it_is_measured_the_kv_is_that_of_the_first_context(adapter: ModelAdapter) -> None:
    encoder = ChunkEncoder(adapter, CONTEXTS, average=True)
    first = ChunkEncoder(adapter, (CONTEXTS[0], NEUTRAL)).encode(CHUNK, with_sensitivity=False)
    assert torch.equal(encoder.encode(CHUNK, with_sensitivity=False).values, first.values)


def test_averaged_kv_is_nearer_to_that_behind_other_texts_than_that_of_one_context(adapter: ModelAdapter) -> None:
    unseen = ChunkEncoder(adapter, (tuple(range(150, 180)), NEUTRAL)).encode(CHUNK, with_sensitivity=False).values
    encoder = ChunkEncoder(adapter, CONTEXTS, average=True)
    averaged = encoder.encode(CHUNK, with_sensitivity=True).values
    single = encoder.encode(CHUNK, with_sensitivity=False).values
    assert (averaged - unseen).square().mean() < 0.8 * (single - unseen).square().mean()


def test_the_key_of_averaged_kv_names_all_its_contexts(adapter: ModelAdapter) -> None:
    one = ChunkEncoder(adapter, CONTEXTS, average=True)
    other = ChunkEncoder(adapter, [*CONTEXTS[:3], tuple(range(112, 142))], average=True)
    assert one.context != other.context
    assert one.context != ChunkEncoder(adapter, CONTEXTS).context


def test_contexts_of_several_lengths_or_a_single_one_are_refused(adapter: ModelAdapter) -> None:
    with pytest.raises(ValueError, match=r"contexts: lengths \[17, 60\]"):
        ChunkEncoder(adapter, (PREFIX, NEUTRAL), average=True)
    with pytest.raises(ValueError, match="contexts: 1 given"):
        ChunkEncoder(adapter, (PREFIX,))


def test_contexts_of_passages_begin_with_the_head_are_different_and_equally_long(adapter: ModelAdapter) -> None:
    prompts = PromptEncoder(byte_level())
    settings = EncodeConfig(instruction="Read this.\n\n")
    encoder = ChunkEncoder.of(settings, adapter, prompts)
    head = prompts.head_ids(settings.instruction)
    contexts = encoder._contexts
    assert all(context[: len(head)] == head for context in contexts)
    assert len({len(context) for context in contexts}) == 1
    assert len(set(contexts)) == encoder.num_passes == len(contexts)


@pytest.mark.parametrize("behind", ["none", "chat_head", "prefix"])
def test_without_passages_the_first_context_is_what_the_setting_names(adapter: ModelAdapter, behind: str) -> None:
    prompts = PromptEncoder(byte_level())
    encoder = ChunkEncoder.of(EncodeConfig.model_validate({"behind": behind}), adapter, prompts)
    expected = {"none": (), "chat_head": prompts.head_ids(""), "prefix": prompts.head_ids(EncodeConfig().instruction)}
    assert encoder.prefix_ids == expected[behind]


def test_layer_0_values_depend_on_no_context(adapter: ModelAdapter) -> None:
    chunk_kv = ChunkEncoder(adapter, (PREFIX, NEUTRAL)).encode(CHUNK, with_sensitivity=True)
    assert chunk_kv.sensitivity is not None
    assert chunk_kv.sensitivity[0].max() < 1e-6
    assert chunk_kv.sensitivity[1:].min() > 0


@pytest.mark.parametrize("average", [False, True])
def test_measuring_later_equals_measuring_at_once(average: bool) -> None:
    encoder = ChunkEncoder(ModelAdapter(make("qwen2")), CONTEXTS, average)
    later = encoder.measure(encoder.encode(CHUNK, with_sensitivity=False))
    at_once = encoder.encode(CHUNK, with_sensitivity=True)
    assert later.sensitivity is not None
    assert at_once.sensitivity is not None
    assert torch.equal(later.sensitivity, at_once.sensitivity)
    assert torch.equal(later.values, at_once.values)
    assert torch.equal(later.keys, at_once.keys)
