"""The forward passes that the engine is built on, and that nothing of transformers is left changed."""

from __future__ import annotations

import threading

import pytest
import torch

from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.model_attention import ATTENTION_NAME
from tests.tiny_models import REUSED, make

NUM_TOKENS = 60
IDS = torch.randint(3, 500, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
HERE = torch.arange(NUM_TOKENS)


def plain_logits(adapter: ModelAdapter) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = adapter.model(input_ids=IDS[None]).logits[0, -1].float()
    return logits


@pytest.mark.parametrize("name", sorted(REUSED))
def test_plain_forward_into_the_buffer_equals_the_model(name: str) -> None:
    adapter = ModelAdapter(make(name))
    kv = adapter.new_kv(NUM_TOKENS + 5)
    assert torch.allclose(adapter.forward_plain(IDS, kv), plain_logits(adapter), atol=1e-5)
    assert kv.length == NUM_TOKENS
    assert not kv.keys[:, :, :, NUM_TOKENS:].any()


@pytest.mark.parametrize("name", sorted(REUSED))
def test_rows_computed_in_several_passes_equal_one_pass(name: str) -> None:
    adapter = ModelAdapter(make(name))
    kv = adapter.new_kv(NUM_TOKENS)
    for start, end in ((0, 7), (7, 8), (8, 31), (31, NUM_TOKENS)):
        logits = adapter.forward_rows(IDS[start:end], HERE[start:end], kv)
    assert torch.allclose(logits, plain_logits(adapter), atol=1e-4)


def test_scattered_rows_replace_what_was_in_the_buffer() -> None:
    adapter = ModelAdapter(make("llama"))
    kv = adapter.new_kv(NUM_TOKENS)
    reference = adapter.forward_plain(IDS, kv)
    wrong = torch.tensor([3, 4, 20, 41, NUM_TOKENS - 1])
    kv.keys[:, :, :, wrong] = 9.0
    kv.values[:, :, :, wrong] = 9.0
    assert torch.allclose(adapter.forward_rows(IDS[wrong], wrong, kv), reference, atol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("record_from", [0, 40, NUM_TOKENS - 1])
def test_recorded_attention_equals_the_models_own(record_from: int, implementation: str) -> None:
    model = make("llama")
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = model(input_ids=IDS[None], output_attentions=True).attentions
    expected = torch.stack([layer[0, :, record_from:].sum(dim=(0, 1)) for layer in attentions])
    model.set_attn_implementation(implementation)
    adapter = ModelAdapter(model)
    kv = adapter.new_kv(NUM_TOKENS)
    found = adapter.forward_rows_recording(IDS, HERE, kv, record_from)
    assert torch.allclose(found, expected, atol=1e-4)
    plain = adapter.new_kv(NUM_TOKENS)
    adapter.forward_plain(IDS, plain)
    assert torch.allclose(kv.keys, plain.keys, atol=1e-4)  # the rows are computed, up to the last layer's KV
    assert torch.allclose(kv.values, plain.values, atol=1e-4)


def test_recording_ends_with_the_last_layers_attention() -> None:
    model = make("llama")
    reached: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: reached.append(index))
    adapter = ModelAdapter(model)
    adapter.forward_rows_recording(IDS, HERE, adapter.new_kv(NUM_TOKENS), 40)
    assert reached == list(range(len(model.model.layers) - 1))


def test_capture_ends_the_forward_pass_at_the_layer_asked_for() -> None:
    model = make("llama")
    adapter = ModelAdapter(model)
    adapter.new_kv(1)
    reached: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: reached.append(index))
    first, second = adapter.capture(IDS, HERE, 2)
    assert reached == [0]
    kv = adapter.new_kv(NUM_TOKENS)
    adapter.forward_plain(IDS, kv)
    assert torch.allclose(first[0], kv.keys[0], atol=1e-5)
    assert torch.allclose(second[0], kv.keys[1], atol=1e-5)


def test_the_attention_setting_is_restored_even_after_an_error() -> None:
    model = make("llama")
    adapter = ModelAdapter(model)
    kv = adapter.new_kv(4)
    with pytest.raises(IndexError):
        adapter.forward_rows(torch.tensor([10**6]), torch.tensor([0]), kv)
    assert model.config._attn_implementation == "sdpa"
    assert torch.isfinite(adapter.forward_rows(IDS[:4], HERE[:4], kv)).all()


