"""The correctness gate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cachecraft_rag import UnsupportedModelError
from cachecraft_rag.capability import probe
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.rope import RopeSpec, RotaryLayout
from cachecraft_rag.verify import verify
from tests.tiny_models import REUSED, make


@pytest.mark.parametrize("name", sorted(REUSED))
def test_every_identity_holds_for_every_architecture(name: str) -> None:
    adapter = ModelAdapter(make(name))
    report = verify(adapter, probe(adapter), name)
    assert len(report.checks) == 5
    assert all(check.is_passed for check in report.checks)
    assert "float32" in str(report)
    assert "<td>" in report._repr_html_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_within_its_rounding(dtype: torch.dtype) -> None:
    adapter = ModelAdapter(make("llama", dtype))
    assert verify(adapter, probe(adapter), "llama").dtype == str(dtype).removeprefix("torch.")


def test_a_wrong_rotation_is_refused_by_name() -> None:
    adapter = ModelAdapter(make("llama"))
    capability = probe(adapter)
    assert capability.rope is not None
    right = capability.rope.layers[0]
    assert right is not None
    wrong = replace(capability, rope=RopeSpec((RotaryLayout(right.inv_freq * 1.01),) * 3))
    with pytest.raises(UnsupportedModelError, match="moved 5 -> 300"):
        verify(adapter, wrong, "llama")


def test_a_model_that_can_not_be_reused_is_refused_with_its_reason() -> None:
    adapter = ModelAdapter(make("gpt2"))
    with pytest.raises(UnsupportedModelError, match="no rotary"):
        verify(adapter, probe(adapter), "gpt2")
