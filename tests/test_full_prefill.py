"""Prompts that are computed in the ordinary way."""

from __future__ import annotations

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig
from tests.conftest import rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.filterwarnings("ignore:prompts are prefilled in full")
def test_a_soft_prompt_is_read_before_the_prompt_and_every_token(reuse: bool) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
    model = peft.get_peft_model(make("llama"), settings).eval()
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.normal_(0.0, 1.0)
    with CacheCraftEngine(model, byte_level(), EngineConfig(max_new_tokens=6)) as engine:
        found = engine.generate(rag_prompt(1, 2), reuse=reuse)
        ids = torch.tensor([engine.prompts.encode(rag_prompt(1, 2)).token_ids])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
        expected = model.generate(input_ids=ids, use_cache=False, **options)  # with a cache, PEFT loses the positions
        bare = model.get_base_model().generate(ids, max_new_tokens=6, do_sample=False)
    assert list(found.token_ids) == expected[0, -6:].tolist()
    assert list(found.token_ids) != bare[0, -6:].tolist()
