"""The token loop: the same tokens as transformers' own, for models with every kind of memory."""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cachecraft_rag.config import SamplingConfig
from cachecraft_rag.decode import NextLogits, PlainDecoder, TokenLoop, buffer_decoder, end_of_sequence_ids
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.sampling import Sampler
from tests.tiny_models import FULL_PREFILL, REUSED, make

CPU = torch.device("cpu")
PROMPT = (5, 9, 13, 17, 21, 25, 9, 9, 40, 41, 100, 200, 300, 400, 7)
NUM_TOKENS = 16


def greedy() -> Sampler:
    return Sampler(SamplingConfig(), PROMPT, CPU)


def decode(
    logits: torch.Tensor, step: NextLogits, sampler: Sampler, eos_ids: Set[int], max_new_tokens: int
) -> Iterator[int]:
    """The tokens of an answer, one row of the model each."""
    loop = TokenLoop(sampler, eos_ids, max_new_tokens)
    while not loop.is_complete:
        token_id = loop.draw(logits)
        if token_id is not None:
            yield token_id
            if not loop.is_complete:
                logits = step(token_id)


@cache
def model_of(name: str) -> Any:
    model = make(name)
    model.generation_config.eos_token_id = None
    return model


@cache
def generated(name: str) -> tuple[int, ...]:
    """Ids that transformers' own loop makes."""
    output = model_of(name).generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    ids = tuple(output[0, len(PROMPT) :].tolist())
    assert len(ids) == NUM_TOKENS
    return ids


def plain(name: str, eos_ids: frozenset[int] = frozenset(), max_new_tokens: int = NUM_TOKENS) -> list[int]:
    decoder = PlainDecoder(model_of(name), CPU)
    logits = decoder.prefill(list(PROMPT))
    return list(decode(logits, decoder.next_logits, greedy(), eos_ids, max_new_tokens))


@pytest.mark.parametrize("name", [*FULL_PREFILL, "llama", "gemma3", "mixtral"])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    assert plain(name) == list(generated(name))


@pytest.mark.parametrize("name", list(FULL_PREFILL))
def test_tokens_depend_on_what_came_before(name: str) -> None:
    # Otherwise the test above would pass for a decoder that forgets everything.
    assert len(set(generated(name))) > 2


@pytest.mark.parametrize("name", list(FULL_PREFILL))
def test_logits_of_every_step_are_those_of_the_whole_text(name: str) -> None:
    decoder = PlainDecoder(model_of(name), CPU)
    ids = list(PROMPT)
    logits = decoder.prefill(ids)
    for token_id in (11, 400, 3, 3, 250):
        with torch.inference_mode():
            whole = model_of(name)(torch.tensor([ids])).logits[0, -1]
        assert torch.allclose(logits, whole, atol=1e-3)
        logits = decoder.next_logits(token_id)
        ids.append(token_id)


@pytest.mark.parametrize("name", list(FULL_PREFILL))
def test_a_prompt_of_one_token_is_enough(name: str) -> None:
    decoder = PlainDecoder(model_of(name), CPU)
    with torch.inference_mode():
        first = model_of(name)(torch.tensor([[5]])).logits[0, -1]
        second = model_of(name)(torch.tensor([[5, 9]])).logits[0, -1]
    assert torch.allclose(decoder.prefill([5]), first, atol=1e-4)
    assert torch.allclose(decoder.next_logits(9), second, atol=1e-4)


@pytest.mark.parametrize("name", list(FULL_PREFILL))
def test_logits_are_float32_without_a_gradient(name: str) -> None:
    model = make(name, dtype=torch.bfloat16)
    logits = PlainDecoder(model, CPU).prefill(list(PROMPT))
    assert logits.dtype == torch.float32
    assert logits.shape == (model.config.vocab_size,)
    assert not logits.requires_grad


@pytest.mark.parametrize("name", ["gpt2", "mamba"])
def test_two_answers_at_once_do_not_disturb_each_other(name: str) -> None:
    first, second = (PlainDecoder(model_of(name), CPU) for _ in range(2))
    logits = [first.prefill(list(PROMPT)), second.prefill(list(PROMPT[::-1]))]
    alone = PlainDecoder(model_of(name), CPU)
    alone.prefill(list(PROMPT))
    assert not torch.allclose(logits[0], logits[1])
    second.next_logits(7)
    assert torch.equal(first.next_logits(11), alone.next_logits(11))


