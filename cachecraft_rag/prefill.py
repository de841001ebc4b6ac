"""From placed chunks to the logits of the prompt's last token: select, recompute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from cachecraft_rag.attention_record import ChunkRecorder
from cachecraft_rag.candidates import Candidates
from cachecraft_rag.chunk_kv import LayeredKV
from cachecraft_rag.deviation import DeviationModel
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.offset import Offset
from cachecraft_rag.plan import RequestPlan
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.quality import Goal, residuals
from cachecraft_rag.rope import RopeSpec
from cachecraft_rag.selection import ScoringPolicy, SelectionContext, SelectionPolicy
from cachecraft_rag.selection.base import top_candidates
from cachecraft_rag.similar import AskedQuestion, Hint
from cachecraft_rag.sparse_attention import SparseKeys


@dataclass(frozen=True, eq=False)
class PrefillResult:
    """What a selective prefill computed.

    Attributes:
        logits: Logits of the prompt's last token, ``[vocab_size]`` float32; ``None`` when reuse was refused.
        plan: The plan as it was carried out: with the budget that the goal led to.
        refusal: Why the prompt must be prefilled in full; ``None`` when it was computed.
        residual: What the scores of the tokens left as they are add up to; ``None`` where the policy gave none.
        predicted_divergence: What the calibration makes of it; ``None`` without one.
        selected: Positions of the chunk tokens that were computed again, ``[num_selected]`` int64, increasing.
        scores: What the policy gave the tokens of every chunk, ``[num_tokens]`` float32 each, ``None`` for a chunk
            without tokens to choose from; empty where nothing was scored, or nobody asked.
        is_hinted: Whether an earlier question's scores were used.
        token_layers: Tokens times layers that were computed, selection passes included.
        select_s: Seconds spent on choosing tokens, without those spent on loading.
        prefill_s: Seconds of the main forward pass, likewise.
        recorder: What the chunks that are to become variants paid attention to; ``None`` where there are none.
    """

    logits: torch.Tensor | None
    plan: RequestPlan
    refusal: str | None
    residual: float | None
    predicted_divergence: float | None
    selected: torch.Tensor
    scores: tuple[torch.Tensor | None, ...]
    is_hinted: bool
    token_layers: int
    select_s: float
    prefill_s: float
    recorder: ChunkRecorder | None = None


def selective_prefill(
    adapter: ModelAdapter,
    plan: RequestPlan,
    chunk_kvs: Sequence[LayeredKV | None],
    token_ids: torch.Tensor,
    kv: PromptKV,
    policy: SelectionPolicy,
    seed: int = 0,
    goal: Goal | None = None,
    rope: RopeSpec | None = None,
    offset: float = 0.0,
    attend_share: float = 1.0,
    earlier: Sequence[torch.Tensor | None] | None = None,
    deviation: DeviationModel | None = None,
    asked: AskedQuestion | None = None,
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
        goal: Chooses the budget, when it has a target, and predicts the divergence; with a target the policy must be a
            ``ScoringPolicy``.
        rope: The rotation of every layer; needed for the offset.
        offset: Share of the predicted change by which tokens that are not recomputed are moved.
        attend_share: Share of the blocks of every approximate chunk that the main pass looks at.
        earlier: Share of earlier answers' attention that each token of every chunk got, ``[num_tokens]`` float32 where
            one has read the chunk.
        deviation: Predicts how far stored values are off.
        asked: The question, and what a similar one found out; ``None`` where these are not looked for.
    """
    started, filled = time.perf_counter(), kv.fill_s
    candidates = Candidates(plan, chunk_kvs, adapter.num_layers)
    passes = _Passes(adapter, plan, candidates, token_ids, kv)
    context = partial(_selection_context, plan, candidates, passes, seed, earlier, deviation)
    choice = _choose(plan, candidates, policy, goal, context, asked)
    select_s = time.perf_counter() - started - (kv.fill_s - filled)
    if choice.refusal is not None:
        return PrefillResult(None, *choice, passes.token_layers, select_s, 0.0)

    started, filled = time.perf_counter(), kv.fill_s
    rows = torch.cat([choice.selected, passes.free_rows()]).sort().values
    recorder = None
    if plan.chunk_budgets is not None and plan.computed_exactly:
        recorder = ChunkRecorder([(chunk.start, chunk.end) for chunk in plan.chunks], plan.computed_exactly)
    correction = sparse = None
    if attend_share < 1.0 and choice.selected.numel() < len(candidates):
        chunks = [(chunk.start, chunk.end) for chunk in plan.approximate]
        sparse = SparseKeys(rows, chunks, attend_share, plan.num_tokens, kv.keys.device)
    if offset > 0.0 and rope is not None and 0 < choice.selected.numel() < len(candidates):
        correction = _offset(candidates, choice.selected, rows, rope, offset, kv.keys.device).correct
    with kv.corrected_by(correction):
        logits = adapter.forward_rows(token_ids[rows], rows, kv, recorder, sparse)
    token_layers = passes.token_layers + rows.numel() * adapter.num_layers
    prefill_s = time.perf_counter() - started - (kv.fill_s - filled)
    return PrefillResult(logits, *choice, token_layers, select_s, prefill_s, recorder)


