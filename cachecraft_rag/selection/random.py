"""Tokens chosen by chance: the baseline that every policy must beat."""

from __future__ import annotations

import torch

from cachecraft_rag.selection.base import SelectionContext


class RandomTokens:
    """A uniform sample without replacement, the same for the same seed and number of candidates."""

    name = "random"
    needs_sensitivity = False

    def select(self, context: SelectionContext) -> torch.Tensor:
        """A sample of the size of the budget."""
        generator = torch.Generator().manual_seed(context.seed)
        return torch.randperm(context.positions.numel(), generator=generator)[: context.budget].sort().values
