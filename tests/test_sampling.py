"""Drawing tokens: the same ids as transformers, the same draw for the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cachecraft_rag.config import SamplingConfig
from cachecraft_rag.sampling import Sampler
from tests.tiny_models import VOCAB_SIZE, make

CPU = torch.device("cpu")
# Probabilities 0.5, 0.25, 0.125, ... at ids 3, 0, 4, 1, 2.
LOGITS = torch.tensor([4.0, 2.0, 1.0, 5.0, 3.0]) * torch.log(torch.tensor(2.0))
PROMPT = (5, 9, 13, 17, 21, 25, 9, 9, 40, 41)


def sampler(prompt_ids: tuple[int, ...] = (), **options: Any) -> Sampler:
    return Sampler(SamplingConfig(**options), prompt_ids, CPU)


def drawn(count: int = 400, logits: torch.Tensor = LOGITS, **options: Any) -> list[int]:
    draw = sampler(**options).draw
    return [draw(logits) for _ in range(count)]


@pytest.fixture(scope="module")
def llama() -> Any:
    model = make("llama")
    model.generation_config.eos_token_id = None
    return model


def generated(model: Any, **options: Any) -> list[int]:
    """Ids that transformers' own loop makes."""
    output = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), max_new_tokens=24, pad_token_id=0, **options
    )
    ids: list[int] = output[0, len(PROMPT) :].tolist()
    return ids


def answered(model: Any, **options: Any) -> list[int]:
    """Ids of the same number of tokens drawn by our sampler, the whole text read again for each."""
    draw, ids = sampler(PROMPT, **options).draw, list(PROMPT)
    for _ in range(24):
        with torch.inference_mode():
            ids.append(draw(model(torch.tensor([ids])).logits[0, -1].float()))
    return ids[len(PROMPT) :]


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert set(drawn(20, temperature=0.0)) == {3}
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    assert sampler().draw(logits) == int(logits.argmax())


def test_temperature_zero_ignores_seed_top_k_and_top_p() -> None:
    assert set(drawn(20, temperature=0.0, seed=3, top_k=2, top_p=0.5)) == {3}


def test_every_token_can_be_drawn_at_temperature_one() -> None:
    ids = drawn(2000, temperature=1.0, seed=0)
    shares = torch.bincount(torch.tensor(ids), minlength=5) / len(ids)
    assert torch.allclose(shares, LOGITS.softmax(-1), atol=0.04)


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    low, middle, high = (drawn(temperature=t, seed=1).count(3) for t in (0.3, 1.0, 5.0))
    assert low > middle > high


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_top_k_keeps_the_most_likely_tokens(top_k: int) -> None:
    assert set(drawn(temperature=2.0, seed=0, top_k=top_k)) == set([3, 0, 4, 1, 2][:top_k])


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert set(drawn(temperature=3.0, seed=0, top_k=50)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, {3}), (0.6, {3, 0}), (0.8, {3, 0, 4}), (1.0, {0, 1, 2, 3, 4})])
def test_top_p_keeps_the_smallest_set_with_that_probability(top_p: float, kept: set[int]) -> None:
    assert set(drawn(1000, temperature=1.0, seed=0, top_p=top_p)) == kept


def test_temperature_comes_before_top_p() -> None:
    # Flattened first, the most likely token has less than 0.5, so a second one is kept.
    assert len(set(drawn(temperature=4.0, seed=0, top_p=0.5))) > len(set(drawn(temperature=0.5, seed=0, top_p=0.5)))


def test_the_same_seed_draws_the_same_tokens() -> None:
    assert drawn(50, temperature=1.0, seed=7) == drawn(50, temperature=1.0, seed=7)
    assert drawn(50, temperature=1.0, seed=7) != drawn(50, temperature=1.0, seed=8)


def test_without_a_seed_every_answer_is_another() -> None:
    assert drawn(50, temperature=1.0) != drawn(50, temperature=1.0)


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    drawn(10, temperature=1.0, seed=7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 2}, {"repetition_penalty": 1.5}])
def test_the_logits_are_not_modified(options: dict[str, Any]) -> None:
    logits = LOGITS.clone()
    sampler((3,), **options).draw(logits)
    assert torch.equal(logits, LOGITS)


def test_a_very_low_temperature_takes_the_most_likely_token() -> None:
    assert set(drawn(5, temperature=1e-6)) == {3}


def test_the_penalty_counts_the_prompt() -> None:
    assert sampler((3,), repetition_penalty=2.0).draw(LOGITS) == 0
    assert sampler((3,), repetition_penalty=1.0).draw(LOGITS) == 3


def test_the_penalty_counts_what_was_drawn() -> None:
    draw = sampler((), repetition_penalty=4.0).draw
    assert [draw(LOGITS) for _ in range(5)] == [3, 0, 4, 1, 3]


def test_a_penalty_makes_unlikely_tokens_more_unlikely_too() -> None:
    # Negative scores are multiplied, positive ones divided.
    assert sampler((0,), repetition_penalty=3.0).draw(torch.tensor([-1.0, -2.0])) == 1


def test_greedy_ids_are_those_of_transformers(llama: Any) -> None:
    assert answered(llama) == generated(llama, do_sample=False)


@pytest.mark.parametrize("penalty", [0.7, 1.3, 3.0])
def test_ids_with_a_penalty_are_those_of_transformers(llama: Any, penalty: float) -> None:
    expected = generated(llama, do_sample=False, repetition_penalty=penalty)
    assert answered(llama, repetition_penalty=penalty) == expected
    assert expected != generated(llama, do_sample=False)  # so the penalty did something
