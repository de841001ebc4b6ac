"""The tokens that the question looks at, weighted by how much their keys change."""

from __future__ import annotations

import torch

from cachecraft_rag.selection.base import SelectionContext, per_layer_share, top_candidates


class QuestionDeviation:
    """Question attention (as ``question_attention``) times layer-1 key deviation (as ``key_deviation``)."""

    name = "question_deviation"
    needs_sensitivity = False

    def select(self, context: SelectionContext) -> torch.Tensor:
        """The budget's share of tokens by the product."""
        return top_candidates(self.scores(context), context.budget)

    def scores(self, context: SelectionContext) -> torch.Tensor:
        """Each token's part in the attention-weighted squared change."""
        attention = per_layer_share(context.question_attention()).mean(dim=0).cpu()
        return attention * context.key_deviation().cpu()
