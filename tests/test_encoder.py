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
HEAD, BETWEEN = tuple(range(3, 8)), (1,)
PASSAGES = [(*HEAD, *range(40, 50)), (*HEAD, *range(60, 70))]


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
    settings = EncodeConfig(behind="passages", instruction="Read this.\n\n")
    encoder = ChunkEncoder.of(settings, adapter, prompts)
    head = prompts.head_ids(settings.instruction)
    contexts = encoder._contexts
    assert all(context[: len(head)] == head for context in contexts)
    assert len({len(context) for context in contexts}) == 1
    assert len(set(contexts)) == len(contexts) == 2


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


def behind_neighbours(adapter: ModelAdapter) -> ChunkEncoder:
    return ChunkEncoder(adapter, PASSAGES, average=True, head_tokens=len(HEAD), between=BETWEEN)


def test_neighbours_take_turns_in_two_contexts_with_the_most_alike_next_to_the_chunk(adapter: ModelAdapter) -> None:
    encoder = behind_neighbours(adapter)
    neighbours = [tuple(range(start, start + 5)) for start in (100, 110, 120, 130)]
    assert encoder.neighbour_tokens == 20
    assert encoder._other_contexts(neighbours) == [
        (*HEAD, *neighbours[2][2:], *BETWEEN, *neighbours[0], *BETWEEN),
        (*HEAD, *neighbours[3][2:], *BETWEEN, *neighbours[1], *BETWEEN),
    ]


def test_what_neighbours_leave_free_is_the_end_of_a_passage(adapter: ModelAdapter) -> None:
    contexts = behind_neighbours(adapter)._other_contexts([(100, 101)])
    assert contexts == [(*HEAD, *PASSAGES[1][-7:], 100, 101, *BETWEEN)]


def test_without_neighbours_a_chunk_is_computed_behind_passages(adapter: ModelAdapter) -> None:
    passages = ChunkEncoder(adapter, PASSAGES, average=True)
    expected, found = passages.encode(CHUNK, True), behind_neighbours(adapter).encode(CHUNK, True)
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.values, expected.values)
    assert passages.context != behind_neighbours(adapter).context  # or entries of one setting would serve another


def test_kv_behind_neighbours_is_the_mean_over_a_passage_and_them(adapter: ModelAdapter) -> None:
    encoder, neighbours = behind_neighbours(adapter), [tuple(range(100, 120)), tuple(range(120, 140))]
    contexts = [PASSAGES[0], *encoder._other_contexts(neighbours)]
    single = [ChunkEncoder(adapter, (one, NEUTRAL)).encode(CHUNK, with_sensitivity=False) for one in contexts]
    found = encoder.encode(CHUNK, True, neighbours)
    for name in ("keys", "values"):
        expected = torch.stack([getattr(kv, name) for kv in single]).mean(dim=0)
        assert torch.allclose(getattr(found, name), expected, atol=1e-5)
    later = encoder.measure(encoder.encode(CHUNK, with_sensitivity=False), neighbours)
    assert torch.equal(later.values, found.values)


def test_the_tokens_computed_for_a_chunk_are_counted_with_the_contexts_of_its_own(adapter: ModelAdapter) -> None:
    encoder, neighbours = behind_neighbours(adapter), [tuple(range(100, 120)), tuple(range(120, 140))]
    assert encoder.num_computed(40, False, neighbours) == 40
    assert encoder.num_computed(40, True) == 2 * 40
    assert encoder.num_computed(40, True, neighbours) == 3 * 40 + 2 * len(PASSAGES[0])


def test_contexts_of_neighbours_are_computed_anew_and_not_kept(adapter: ModelAdapter) -> None:
    encoder = behind_neighbours(adapter)
    encoder.encode(CHUNK, True, [tuple(range(100, 120)), tuple(range(120, 140))])
    assert list(encoder._context_kv) == [PASSAGES[0]]


def test_behind_neighbours_the_passages_stand_in_for_them(adapter: ModelAdapter) -> None:
    prompts = PromptEncoder(byte_level())
    passages = ChunkEncoder.of(EncodeConfig(behind="passages"), adapter, prompts)
    encoder = ChunkEncoder.of(EncodeConfig(behind="neighbours"), adapter, prompts)
    head = prompts.head_ids(EncodeConfig().instruction)
    assert (passages.neighbour_tokens, encoder.neighbour_tokens) == (0, 2 * (len(passages.prefix_ids) - len(head)))
    assert encoder._contexts == passages._contexts
    (context,) = encoder._other_contexts([tuple(range(5, 25))])
    assert context[: len(head)] == head
    assert context[-22:] == (*range(5, 25), *prompts.encode_chunk("\n\n"))
