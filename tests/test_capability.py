"""What the probe finds out about models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from cachecraft_rag.capability import probe, rope_kinds
from cachecraft_rag.model_adapter import ModelAdapter
from tests.tiny_models import FULL_PREFILL, REUSED, make

IS_OLD = int(transformers.__version__.split(".")[0]) < 5


@pytest.mark.parametrize("name", sorted(REUSED))
def test_models_with_rotary_keys_are_reusable(name: str) -> None:
    model = make(name)
    found = probe(ModelAdapter(model))
    assert found.reason is None
    assert found.rope is not None
    assert len(found.rope.layers) == model.config.num_hidden_layers
    assert found.max_tokens is None


@pytest.mark.parametrize(
    ("name", "rotary_dim", "interleaved"),
    [("llama", 16, False), ("glm", 8, True), ("gpt-neox", 4, False), ("phi3", 16, False)],
)
def test_the_layout_of_the_rotation_is_found(name: str, rotary_dim: int, interleaved: bool) -> None:
    rope = probe(ModelAdapter(make(name))).rope
    assert rope is not None
    assert {(layout.rotary_dim, layout.interleaved) for layout in rope.layers if layout} == {(rotary_dim, interleaved)}


def test_layers_with_their_own_base_get_their_own_rotation() -> None:
    model = make("gemma3")
    rope = probe(ModelAdapter(model)).rope
    assert rope is not None
    slowest = [float(layout.inv_freq[-1]) for layout in rope.layers if layout is not None]
    kinds = model.config.layer_types
    assert {kind: value for kind, value in zip(kinds, slowest, strict=True)}["full_attention"] < min(
        value for kind, value in zip(kinds, slowest, strict=True) if kind == "sliding_attention"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gpt2", "no rotary"), ("bloom", "no rotary"), ("mpt", "no rotary"), ("mamba", "recurrent state")],
)
def test_models_without_movable_keys_get_a_reason(name: str, expected: str) -> None:
    assert name in FULL_PREFILL
    found = probe(ModelAdapter(make(name)))
    assert expected in (found.reason or "")
    assert found.rope is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_probed_within_its_rounding(dtype: torch.dtype) -> None:
    assert probe(ModelAdapter(make("qwen3", dtype))).reason is None


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_length_dependent_rope_is_reusable_up_to_its_original_length(kind: str) -> None:
    settings: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    if kind == "longrope":
        settings |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 128}
    key = "rope_scaling" if IS_OLD else "rope_parameters"
    theta = {} if IS_OLD else {"rope_theta": 10_000.0}
    found = probe(ModelAdapter(make("llama", **{key: {**settings, **theta}})))
    limit = 127 if kind == "longrope" else 2047
    assert found.reason is None
    assert found.reason_for(limit) is None
    assert str(limit) in (found.reason_for(limit + 1) or "")


def test_absolute_positions_on_top_of_rotary_ones_are_noticed() -> None:
    model = make("llama")
    embed = model.model.embed_tokens
    positions = torch.nn.Embedding(2048, 64)
    original = model.model.forward

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
        options.pop("inputs_embeds", None)
        return original(inputs_embeds=embed(input_ids) + positions(position_ids), position_ids=position_ids, **options)

    model.model.forward = forward
    assert "depend on the absolute position" in (probe(ModelAdapter(model)).reason or "")


def test_a_rotation_that_is_none_of_the_known_ones_is_noticed() -> None:
    model = make("llama")
    model.model.rotary_emb.register_buffer("inv_freq", model.model.rotary_emb.inv_freq.clone())
    frequencies = model.model.rotary_emb.inv_freq
    original = model.model.rotary_emb.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return original(x, position_ids.float().square() / 10)

    model.model.rotary_emb.forward = forward
    assert frequencies.numel() == 8
    assert "no known rotation" in (probe(ModelAdapter(model)).reason or "")


def test_an_attention_that_ignores_the_registered_function_is_noticed() -> None:
    model = make("llama")
    layer = model.model.layers[1].self_attn
    layer.config = type(layer.config)(**layer.config.to_dict())
    layer.config._attn_implementation = "sdpa"
    adapter = ModelAdapter(model)
    adapter._configs = [config for config in adapter._configs if config is not layer.config]
    assert "2 of 3 layers" in (probe(adapter).reason or "")


def test_a_failure_inside_the_model_is_the_reason() -> None:
    model = make("llama")

    def forward(*args: Any, **options: Any) -> Any:
        raise RuntimeError("kernel not compiled")

    model.model.layers[0].mlp.forward = forward
    assert "kernel not compiled" in (probe(ModelAdapter(model)).reason or "")


def test_an_architecture_with_an_attention_of_its_own_is_reused_or_refused_but_never_wrong() -> None:
    config = transformers.StableLmConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, partial_rotary_factor=0.25,
    )  # fmt: skip
    found = probe(ModelAdapter(AutoModelForCausalLM.from_config(config).eval()))
    assert (found.reason is None) == (found.rope is not None)
    assert (found.reason is not None) == IS_OLD


def test_rope_kinds_are_read_from_flat_and_nested_settings() -> None:
    class Config:
        rope_parameters = None
        rope_scaling: dict[str, Any] | None = None

    config = Config()
    assert rope_kinds(config) == {"default"}
    config.rope_scaling = {"type": "yarn", "factor": 2.0}
    assert rope_kinds(config) == {"yarn"}
    config.rope_parameters = {"full_attention": {"rope_type": "linear"}, "sliding_attention": {"rope_type": "default"}}  # type: ignore[assignment]
    assert rope_kinds(config) == {"linear", "default"}


def windowed(name: str, window: int) -> ModelAdapter:
    adapter = ModelAdapter(make(name, sliding_window=window))
    assert probe(adapter).reason is None
    return adapter


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "glm"])
def test_a_sliding_window_that_the_model_ignores_is_left_out(name: str) -> None:
    adapter = windowed(name, 40)
    assert set(adapter.windows) == {None}
    token_ids = torch.randint(3, 200, (90,), generator=torch.Generator().manual_seed(1))
    plain, rows = adapter.new_kv(90), adapter.new_kv(90)
    expected = adapter.forward_plain(token_ids, plain)
    assert torch.allclose(adapter.forward_rows(token_ids, torch.arange(90), rows), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "gemma3"])
def test_a_sliding_window_that_the_model_uses_stays(name: str) -> None:
    adapter = windowed(name, 40)
    assert 40 in set(adapter.windows)
    assert adapter.model.config.sliding_window == 40
    token_ids = torch.randint(3, 200, (90,), generator=torch.Generator().manual_seed(1))
    plain, rows = adapter.new_kv(90), adapter.new_kv(90)
    expected = adapter.forward_plain(token_ids, plain)
    assert torch.allclose(adapter.forward_rows(token_ids, torch.arange(90), rows), expected, atol=1e-4)
