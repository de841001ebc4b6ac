"""Buffers that requests leave to later ones."""

from __future__ import annotations

import threading

import pytest
import torch

from cachecraft_rag.kv_pool import Buffers, KVPool
from cachecraft_rag.model_adapter import ModelAdapter
from tests.conftest import EngineMaker, rag_prompt
from tests.tiny_models import make


def pool(device: str = "cpu") -> KVPool:
    return KVPool((3, 2, 8), (3, 2, 6), torch.bfloat16, torch.device(device))


def is_same(one: Buffers, other: Buffers) -> bool:
    return one.keys.data_ptr() == other.keys.data_ptr()


def test_buffers_have_the_shape_of_the_model_and_room_enough() -> None:
    keys, values = pool().take(300)
    assert keys.shape == (3, 1, 2, 512, 8)
    assert values.shape == (3, 1, 2, 512, 6)
    assert keys.dtype == values.dtype == torch.bfloat16
    assert pool().token_bytes == 3 * 2 * (8 + 6) * 2


def test_a_buffer_that_was_given_back_is_used_again_for_prompts_of_about_its_length() -> None:
    kept = pool()
    first = kept.take(500)
    kept.give(first)
    again = kept.take(400)
    assert is_same(again, first)
    assert not is_same(kept.take(400), first)  # it is in use


@pytest.mark.parametrize("capacity", [255, 513])
def test_a_buffer_much_longer_than_needed_or_too_short_is_let_go(capacity: int) -> None:
    kept = pool()
    kept.give(kept.take(512 if capacity > 512 else 1024))
    assert kept.take(capacity).capacity in (256, 768)
    assert not kept._free  # one in use where one was in use before


def test_the_smallest_that_fits_is_taken() -> None:
    kept = pool()
    long, short = kept.take(1024), kept.take(768)
    kept.give(long), kept.give(short)
    assert kept.take(700).capacity == 768


def test_only_the_latest_are_kept_when_told_so() -> None:
    kept = pool()
    buffers = [kept.take(256) for _ in range(3)]
    for one in buffers:
        kept.give(one)
    kept.shrink(1)
    assert len(kept._free) == 1
    assert is_same(kept.take(256), buffers[-1])
    kept.shrink(0)
    assert not kept._free


def test_threads_never_get_the_same_buffer() -> None:
    kept = pool()
    failures: list[int] = []

    def use(mark: int) -> None:
        for _ in range(200):
            buffers = kept.take(8)
            buffers.keys.fill_(mark)
            failures.extend([mark] if (buffers.keys != mark).any() else [])
            kept.give(buffers)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(kept._free) <= 4


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_kept() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    kept = pool("cuda")
    kept.give(kept.take(300))
    assert not kept._free
    assert kept.take(300).capacity == 300


def test_a_model_without_buffers_has_none_to_drop() -> None:
    adapter = ModelAdapter(make("llama"))
    adapter.drop_buffers()
    assert adapter.kv_bytes(100) == 0


@pytest.mark.parametrize("policy", ["question_sensitivity", "chunk_start", "key_deviation", "none", "all"])
def test_what_an_earlier_request_left_in_a_buffer_is_never_read(policy: str, make_engine: EngineMaker) -> None:
    settings = {"policy": policy, "ratio": 0.3, "keep_exact": False}
    expected, engine = make_engine(**settings), make_engine(**settings)
    for one in (expected, engine):  # both measure the chunks
        one.generate(rag_prompt(3, 0, 2, 1), max_new_tokens=3)
    adapter = engine._adapter
    (left,) = adapter._kv_pool()._free  # one request at a time leaves one buffer
    for question, reuse in (("What ends first?", True), ("Who pays?", True), ("And when?", False)):
        left.keys.fill_(float("nan"))
        left.values.fill_(float("nan"))
        prompt = rag_prompt(0, 1, 2, question=question)
        found = engine.generate(prompt, max_new_tokens=6, reuse=reuse)
        assert found.token_ids == expected.generate(prompt, max_new_tokens=6, reuse=reuse).token_ids
        assert is_same(adapter._kv_pool()._free[0], left)


def test_a_closed_engine_keeps_no_buffer(make_engine: EngineMaker) -> None:
    engine = make_engine()
    engine.generate(rag_prompt(1), max_new_tokens=2)
    assert engine._adapter._kv_pool()._free
    engine.close()
    assert not engine._adapter._kv_pool()._free


def test_requests_that_are_answered_together_leave_one_buffer(make_engine: EngineMaker) -> None:
    engine = make_engine()
    prompts = [rag_prompt(1, question=f"{number}?") for number in range(4)]
    engine.generate_batch(prompts, max_new_tokens=3)
    assert len(engine._adapter._kv_pool()._free) == 1
