"""The interface of selection policies, and what a policy may look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

SENSITIVITY_EXPONENT = 0.25
"""How the stored sensitivity, which is a square, weighs on a score."""


@dataclass(frozen=True, eq=False)
class SelectionContext:
    """Everything a policy may know about a request.

    The two passes run the model when they are called, and are charged to the request; each runs at most once.

    Attributes:
        positions: Prompt positions of the tokens that may be recomputed, ``[num_candidates]`` int64, increasing.
        chunk_index: Number of the chunk of every candidate, ``[num_candidates]`` int64, increasing.
        offset_in_chunk: Place of every candidate in its chunk, ``[num_candidates]`` int64.
        sensitivity: Stored sensitivity of every candidate, ``[num_layers, num_candidates]`` float32; 1 where a chunk's
            has not been measured yet.
        budget: Number of tokens to select.
        seed: Seed of random choices.
        question_attention: Pass of the free tokens; attention of the question to every candidate,
            ``[num_layers, num_candidates]`` float32.
        key_deviation: Pass of all tokens through the first layer; squared change of every candidate's keys in layer 1,
            ``[num_candidates]`` float32.
        inter_attention: Attention that every candidate paid to other chunks when its KV was made, ``[num_candidates]``
            float32; 0 where that was not recorded, ``None`` where it was for none.
        chunk_budgets: Number of tokens to select of every chunk of the prompt; ``None`` where they share ``budget``.
        history: Share of the attention to chunks that earlier answers paid to every candidate, ``[num_candidates]``
            float32; 0 in chunks that none has read, ``None`` where that is not known.
        predicted_deviation: Relative change of every candidate's values that a regressor predicts,
            ``[num_layers, num_candidates]`` float32; runs no pass. ``None`` without a regressor.
    """

    positions: torch.Tensor
    chunk_index: torch.Tensor
    offset_in_chunk: torch.Tensor
    sensitivity: torch.Tensor
    budget: int
    seed: int
    question_attention: Callable[[], torch.Tensor]
    key_deviation: Callable[[], torch.Tensor]
    inter_attention: torch.Tensor | None = None
    chunk_budgets: Sequence[int] | None = None
    history: torch.Tensor | None = None
    predicted_deviation: Callable[[], torch.Tensor] | None = None


class SelectionPolicy(Protocol):
    """Chooses the tokens to recompute.

    Attributes:
        name: Its name in ``RecomputeConfig.policy``.
        needs_sensitivity: Whether chunks must carry their stored sensitivity.
    """

    name: str
    needs_sensitivity: bool

    def select(self, context: SelectionContext) -> torch.Tensor:
        """Indices of the chosen candidates, ``[num_selected]`` int64, increasing."""
        ...


@runtime_checkable
class ScoringPolicy(SelectionPolicy, Protocol):
    """A policy that takes the tokens of the highest scores."""

    def scores(self, context: SelectionContext) -> torch.Tensor:
        """What it costs to leave each candidate as it is, ``[num_candidates]`` float32, never negative.

        The sum over the candidates means the same in short and in long prompts.
        """
        ...


def top_candidates(scores: torch.Tensor, budget: int) -> torch.Tensor:
    """Indices of the ``budget`` highest scores, increasing; equal scores are taken from the front.

    Args:
        scores: ``[num_candidates]`` float32.
        budget: How many.
    """
    order = torch.sort(scores.cpu(), descending=True, stable=True).indices
    return order[:budget].sort().values


def per_layer_share(attention: torch.Tensor) -> torch.Tensor:
    """Attention ``[num_layers, num_candidates]`` scaled to sum to 1 in every layer, so that all layers count alike."""
    return attention / attention.sum(dim=1, keepdim=True).clamp(min=1e-12)
