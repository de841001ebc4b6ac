"""Whatever changes a model's activations from outside is noticed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cachecraft_rag.model_state import ModelState
from tests.tiny_models import make


@pytest.fixture
def model() -> Any:
    return make("llama")


def run(model: Any) -> None:
    with torch.inference_mode():
        model(torch.tensor([[5, 6, 7]]))


class AdapterLayer(nn.Linear):
    """A layer with the attributes that PEFT's layers have."""

    active_adapters: list[str]
    disable_adapters: bool
    merged_adapters: list[str]

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.active_adapters, self.disable_adapters, self.merged_adapters = ["legal"], False, []


# The fingerprint


def test_the_fingerprint_is_stable(model: Any) -> None:
    state = ModelState(model)
    before = state.fingerprint()
    run(model)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.train()
    model.eval()
    model.requires_grad_(False)
    assert state.fingerprint() == before
    assert len(before) == 32


def test_the_same_weights_have_the_same_fingerprint(model: Any) -> None:
    assert ModelState(model).fingerprint() == ModelState(make("llama")).fingerprint()
    assert ModelState(model).fingerprint() != ModelState(make("llama", rms_norm_eps=1e-3)).fingerprint()
    assert ModelState(model).fingerprint() != ModelState(make("llama", dtype=torch.bfloat16)).fingerprint()


def test_hashing_all_weights_happens_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: Any) -> str:
        calls.append(arguments)
        return "fingerprint"

    monkeypatch.setattr("cachecraft_rag.model_state.model_fingerprint", counted)
    state = ModelState(model)
    assert {state.fingerprint() for _ in range(5)} == {"fingerprint"}
    assert len(calls) == 1


def test_an_addition_in_place_changes_the_fingerprint(model: Any) -> None:
    state = ModelState(model)
    before = state.fingerprint()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(1e-3)
        after = state.fingerprint()
        assert after != before
        before = after


def test_a_change_of_any_single_element_changes_the_fingerprint(model: Any) -> None:
    state = ModelState(model)
    weight = model.lm_head.weight
    for index in (0, 1, 17, weight.numel() - 1):
        before = state.fingerprint()
        with torch.no_grad():
            weight.view(-1)[index] += 1e-3
        assert state.fingerprint() != before


def test_a_multiplication_past_autograd_changes_the_fingerprint(model: Any) -> None:
    state = ModelState(model)
    before = state.fingerprint()
    for parameter in model.parameters():
        parameter.data.mul_(1.01)  # leaves the tensor's version counter alone
        after = state.fingerprint()
        assert after != before
        before = after


def test_a_change_past_autograd_of_a_transposed_weight_changes_the_fingerprint(model: Any) -> None:
    weight = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(weight.detach().t().contiguous().t())
    state = ModelState(model)
    before = state.fingerprint()
    model.lm_head.weight.data.mul_(1.01)
    assert state.fingerprint() != before


def test_a_step_of_an_optimizer_changes_the_fingerprint(model: Any) -> None:
    state = ModelState(model)
    before = state.fingerprint()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert state.fingerprint() == before
    optimizer.step()
    assert state.fingerprint() != before


def test_undoing_a_change_brings_the_old_fingerprint_back(model: Any) -> None:
    state = ModelState(model)
    before = state.fingerprint()
    saved = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert state.fingerprint() != before
    with torch.no_grad():
        model.lm_head.weight.copy_(saved)
    assert state.fingerprint() == before


def test_new_weights_in_the_same_model_change_the_fingerprint(model: Any) -> None:
    state = ModelState(model)
    before = state.fingerprint()
    torch.manual_seed(8)
    other = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(other)
    assert state.fingerprint() != before


def test_a_replaced_weight_changes_the_fingerprint(model: Any) -> None:
    state = ModelState(model)
    before = state.fingerprint()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    assert state.fingerprint() != before


def test_a_changed_buffer_changes_the_fingerprint(model: Any) -> None:
    state = ModelState(model)
    before = state.fingerprint()
    model.model.rotary_emb.inv_freq.mul_(0.5)
    assert state.fingerprint() != before