def test_a_second_prompt_starts_from_nothing() -> None:
    decoder = PlainDecoder(model_of("gpt2"), CPU)
    decoder.prefill([100, 200, 300])
    decoder.next_logits(7)
    expected = PlainDecoder(model_of("gpt2"), CPU).prefill(list(PROMPT))
    assert torch.allclose(decoder.prefill(list(PROMPT)), expected, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in REUSED if name in ("llama", "glm", "gemma2", "mistral-window")])
def test_tokens_over_the_buffer_are_those_of_transformers(name: str) -> None:
    adapter = ModelAdapter(model_of(name))
    kv = adapter.new_kv(len(PROMPT) + NUM_TOKENS)
    logits = adapter.forward_plain(torch.tensor(PROMPT), kv)
    tokens = list(decode(logits, buffer_decoder(adapter, kv), greedy(), frozenset(), NUM_TOKENS))
    assert tokens == list(generated(name))
    assert kv.length == len(PROMPT) + NUM_TOKENS - 1  # nothing was computed for the last token


# The loop


class Countdown:
    """A decoding step whose most likely token is one less than the token before; counts its calls."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, token_id: int) -> torch.Tensor:
        self.seen.append(token_id)
        return self.logits(token_id - 1)

    def logits(self, token_id: int) -> torch.Tensor:
        return torch.eye(10)[token_id]


def test_an_end_of_sequence_token_ends_the_answer_and_is_no_part_of_it() -> None:
    step = Countdown()
    assert list(decode(step.logits(6), step, greedy(), {3, 5000}, 100)) == [6, 5, 4]
    assert step.seen == [6, 5, 4]


def test_an_end_of_sequence_token_at_once_gives_an_empty_answer() -> None:
    step = Countdown()
    assert list(decode(step.logits(6), step, greedy(), {6}, 100)) == []
    assert step.seen == []


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_the_answer_is_never_longer_than_the_limit(limit: int) -> None:
    step = Countdown()
    assert list(decode(step.logits(6), step, greedy(), set(), limit)) == [6, 5, 4, 3][:limit]
    assert len(step.seen) == limit - 1  # the model does not run for a token that nobody asked for


def test_a_token_that_is_known_is_taken_where_only_the_likeliest_counts() -> None:
    logits = torch.eye(500)[6]  # the prompt's ids are among them: some releases look up their scores
    assert TokenLoop(greedy(), set(), 5).draw(logits, likeliest=3) == 3
    penalty = Sampler(SamplingConfig(repetition_penalty=1.5), PROMPT, CPU)
    assert TokenLoop(penalty, set(), 5).draw(logits, likeliest=3) == 6


def test_a_limit_of_nothing_gives_nothing() -> None:
    step = Countdown()
    assert list(decode(step.logits(6), step, greedy(), set(), 0)) == []


def test_tokens_are_computed_as_they_are_asked_for() -> None:
    step = Countdown()
    tokens = decode(step.logits(6), step, greedy(), set(), 100)
    assert next(tokens) == 6
    assert step.seen == []
    assert next(tokens) == 5
    assert step.seen == [6]


@pytest.mark.parametrize("name", list(FULL_PREFILL))
def test_a_real_model_ends_at_its_end_of_sequence_token(name: str) -> None:
    ids = generated(name)
    end = ids[5]
    assert plain(name, frozenset({end})) == list(ids[: ids.index(end)])


def test_a_real_model_ends_at_the_limit() -> None:
    assert plain("gpt2", max_new_tokens=3) == list(generated("gpt2")[:3])


def test_ids_that_end_an_answer_come_from_everywhere() -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[2, 7]), config=SimpleNamespace())
    assert end_of_sequence_ids(model, SimpleNamespace(eos_token_id=9)) == {2, 7, 9}
    model = SimpleNamespace(config=SimpleNamespace(eos_token_id=2))
    assert end_of_sequence_ids(model, SimpleNamespace(eos_token_id=None)) == {2}
    assert end_of_sequence_ids(SimpleNamespace(config=SimpleNamespace()), object()) == frozenset()


def test_only_the_last_tokens_logits_are_computed_where_the_model_can_do_that() -> None:
    model, rows = make("gpt2"), list[int]()
    model.lm_head.register_forward_hook(lambda _, given, __: rows.append(given[0].shape[1]))
    PlainDecoder(model, CPU).prefill(list(PROMPT))
    assert rows == [1]