class _Choice(NamedTuple):
    """The fields of these names of ``PrefillResult``."""

    plan: RequestPlan
    refusal: str | None
    residual: float | None
    predicted_divergence: float | None
    selected: torch.Tensor
    scores: tuple[torch.Tensor | None, ...] = ()
    is_hinted: bool = False


def _choose(
    plan: RequestPlan,
    candidates: Candidates,
    policy: SelectionPolicy,
    goal: Goal | None,
    make_context: Callable[[], SelectionContext],
    asked: AskedQuestion | None,
) -> _Choice:
    num_candidates, positions = len(candidates), candidates.positions
    target = None if goal is None else goal.target
    if target is not None and num_candidates == 0:
        plan = plan.with_budget(0)
    if num_candidates == 0 or (target is None and plan.budget in (0, num_candidates)):
        known = 0.0 if plan.budget == num_candidates else None  # nothing is left, or nobody looked at what is
        return _Choice(plan, None, known, known, positions[: plan.budget])
    context = make_context()
    if not isinstance(policy, ScoringPolicy):
        return _Choice(plan, None, None, None, positions[policy.select(context)])
    # A target is met by what the scores add up to, which those of another prompt don't tell.
    hint = None if asked is None or target is not None else asked.hint
    scores, own = _scores(policy, context, hint)
    found = () if asked is None or own is None else candidates.by_chunk(own), hint is not None
    left = residuals(scores)
    if goal is not None and target is not None:
        budget = goal.budget(left)
        if budget is None:
            least = goal.calibration.predict(float(left[goal.largest_budget(left)]))
            refusal = f"predicted divergence {least:.4g} above the target {target:.4g}"
            return _Choice(plan.with_budget(num_candidates), refusal, 0.0, 0.0, positions[:0], *found)
        plan = plan.with_budget(budget)
    # Scores of an earlier question are shares of another prompt's: they rank tokens, and add up to nothing.
    residual = None if own is None else float(left[plan.budget])
    predicted = None if goal is None or residual is None else goal.calibration.predict(residual)
    return _Choice(plan, None, residual, predicted, positions[top_candidates(scores, plan.budget)], *found)


def _scores(
    policy: ScoringPolicy, context: SelectionContext, hint: Hint | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores of the candidates to go by, and those of the policy itself, ``None`` where an earlier question's do."""
    if hint is None:
        scores = policy.scores(context)
        return scores, scores
    earlier, known = hint.over(context.chunk_index, context.offset_in_chunk)
    if hint.may_replace and bool(known.all()):
        return earlier, None
    own = policy.scores(context)
    mean = (own.cpu() + hint.weight * earlier) / (1.0 + hint.weight)
    return torch.where(known, mean, own.cpu()), own


class _Passes:
    """The forward passes that policies may ask for; each runs at most once and is charged."""

    def __init__(
        self, adapter: ModelAdapter, plan: RequestPlan, candidates: Candidates, token_ids: torch.Tensor, kv: PromptKV
    ) -> None:
        self._adapter, self._plan, self._token_ids, self._kv = adapter, plan, token_ids, kv
        self._candidates = candidates
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
            self._attention = recorded[:, self._candidates.positions.to(recorded.device)]
            self.token_layers += rows.numel() * self._adapter.num_layers
        return self._attention

    def key_deviation(self) -> torch.Tensor:
        """Run all tokens through the first layer; squared change of every candidate's keys in layer 1."""
        if self._deviation is None:
            layer_idx = min(1, self._adapter.num_layers - 1)
            positions = torch.arange(self._token_ids.numel())
            fresh = self._adapter.capture(self._token_ids, positions, layer_idx + 1)[layer_idx][0][0]
            stored, _ = self._kv.layer(layer_idx)
            index = self._candidates.positions.to(stored.device)
            change = fresh[:, index].float() - stored[:, index].float()
            self._deviation = change.square().sum(dim=(0, 2))
            self.token_layers += positions.numel()
        return self._deviation

    def predicted(self, deviation: DeviationModel) -> torch.Tensor:
        """Predicted deviation of every candidate; runs nothing, and is not charged."""
        return deviation.predict(self._candidates.features(self._token_ids, self._kv))


def _offset(
    candidates: Candidates,
    selected: torch.Tensor,
    rows: torch.Tensor,
    rope: RopeSpec,
    strength: float,
    device: torch.device,
) -> Offset:
    return Offset(
        candidates.positions,
        candidates.chunk_index,
        candidates.comparable_sensitivity,
        selected,
        rows,
        rope.layers,
        strength,
        device,
    )


def _selection_context(
    plan: RequestPlan,
    candidates: Candidates,
    passes: _Passes,
    seed: int,
    earlier: Sequence[torch.Tensor | None] | None,
    deviation: DeviationModel | None,
) -> SelectionContext:
    return SelectionContext(
        positions=candidates.positions,
        chunk_index=candidates.chunk_index,
        offset_in_chunk=candidates.offset_in_chunk,
        sensitivity=candidates.sensitivity,
        budget=plan.budget,
        seed=seed,
        question_attention=passes.question_attention,
        key_deviation=passes.key_deviation,
        inter_attention=candidates.inter_attention,
        chunk_budgets=plan.chunk_budgets,
        history=None if earlier is None else candidates.gather(earlier),
        predicted_deviation=None if deviation is None else partial(passes.predicted, deviation),
    )