def test_calling_the_model_elsewhere_during_a_pass_is_an_error_and_not_a_wrong_answer() -> None:
    model = make("llama")
    model.config._attn_implementation = ATTENTION_NAME
    with pytest.raises(RuntimeError, match="another thread"):
        model(input_ids=IDS[None])


def test_passes_of_two_threads_do_not_mix() -> None:
    adapter = ModelAdapter(make("llama"))
    expected = [adapter.forward_plain(IDS[:n], adapter.new_kv(n)) for n in (20, 60)]
    found: dict[int, list[torch.Tensor]] = {20: [], 60: []}

    def run(n: int) -> None:
        for _ in range(10):
            found[n].append(adapter.forward_rows(IDS[:n], HERE[:n], adapter.new_kv(n)))

    threads = [threading.Thread(target=run, args=(n,)) for n in (20, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, reference in zip((20, 60), expected, strict=True):
        assert all(torch.allclose(logits, reference, atol=1e-4) for logits in found[n])


LENGTHS = (60, 9, 31)


@pytest.mark.parametrize("name", sorted(REUSED))
def test_rows_of_several_prompts_in_one_pass_equal_one_after_the_other(name: str) -> None:
    adapter = ModelAdapter(make(name))
    single, batch = ([adapter.new_kv(n + 3) for n in LENGTHS] for _ in range(2))
    for kvs in (single, batch):
        for n, kv in zip(LENGTHS, kvs, strict=True):
            adapter.forward_plain(IDS[:n], kv)
    for token_ids in ((7, 8, 9), (30, 31, 32), (400, 4, 44)):
        expected = [
            adapter.forward_rows(torch.tensor([token_id]), torch.tensor([kv.length]), kv)
            for token_id, kv in zip(token_ids, single, strict=True)
        ]
        found = adapter.forward_batch(token_ids, batch, [None] * 3)
        assert torch.allclose(found, torch.stack(expected), atol=1e-4)
        assert [int(row.argmax()) for row in found] == [int(row.argmax()) for row in expected]
    assert [kv.length for kv in batch] == [n + 3 for n in LENGTHS]
    for found_kv, expected_kv in zip(batch, single, strict=True):
        assert torch.allclose(found_kv.keys, expected_kv.keys, atol=1e-4)
        assert torch.allclose(found_kv.values, expected_kv.values, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_model_with_its_own_attention_computes_batches_with_it(name: str) -> None:
    model = make(name)
    model.set_attn_implementation("eager")
    adapter = ModelAdapter(model)
    single, batch = ([adapter.new_kv(n + 1) for n in LENGTHS] for _ in range(2))
    for kvs in (single, batch):
        for n, kv in zip(LENGTHS, kvs, strict=True):
            adapter.forward_plain(IDS[:n], kv)
    expected = [adapter.forward_rows(IDS[:1], torch.tensor([kv.length]), kv) for kv in single]
    found = adapter.forward_batch([int(IDS[0])] * 3, batch, [None] * 3)
    assert torch.allclose(found, torch.stack(expected), atol=1e-4)


def test_every_row_of_a_batch_is_observed_by_its_own() -> None:
    adapter = ModelAdapter(make("mistral-window"))
    kvs = [adapter.new_kv(n + 1) for n in LENGTHS]
    for n, kv in zip(LENGTHS, kvs, strict=True):
        adapter.forward_plain(IDS[:n], kv)
    seen: list[tuple[int, int]] = []

    def observe(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, *options: object) -> None:
        seen.append((int(positions), key.shape[2]))

    adapter.forward_batch([5, 6, 7], kvs, [None, observe, None])
    assert seen == [(9, 10)] * adapter.num_layers


def test_the_size_of_a_buffer_is_known_before_it_is_made() -> None:
    adapter = ModelAdapter(make("llama"))
    assert adapter.kv_bytes(100) == 0  # nothing is known yet
    kv = adapter.new_kv(100)
    assert adapter.kv_bytes(100) == kv.keys.nbytes + kv.values.nbytes
