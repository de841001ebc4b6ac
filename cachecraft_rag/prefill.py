"""From placed chunks to the logits of the prompt's last token: select, recompute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cachecraft_rag.chunk_kv import LayeredKV
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.plan import RequestPlan
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.selection import SelectionContext, SelectionPolicy


@dataclass(frozen=True, eq=False)
class PrefillResult:
    """What a selective prefill computed.

    Attributes:
        logits: Logits of the prompt's last token, ``[vocab_size]`` float32.
        selected: Positions of the chunk tokens that were computed again, ``[num_selected]`` int64, increasing.
        token_layers: Tokens times layers that were computed, selection passes included.
        select_s: Seconds spent on choosing tokens, without those spent on loading.
        prefill_s: Seconds of the main forward pass, likewise.
    """

    logits: torch.Tensor
    selected: torch.Tensor
    token_layers: int
    select_s: float
    prefill_s: float


def selective_prefill(
    adapter: ModelAdapter,
    plan: RequestPlan,
    chunk_kvs: Sequence[LayeredKV | None],
    token_ids: torch.Tensor,
    kv: PromptKV,
    policy: SelectionPolicy,
    seed: int = 0,
) -> PrefillResult:
    """Choose the tokens to recompute and compute them with all free tokens in one forward pass.

    Args:
        adapter: The model.
        plan: What is where, and the budget.
        chunk_kvs: The KV of the chunks, for their sensitivity.
        token_ids: ``[num_tokens]`` int64, the whole prompt.
        kv: The buffer that the stored chunks are put into.
        policy: Chooses the tokens, when the budget is neither nothing nor everything.
        seed: Seed of random choices.
    """
    started, filled = time.perf_counter(), kv.fill_s
    passes = _Passes(adapter, plan, token_ids, kv)
    candidates = _candidates(plan)
    num_candidates = candidates.numel()
    if plan.budget == 0:
        selected = candidates[:0]
    elif plan.budget == num_candidates:
        selected = candidates
    else:
        context = _selection_context(plan, chunk_kvs, candidates, adapter.num_layers, seed, passes)
        selected = candidates[policy.select(context)]
    select_s = time.perf_counter() - started - (kv.fill_s - filled)

    started, filled = time.perf_counter(), kv.fill_s
    rows = torch.cat([selected, passes.free_rows()]).sort().values
    logits = adapter.forward_rows(token_ids[rows], rows, kv)
    token_layers = passes.token_layers + rows.numel() * adapter.num_layers
    prefill_s = time.perf_counter() - started - (kv.fill_s - filled)
    return PrefillResult(logits, selected, token_layers, select_s, prefill_s)


class _Passes:
    """The forward passes that policies may ask for; each runs at most once and is charged."""

    def __init__(self, adapter: ModelAdapter, plan: RequestPlan, token_ids: torch.Tensor, kv: PromptKV) -> None:
        self._adapter, self._plan, self._token_ids, self._kv = adapter, plan, token_ids, kv
        self._candidates = _candidates(plan)
        self._attention: torch.Tensor | None = None
        self._deviation: torch.Tensor | None = None
        self.token_layers = 0

    def free_rows(self) -> torch.Tensor:
        """Free tokens that the main pass must compute.

        The question pass has computed those before the first approximate chunk already, with exact KV before them.
        """
        first = 0 if self._attention is None else self._plan.leading_exact
        ranges = [(max(start, first), end) for start, end in self._plan.free_ranges() if end > first]
        return torch.cat([torch.arange(start, end) for start, end in ranges])

    def question_attention(self) -> torch.Tensor:
        """Run the free tokens over the stored KV; attention of the question to every candidate."""
        if self._attention is None:
            rows = self.free_rows()
            question_start = self._plan.question_range()[0]
            record_from = int((rows < question_start).sum())
            recorded = self._adapter.forward_rows_recording(self._token_ids[rows], rows, self._kv, record_from)
            self._attention = recorded[:, self._candidates.to(recorded.device)]
            self.token_layers += rows.numel() * self._adapter.num_layers
        return self._attention

    def key_deviation(self) -> torch.Tensor:
        """Run all tokens through the first layer; squared change of every candidate's keys in layer 1."""
        if self._deviation is None:
            layer_idx = min(1, self._adapter.num_layers - 1)
            positions = torch.arange(self._token_ids.numel())
            fresh = self._adapter.capture(self._token_ids, positions, layer_idx + 1)[layer_idx][0][0]
            stored, _ = self._kv.layer(layer_idx)
            index = self._candidates.to(stored.device)
            change = fresh[:, index].float() - stored[:, index].float()
            self._deviation = change.square().sum(dim=(0, 2))
            self.token_layers += positions.numel()
        return self._deviation


def _candidates(plan: RequestPlan) -> torch.Tensor:
    """Positions of the tokens that may be recomputed; the last token is computed in any case."""
    last = plan.num_tokens - 1
    runs = [torch.arange(chunk.start, min(chunk.end, last)) for chunk in plan.approximate]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.long)


def _selection_context(
    plan: RequestPlan,
    chunk_kvs: Sequence[LayeredKV | None],
    candidates: torch.Tensor,
    num_layers: int,
    seed: int,
    passes: _Passes,
) -> SelectionContext:
    chunk_index = torch.empty_like(candidates)
    sensitivity = torch.ones(num_layers, candidates.numel())
    offsets = torch.empty_like(candidates)
    for index, (chunk, chunk_kv) in enumerate(zip(plan.chunks, chunk_kvs, strict=True)):
        inside = (candidates >= chunk.start) & (candidates < chunk.end)
        chunk_index[inside] = index
        offsets[inside] = candidates[inside] - chunk.start
        if chunk_kv is not None and chunk_kv.sensitivity is not None and bool(inside.any()):
            sensitivity[:, inside] = chunk_kv.sensitivity[:, offsets[inside]].float()
    return SelectionContext(
        positions=candidates,
        chunk_index=chunk_index,
        offset_in_chunk=offsets,
        sensitivity=sensitivity,
        budget=plan.budget,
        seed=seed,
        question_attention=passes.question_attention,
        key_deviation=passes.key_deviation,
    )
