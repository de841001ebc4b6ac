"""What a request computes before its first token, told in advance, and the settings with which that meets a target.

Policies that look at the question or at the keys pay for it. They are compared fairly where all that they compute,
selection passes included, is the same share of a full prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cachecraft_rag.config import RecomputeConfig, SamplingConfig
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.plan import RequestPlan
from cachecraft_rag.prompt import RagPrompt
from cachecraft_rag.request_chunk import plan_request

BY_CFO = "inter_attention"
"""The policy whose ``alpha`` decides how much is recomputed, not a ratio."""
QUESTION_PASS = frozenset({"question_attention", "question_deviation", "question_sensitivity", "history", "predicted"})
"""Policies that run the free tokens once more."""
KEY_PASS = frozenset({"key_deviation", "question_deviation"})
"""Policies that run all tokens through one layer."""

_LEAST_ALPHA, _MOST_ALPHA = 2.0**-20, 2.0**10


@dataclass(frozen=True)
class Charge:
    """Settings of a request and what it will compute.

    Attributes:
        recompute: The settings, with the ratio (or alpha) that comes closest to the target from below.
        charged_ratio: What ``RequestStats.charged_ratio`` will be.
        is_reached: Whether that is within one token of the target (with alpha, one token per chunk). It is not where
            the free tokens alone are more, nor where the target lies between nothing recomputed and the cost of
            choosing one token.
    """

    recompute: RecomputeConfig
    charged_ratio: float
    is_reached: bool


def plan_of(
    engine: CacheCraftEngine, prompt: RagPrompt, recompute: RecomputeConfig, namespace: str | None = None
) -> RequestPlan:
    """The plan of a request as the engine would make it.

    Raises:
        RuntimeError: A chunk of the prompt is not stored, so that computing it would be charged too.
    """
    return _planner(engine, prompt, namespace)(recompute)


def token_layers(plan: RequestPlan, policy: str, num_layers: int, budget: int) -> int:
    """Tokens times layers that a request computes before its first token when all its chunks are stored.

    Args:
        plan: What is where; its ratio is not looked at.
        policy: Name of the selection policy.
        num_layers: Layers of the model.
        budget: Number of chunk tokens to recompute.
    """
    free = plan.free_ranges()
    total = (sum(end - start for start, end in free) + budget) * num_layers
    if 0 < budget < plan.num_candidates:  # else there is nothing to choose
        if policy in QUESTION_PASS:
            # Free tokens before the first approximate chunk are exact already and don't run again.
            again = [(max(start, plan.leading_exact), end) for start, end in free if end > plan.leading_exact]
            total += sum(end - start for start, end in again) * num_layers
        if policy in KEY_PASS:
            total += plan.num_tokens
    return total


def charge_for(
    engine: CacheCraftEngine, prompt: RagPrompt, recompute: RecomputeConfig, target: float, namespace: str | None = None
) -> Charge:
    """The settings under which a request computes as much as it may.

    Args:
        engine: The engine; it must hold all chunks of the prompt.
        prompt: The prompt.
        recompute: The policy; its ratio (or alpha) is not looked at.
        target: Share of a full prefill's token-layers.
        namespace: Whose chunks; ``None`` takes the engine's.

    Raises:
        RuntimeError: A chunk of the prompt is not stored.
        ValueError: The target is not in 0 to 1, or a target divergence decides how much is recomputed.
    """
    if not 0.0 <= target <= 1.0:
        raise ValueError(f"charged: {target} is not in 0 to 1")
    if recompute.target is not None:
        raise ValueError(f"charged: {target} can't be met by a ratio that follows from target_divergence or preset")
    num_layers: int = engine.model.config.get_text_config().num_hidden_layers
    plan_with = _planner(engine, prompt, namespace)
    if recompute.policy == BY_CFO:
        recompute = _with_alpha(plan_with, recompute, num_layers, target)
        plan = plan_with(recompute)
        tolerance, budget = len(plan.chunks), plan.budget
    else:
        plan = plan_with(recompute)
        tolerance, budget = 1, _budget(plan, recompute.policy, num_layers, target)
        recompute = recompute.model_copy(update={"ratio": budget / max(1, plan.num_candidates)})
    charged = token_layers(plan, recompute.policy, num_layers, budget) / (plan.num_tokens * num_layers)
    return Charge(recompute, charged, abs(charged - target) * plan.num_tokens <= tolerance + 1e-6)


def _planner(
    engine: CacheCraftEngine, prompt: RagPrompt, namespace: str | None
) -> Callable[[RecomputeConfig], RequestPlan]:
    request = engine.intake.take(prompt, SamplingConfig(max_new_tokens=1), RecomputeConfig(), namespace)

    def plan_with(recompute: RecomputeConfig) -> RequestPlan:
        alpha = recompute.alpha if recompute.policy == BY_CFO else None
        keys = engine.library.keys(request.namespace)
        chunks = engine.library.look_up(request.encoded, keys, alpha=alpha)
        num_missing = sum(chunk.chunk_kv is None for chunk in chunks)
        if num_missing:
            raise RuntimeError(
                f"{num_missing} of {len(chunks)} chunks are not stored; warm them, and give the store more room"
            )
        head = engine.library.heads.find(request.encoded, keys)
        return plan_request(request.encoded, chunks, recompute.ratio, head)

    return plan_with


def _budget(plan: RequestPlan, policy: str, num_layers: int, target: float) -> int:
    """Most chunk tokens whose cost is at most the target; 0 where none is."""
    most = plan.num_candidates
    allowed = target * plan.num_tokens * num_layers * (1 + 1e-12)
    if policy == "none":
        return 0
    if policy == "all" or token_layers(plan, policy, num_layers, most) <= allowed:
        return most
    fixed = token_layers(plan, policy, num_layers, 1) - num_layers
    return min(max(0, math.floor((allowed - fixed) / num_layers)), max(0, most - 1))


def _with_alpha(
    plan_with: Callable[[RecomputeConfig], RequestPlan], recompute: RecomputeConfig, num_layers: int, target: float
) -> RecomputeConfig:
    """The settings with the largest alpha whose cost is at most the target, or the smallest alpha where none is."""

    def is_allowed(alpha: float) -> bool:
        plan = plan_with(recompute.model_copy(update={"alpha": alpha}))
        cost = token_layers(plan, recompute.policy, num_layers, plan.budget)
        return cost <= target * plan.num_tokens * num_layers * (1 + 1e-12)

    low, high = _LEAST_ALPHA, _MOST_ALPHA
    if is_allowed(high):
        low = high
    while high / low > 1 + 1e-5:  # what is recomputed never falls with alpha
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_allowed(middle) else (low, middle)
    return recompute.model_copy(update={"alpha": low})
