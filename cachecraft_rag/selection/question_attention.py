"""The tokens that the question looks at (ProphetKV)."""

from __future__ import annotations

import torch

from cachecraft_rag.selection.base import SelectionContext, per_layer_share, top_candidates


class QuestionAttention:
    """ProphetKV (arXiv 2602.02579): the question's attention over the stored KV, per layer, layers added up."""

    name = "question_attention"
    needs_sensitivity = False

    def select(self, context: SelectionContext) -> torch.Tensor:
        """The budget's share of tokens by summed attention."""
        return top_candidates(self.scores(context), context.budget)

    def scores(self, context: SelectionContext) -> torch.Tensor:
        """Each token's share of the attention, mean over layers."""
        return per_layer_share(context.question_attention()).mean(dim=0)
