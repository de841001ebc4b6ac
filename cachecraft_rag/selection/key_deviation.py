"""The tokens whose keys change most (CacheBlend)."""

from __future__ import annotations

import torch

from cachecraft_rag.selection.base import SelectionContext, top_candidates


class KeyDeviation:
    """CacheBlend (arXiv 2405.16444): the tokens whose layer-1 keys differ most from the stored ones."""

    name = "key_deviation"
    needs_sensitivity = False

    def select(self, context: SelectionContext) -> torch.Tensor:
        """The budget's share of tokens by squared change of their keys in layer 1."""
        return top_candidates(self.scores(context), context.budget)

    def scores(self, context: SelectionContext) -> torch.Tensor:
        """Each token's part in the mean squared change."""
        return context.key_deviation() / max(1, context.positions.numel())
