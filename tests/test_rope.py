"""Moving rotated keys: what the model would have computed at the other position, for every architecture and layer."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.capability import probe
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.rope import RopeSpec, RotaryLayout, rerotate_keys
from tests.tiny_models import REUSED, VOCAB_SIZE, make

NUM_TOKENS = 20
# transformers 4 gives StableLM attention classes of its own, so there it is served by full prefill.
ARCHITECTURES = [name for name in REUSED if name != "stablelm" or int(transformers.__version__.split(".")[0]) >= 5]


@cache
def adapter(name: str, dtype: torch.dtype = torch.float32) -> ModelAdapter:
    """The model with parameters in a dtype; buffers stay float32, as when a checkpoint is loaded."""
    model = make(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return ModelAdapter(model)


@cache
def rope_of(name: str) -> RopeSpec:
    capability = probe(adapter(name))
    assert capability.reason is None
    assert capability.rope is not None
    return capability.rope


def keys_at(name: str, offset: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Keys that the model computes for one chunk at an offset, ``[num_layers, num_kv_heads, num_tokens, head_dim]``."""
    token_ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    model = adapter(name, dtype)
    layers = model.capture(token_ids, torch.arange(offset, offset + NUM_TOKENS), model.num_layers)
    return torch.cat([keys for keys, _ in layers])


