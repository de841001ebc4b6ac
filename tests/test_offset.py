"""Moving what is not recomputed by what is learnt from what is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cachecraft_rag.offset import MAX_FIT, Offset, _inverses, _trusted
from cachecraft_rag.rope import RotaryLayout, rerotate_keys
from tests.conftest import EngineMaker, prefill_logits, rag_prompt

LAYOUT = RotaryLayout(1.0 / 10_000.0 ** torch.arange(0, 1, 0.25))
HEADS, DIM, NUM_TOKENS = 2, 8, 60


class Setting:
    """Two chunks of 30 tokens at position 5; the KV of every token changes by the same vector, before its rotation."""

    def __init__(self, num_selected: int = 20, **changes: Any) -> None:
        draw = torch.Generator().manual_seed(1)
        self.positions = torch.arange(5, 5 + NUM_TOKENS)
        self.keys, self.values = (torch.randn(HEADS, 80, DIM, generator=draw) for _ in range(2))
        key_change, value_change = (torch.randn(HEADS, 1, DIM, generator=draw) for _ in range(2))
        rotated = rerotate_keys(key_change.expand(-1, NUM_TOKENS, -1), self.positions, LAYOUT)
        self.true_keys, self.true_values = self.keys.clone(), self.values.clone()
        self.true_keys[:, self.positions] += rotated
        self.true_values[:, self.positions] += value_change
        self.selected = self.positions[torch.randperm(NUM_TOKENS, generator=draw)[:num_selected]].sort().values
        self.rows = torch.cat([self.selected, torch.arange(70, 75)])
        arguments = {
            "positions": self.positions,
            "chunk_index": torch.arange(NUM_TOKENS) // 30,
            "sensitivity": torch.ones(2, NUM_TOKENS),
            "selected": self.selected,
            "rows": self.rows,
            "layouts": [LAYOUT, LAYOUT],
            "strength": 1.0,
            "device": torch.device("cpu"),
        }
        self.offset = Offset(**{**arguments, **changes})

    def corrected(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys.clone(), self.values.clone()
        self.offset.correct(1, keys, values, self.true_keys[:, self.rows], self.true_values[:, self.rows])
        return keys, values


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).square().sum())


def test_a_change_that_all_tokens_share_is_found() -> None:
    setting = Setting()
    keys, values = setting.corrected()
    assert error(keys, setting.true_keys) < 0.25 * error(setting.keys, setting.true_keys)
    assert error(values, setting.true_values) < 0.25 * error(setting.values, setting.true_values)


def test_nothing_but_the_tokens_of_chunks_is_moved() -> None:
    setting = Setting()
    keys, values = setting.corrected()
    outside = [position for position in range(80) if position not in setting.positions.tolist()]
    assert torch.equal(keys[:, outside], setting.keys[:, outside])
    assert torch.equal(values[:, outside], setting.values[:, outside])


def test_what_lies_between_chunks_is_left_alone_and_does_not_count() -> None:
    draw = torch.Generator().manual_seed(2)
    apart = torch.cat([torch.arange(5, 35), torch.arange(45, 75)])
    keys, values, changes = (torch.randn(HEADS, 80, DIM, generator=draw) for _ in range(3))
    found = []
    for between in (0.0, 50.0):
        keys[:, 35:45] = values[:, 35:45] = between
        selected = apart[::3].contiguous()
        offset = Offset(
            apart,
            torch.arange(NUM_TOKENS) // 30,
            torch.ones(1, NUM_TOKENS),
            selected,
            selected,
            [LAYOUT],
            1.0,
            torch.device("cpu"),
        )
        moved_keys, moved_values = keys.clone(), values.clone()
        change = 0.1 * changes[:, selected] + 1.0
        offset.correct(0, moved_keys, moved_values, keys[:, selected] + change, values[:, selected] + change)
        assert torch.equal(moved_keys[:, 35:45], keys[:, 35:45])
        assert torch.equal(moved_values[:, 35:45], values[:, 35:45])
        found.append((moved_keys[:, apart], moved_values[:, apart]))
    assert not torch.equal(found[0][1], values[:, apart])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_single_head_moves_as_each_of_two_equal_ones() -> None:
    two, one = Setting(), Setting()
    for name in ("keys", "values", "true_keys", "true_values"):
        setattr(two, name, getattr(two, name)[:1].repeat(2, 1, 1))
        setattr(one, name, getattr(one, name)[:1])
    for moved, expected in zip(one.corrected(), two.corrected(), strict=True):
        assert torch.allclose(moved[0], expected[0], atol=1e-5)


def test_half_the_strength_moves_half_as_far() -> None:
    whole, half = Setting(), Setting(strength=0.5)
    for moved, halfway, before in zip(whole.corrected(), half.corrected(), (whole.keys, whole.values), strict=True):
        assert torch.allclose((moved - before) / 2, halfway - before, atol=1e-6)


@pytest.mark.parametrize("sensitivity", [1.0, 1e-7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_moves_as_far_whatever_the_sensitivity(dtype: torch.dtype, sensitivity: float) -> None:
    whole, low = Setting(), Setting(sensitivity=torch.full((2, NUM_TOKENS), sensitivity))
    expected = whole.corrected()
    for name in ("keys", "values", "true_keys", "true_values"):
        setattr(low, name, getattr(low, name).to(dtype))
    for moved, wanted, before in zip(low.corrected(), expected, (whole.keys, whole.values), strict=True):
        assert moved.dtype == dtype
        assert error(moved.float(), wanted) < 0.01 * error(wanted, before)


def test_tokens_that_depend_on_no_context_stay() -> None:
    sensitivity = torch.ones(2, NUM_TOKENS)
    sensitivity[:, 40:] = 0.0
    setting = Setting(sensitivity=sensitivity)
    keys, _ = setting.corrected()
    assert torch.equal(keys[:, setting.positions[40:]], setting.keys[:, setting.positions[40:]])
    assert not torch.equal(keys[:, setting.positions[:40]], setting.keys[:, setting.positions[:40]])
    nothing = Setting(sensitivity=torch.zeros(2, NUM_TOKENS))
    assert torch.equal(nothing.corrected()[0], nothing.keys)


def test_a_change_of_one_chunk_moves_that_chunk_more() -> None:
    setting = Setting()
    other = setting.positions[30:]
    setting.true_values[:, other] = setting.values[:, other]
    _, values = setting.corrected()
    moved = (values - setting.values).square().sum(dim=(0, 2))
    assert moved[setting.positions[:30]].mean() > 4 * moved[other].mean()


def test_many_recomputed_tokens_are_thinned_out_for_the_fit() -> None:
    positions = torch.arange(5 * MAX_FIT)
    selected = positions[:-1]
    offset = Offset(
        positions,
        torch.zeros_like(positions),
        torch.ones(1, positions.numel()),
        selected,
        selected,
        [None],
        1.0,
        torch.device("cpu"),
    )
    assert offset._learnt.numel() <= MAX_FIT


def test_changes_that_foretell_nothing_move_hardly_anything() -> None:
    setting = Setting()
    noise = torch.randn(HEADS, NUM_TOKENS, DIM, generator=torch.Generator().manual_seed(3))
    setting.true_values = setting.values.clone()
    setting.true_values[:, setting.positions] += noise
    keys, values = setting.corrected()
    assert error(values, setting.values) < 0.05 * error(setting.true_values, setting.values)
    assert error(keys, setting.keys) > 0.5 * error(setting.true_keys, setting.keys)  # decided apart


def test_the_error_without_a_token_is_that_of_a_regression_on_the_others() -> None:
    draw = torch.Generator().manual_seed(5)
    root = torch.randn(6, 6, generator=draw)
    covariance, changes = root @ root.T, torch.randn(6, 3, generator=draw)
    inverse = _inverses(covariance / 0.25)[0]  # noise 8 x 0.25
    left_out = (inverse @ changes) / inverse.diagonal()[:, None]
    for token in range(6):
        others = [other for other in range(6) if other != token]
        inner = covariance[others][:, others] + 2.0 * torch.eye(5)
        foretold = covariance[token, others] @ torch.linalg.solve(inner, changes[others])
        assert torch.allclose(changes[token] - foretold, left_out[token], atol=1e-4)


def test_the_least_noise_is_trusted_where_changes_are_foretold_best() -> None:
    draw = torch.Generator().manual_seed(6)
    root = torch.randn(40, 3, generator=draw)
    covariance = 1000.0 * root @ root.T
    inverses = _inverses(covariance)
    smooth = 30.0 * root @ torch.randn(3, 2, generator=draw)
    assert torch.equal(_trusted(inverses, smooth), inverses[0] @ smooth)


def test_kv_that_holds_no_numbers_moves_nothing() -> None:
    setting = Setting()
    setting.values[0, 20, 3] = torch.nan
    keys, values = setting.corrected()
    assert torch.equal(keys, setting.keys)
    assert torch.equal(values.isnan(), setting.values.isnan())


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm", "qwen3"])
def test_the_offset_is_off_where_everything_or_nothing_is_recomputed(name: str, make_engine: EngineMaker) -> None:
    engine, prompt = make_engine(name), rag_prompt(1, 2, 3)
    engine.warm(prompt.chunks)
    reference, _ = prefill_logits(engine, prompt, reuse=False)
    for ratio in (0.0, 1.0):
        with_offset, _ = prefill_logits(engine, prompt, ratio=ratio, offset=1.0)
        without, _ = prefill_logits(engine, prompt, ratio=ratio, offset=0.0)
        assert torch.equal(with_offset, without)
    assert torch.allclose(with_offset, reference, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm", "qwen3"])
def test_in_between_the_offset_changes_the_logits(name: str, make_engine: EngineMaker) -> None:
    engine, prompt = make_engine(name), rag_prompt(1, 2, 3)
    engine.warm(prompt.chunks)
    with_offset, _ = prefill_logits(engine, prompt, ratio=0.3, offset=1.0)
    without, _ = prefill_logits(engine, prompt, ratio=0.3, offset=0.0)
    assert not torch.allclose(with_offset, without, atol=1e-6)