def test_another_dtype_changes_the_fingerprint(model: Any) -> None:
    state = ModelState(model)
    before = state.fingerprint()
    model.to(torch.bfloat16)
    assert state.fingerprint() != before


def test_an_added_module_changes_the_fingerprint(model: Any) -> None:
    state = ModelState(model)
    before = state.fingerprint()
    model.add_module("extra", nn.Linear(4, 4))
    assert state.fingerprint() != before


def test_weights_made_in_inference_mode_have_a_fingerprint() -> None:
    with torch.inference_mode():
        model = make("llama")
    state = ModelState(model)
    before = state.fingerprint()
    assert before == ModelState(make("llama")).fingerprint()
    with torch.inference_mode():
        model.lm_head.weight.mul_(2)
    assert state.fingerprint() != before


@pytest.mark.parametrize(
    ("name", "value"), [("active_adapters", ["medical"]), ("disable_adapters", True), ("merged_adapters", ["legal"])]
)
def test_switching_an_adapter_changes_the_fingerprint(model: Any, name: str, value: object) -> None:
    layer = AdapterLayer()
    model.add_module("adapter", layer)
    state = ModelState(model)
    before, was = state.fingerprint(), getattr(layer, name)
    setattr(layer, name, value)
    assert state.fingerprint() != before
    setattr(layer, name, was)
    assert state.fingerprint() == before


# Interventions


def test_an_untouched_model_is_undisturbed(model: Any) -> None:
    assert ModelState(model).intervention() is None
    run(model)
    assert ModelState(model).intervention() is None


def test_looking_at_a_model_that_reports_its_states_is_no_intervention(model: Any) -> None:
    model.set_attn_implementation("eager")
    model(torch.tensor([[5, 6, 7]]), output_hidden_states=True, output_attentions=True)
    assert ModelState(model).intervention() is None


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_is_reported_by_its_place_until_it_is_removed(model: Any, kind: str) -> None:
    state = ModelState(model)
    handle = getattr(model.model.layers[1].mlp, kind)(lambda *_: None)
    reason = state.intervention()
    assert reason is not None
    assert "hook" in reason
    assert "model.layers.1.mlp" in reason
    handle.remove()
    assert state.intervention() is None


def test_a_hook_on_the_whole_model_is_reported(model: Any) -> None:
    handle = model.register_forward_hook(lambda *_: None, with_kwargs=True)
    assert "the model" in str(ModelState(model).intervention())
    handle.remove()
    assert ModelState(model).intervention() is None


def test_a_hook_on_every_module_is_reported(model: Any) -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert ModelState(model).intervention() is not None
    finally:
        handle.remove()
    assert ModelState(model).intervention() is None


def test_hooks_of_transformers_itself_are_no_intervention(model: Any) -> None:
    def record(*_: Any) -> None:
        return None

    record.__module__ = "transformers.utils.generic"
    model.model.layers[0].register_forward_hook(record)
    assert ModelState(model).intervention() is None


def test_a_soft_prompt_is_reported_while_it_is_active(model: Any) -> None:
    model.active_peft_config = SimpleNamespace(is_prompt_learning=True)  # PEFT's attribute
    assert "soft prompt" in str(ModelState(model).intervention())
    model.active_peft_config = SimpleNamespace(is_prompt_learning=False)
    assert ModelState(model).intervention() is None


def test_weights_that_are_not_there_are_reported() -> None:
    with torch.device("meta"):
        model = make("llama")
    assert "offloaded" in str(ModelState(model).intervention())


def test_one_missing_weight_is_enough(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to("meta"))
    assert "offloaded" in str(ModelState(model).intervention())


def test_the_strength_of_an_adapter_is_part_of_the_fingerprint() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make("llama"), settings).eval()
    state = ModelState(model)
    before = state.fingerprint()
    with peft.helpers.rescale_adapter_scale(model, 0.1):
        assert state.fingerprint() != before
    assert state.fingerprint() == before
