"""Placing, selecting and recomputing."""

from __future__ import annotations

import pytest
import torch

from cachecraft_rag.assembly import assemble
from cachecraft_rag.capability import probe
from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.encoder import ChunkEncoder
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.plan import RequestPlan, make_plan
from cachecraft_rag.prefill import selective_prefill
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.selection import POLICIES
from cachecraft_rag.selection.base import SelectionContext
from tests.tiny_models import make

DRAW = torch.Generator().manual_seed(4)
IDS = torch.randint(3, 500, (150,), generator=DRAW)
SPANS = [(10, 50), (55, 95), (95, 135)]


class Setting:
    """A prompt of 150 tokens with three chunks computed behind a prefix."""

    def __init__(self, ratio: float) -> None:
        self.adapter = ModelAdapter(make("llama"))
        encoder = ChunkEncoder(self.adapter, (tuple(range(3, 9)), tuple(range(100, 140))))
        self.chunk_kvs: list[ChunkKV | None] = [
            encoder.encode(IDS[start:end].tolist(), with_sensitivity=True) for start, end in SPANS
        ]
        self.plan: RequestPlan = make_plan(150, SPANS, [True] * 3, [False] * 3, ratio)
        rope = probe(self.adapter).rope
        assert rope is not None
        self.kv: PromptKV = self.adapter.new_kv(160)
        assemble(self.plan, self.chunk_kvs, rope, self.kv)


def test_chunks_are_placed_with_keys_moved_and_values_as_they_were() -> None:
    setting = Setting(0.0)
    for (start, end), chunk_kv in zip(SPANS, setting.chunk_kvs, strict=True):
        assert chunk_kv is not None
        keys, values = setting.kv.slice(start, end)
        assert torch.equal(values, chunk_kv.values)
        fresh = setting.adapter.capture(IDS[start:end], torch.arange(start, end), 1)[0][0][0]
        assert torch.allclose(keys[0], fresh, atol=1e-4)  # layer 0 sees no context, so its keys are known
    untouched = [position for position in range(160) if not any(start <= position < end for start, end in SPANS)]
    assert not setting.kv.keys[:, :, :, untouched].any()


@pytest.mark.parametrize("policy", ["random", "chunk_start", "key_deviation", "question_sensitivity"])
def test_only_selected_and_free_rows_change(policy: str) -> None:
    setting = Setting(0.2)
    before = setting.kv.values.clone()
    result = selective_prefill(setting.adapter, setting.plan, setting.chunk_kvs, IDS, setting.kv, POLICIES[policy])
    assert result.selected.numel() == setting.plan.budget == 24
    computed = set(result.selected.tolist())
    for start, end in SPANS:
        for position in range(start, end):
            is_changed = not torch.equal(before[:, :, :, position], setting.kv.values[:, :, :, position])
            assert is_changed == (position in computed)


def test_a_policy_sees_what_the_passes_measure() -> None:
    setting = Setting(0.1)
    seen: list[SelectionContext] = []

    class Spy:
        name = "spy"
        needs_sensitivity = True

        def select(self, context: SelectionContext) -> torch.Tensor:
            seen.append(context)
            assert context.question_attention().shape == (3, 120)
            assert context.question_attention() is context.question_attention()
            assert context.key_deviation().shape == (120,)
            return torch.arange(context.budget)

    selective_prefill(setting.adapter, setting.plan, setting.chunk_kvs, IDS, setting.kv, Spy())
    context = seen[0]
    assert context.positions.tolist() == [p for start, end in SPANS for p in range(start, end)]
    assert context.chunk_index.tolist() == [0] * 40 + [1] * 40 + [2] * 40
    assert context.offset_in_chunk.tolist() == list(range(40)) * 3
    stored = setting.chunk_kvs[1]
    assert stored is not None
    assert stored.sensitivity is not None
    assert torch.equal(context.sensitivity[:, 40:80], stored.sensitivity.float())


def test_key_deviation_is_that_of_the_keys_of_layer_1() -> None:
    setting = Setting(0.1)
    plain = setting.adapter.new_kv(150)
    setting.adapter.forward_plain(IDS, plain)
    positions = [p for start, end in SPANS for p in range(start, end)]
    expected = (plain.keys[1, 0, :, positions] - setting.kv.keys[1, 0, :, positions]).square().sum(dim=(0, 2))
    result = selective_prefill(
        setting.adapter, setting.plan, setting.chunk_kvs, IDS, setting.kv, POLICIES["key_deviation"]
    )
    top = torch.tensor(positions)[expected.topk(setting.plan.budget).indices].sort().values
    assert result.selected.tolist() == top.tolist()


def test_missing_sensitivity_counts_as_one() -> None:
    setting = Setting(0.1)
    bare = setting.chunk_kvs[0]
    assert bare is not None
    setting.chunk_kvs[0] = ChunkKV(bare.keys, bare.values, bare.token_ids, bare.base)
    seen: list[torch.Tensor] = []

    class Spy:
        name = "spy"
        needs_sensitivity = True

        def select(self, context: SelectionContext) -> torch.Tensor:
            seen.append(context.sensitivity)
            return torch.arange(context.budget)

    selective_prefill(setting.adapter, setting.plan, setting.chunk_kvs, IDS, setting.kv, Spy())
    assert torch.equal(seen[0][:, :40], torch.ones(3, 40))
    assert not torch.equal(seen[0][1:, 40:], torch.ones(2, 80))