def errors(found: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Relative error of every layer."""
    pairs = zip(found.float(), expected.float(), strict=True)
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


def random_keys(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def layout(width: int = 16, interleaved: bool = False, theta: float = 10_000.0) -> RotaryLayout:
    return RotaryLayout(theta ** (-torch.arange(0, width, 2) / width), interleaved)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("start", "end"), [(0, 1), (5, 211), (300, 7), (0, 1500)])
def test_moved_keys_are_those_computed_at_the_new_place(name: str, start: int, end: int) -> None:
    moved = rope_of(name).rerotate(keys_at(name, start), end - start)
    assert max(errors(moved, keys_at(name, end))) < 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_keys_that_stay_where_they_were_are_far_off(name: str) -> None:
    # Otherwise the test above would prove nothing.
    assert max(errors(keys_at(name, 5), keys_at(name, 211))) > 0.1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_moving_twice_is_moving_once(name: str) -> None:
    rope, keys = rope_of(name), keys_at(name, 40)
    assert max(errors(rope.rerotate(rope.rerotate(keys, 170), -90), rope.rerotate(keys, 80))) < 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_moving_there_and_back_changes_nothing(name: str) -> None:
    rope, keys = rope_of(name), keys_at(name, 40)
    assert max(errors(rope.rerotate(rope.rerotate(keys, -37), 37), keys)) < 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_keys_in_bfloat16_are_moved_within_its_precision(name: str) -> None:
    # Layer 0 only: the layers above differ by what the model itself rounds, not by the rotation.
    moved = rope_of(name).rerotate(keys_at(name, 5, torch.bfloat16), 206)
    assert moved.dtype == torch.bfloat16
    assert errors(moved, keys_at(name, 211, torch.bfloat16))[0] < 1e-2


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_staying_in_place_returns_the_same_object(name: str) -> None:
    keys = keys_at(name, 0)
    assert rope_of(name).rerotate(keys, 0) is keys


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_stored_keys_are_not_modified(name: str) -> None:
    keys = keys_at(name, 5)
    before = keys.clone()
    moved = rope_of(name).rerotate(keys, 100)
    assert torch.equal(keys, before)
    assert moved.shape == keys.shape
    assert moved.untyped_storage().data_ptr() != keys.untyped_storage().data_ptr()


@pytest.mark.parametrize(("name", "width"), [("glm", 8), ("gpt-neox", 4), ("llama", 16)])
def test_partial_rotary_leaves_the_other_dimensions_alone(name: str, width: int) -> None:
    rope, keys = rope_of(name), keys_at(name, 5)
    assert {entry.rotary_dim for entry in rope.layers if entry is not None} == {width}
    moved = rope.rerotate(keys, 100)
    assert torch.equal(moved[..., width:], keys[..., width:])
    assert not torch.allclose(moved[..., :width], keys[..., :width])


def test_scaled_kinds_rotate_with_other_frequencies() -> None:
    frequencies = [
        rope_of(name).layers[0].inv_freq  # type: ignore[union-attr]
        for name in ("llama", "llama-linear", "llama-llama3", "llama-yarn")
    ]
    for index, first in enumerate(frequencies):
        assert all(not torch.allclose(first, second) for second in frequencies[:index])


def test_layer_types_of_gemma3_have_rotations_of_their_own() -> None:
    layers = rope_of("gemma3").layers
    assert len({id(entry) for entry in layers}) == 2
    assert layers[0] is layers[1]


def test_neighbouring_and_split_pairs_are_different_rotations() -> None:
    keys = random_keys(2, 5, 16)
    split, neighbours = (rerotate_keys(keys, 9, layout(interleaved=kind)) for kind in (False, True))
    assert not torch.allclose(split, neighbours)


def test_neighbouring_pairs_are_split_pairs_in_another_order() -> None:
    keys = random_keys(2, 5, 16)
    order = torch.arange(16).reshape(8, 2).t().reshape(-1)  # evens, then odds
    moved = rerotate_keys(keys, 9, layout(interleaved=True))
    assert torch.allclose(moved[..., order], rerotate_keys(keys[..., order], 9, layout()), atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_one_pair_turns_by_the_angle_of_the_distance(interleaved: bool) -> None:
    keys = torch.tensor([[3.0, 4.0]])
    moved = rerotate_keys(keys, 2, RotaryLayout(torch.tensor([torch.pi / 4]), interleaved))
    assert torch.allclose(moved, torch.tensor([[-4.0, 3.0]]), atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@settings(max_examples=60, deadline=None)
@given(first=st.integers(-4000, 4000), second=st.integers(-4000, 4000))
def test_distances_add_up(interleaved: bool, first: int, second: int) -> None:
    keys, rotation = random_keys(3, 8), layout(8, interleaved)
    twice = rerotate_keys(rerotate_keys(keys, first, rotation), second, rotation)
    assert torch.allclose(twice, rerotate_keys(keys, first + second, rotation), atol=5e-3)
    assert torch.allclose(twice.norm(dim=-1), keys.norm(dim=-1), atol=1e-4)  # a rotation keeps lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_dtype_stays_and_the_arithmetic_is_float32(dtype: torch.dtype, interleaved: bool) -> None:
    keys, rotation = random_keys(2, 5, 16, dtype=dtype), layout(interleaved=interleaved)
    moved = rerotate_keys(keys, 1234, rotation)
    assert moved.dtype == dtype
    assert torch.equal(moved, rerotate_keys(keys.float(), 1234, rotation).to(dtype))


def test_keys_that_are_a_view_are_moved_like_any_others() -> None:
    keys = random_keys(5, 2, 16).transpose(0, 1)
    assert torch.equal(rerotate_keys(keys, 7, layout()), rerotate_keys(keys.contiguous(), 7, layout()))


def test_layers_without_positions_stay_as_they_are() -> None:
    rotation = layout()
    keys = random_keys(4, 2, 5, 16)
    moved = RopeSpec((rotation, None, rotation, None)).rerotate(keys, 11)
    assert torch.equal(moved[[1, 3]], keys[[1, 3]])
    assert torch.equal(moved[[0, 2]], rerotate_keys(keys[[0, 2]], 11, rotation))


def test_every_layer_moves_by_its_own_rotation() -> None:
    near, far = layout(theta=10_000.0), layout(theta=1_000_000.0)
    keys = random_keys(3, 2, 5, 16)
    moved = RopeSpec((near, far, near)).rerotate(keys, 11)
    for layer_idx, rotation in enumerate((near, far, near)):
        assert torch.equal(moved[layer_idx], rerotate_keys(keys[layer_idx], 11, rotation))


def test_a_model_without_any_rotation_gets_its_keys_back() -> None:
    keys = random_keys(2, 2, 5, 16)
    assert RopeSpec((None, None)).rerotate(keys, 11) is keys
