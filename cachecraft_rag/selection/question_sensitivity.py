"""The tokens that the question looks at, weighted by how much their values depend on context."""

from __future__ import annotations

import torch

from cachecraft_rag.selection.base import SENSITIVITY_EXPONENT, SelectionContext, per_layer_share, top_candidates


class QuestionSensitivity:
    """Question attention times the fourth root of the stored sensitivity, per layer, layers added up.

    What a wrong value does to the answer grows with the attention it gets and with how wrong it is. The second factor
    is measured once, when the chunk is stored: how much its values change behind an unrelated passage. Its square root
    would be the size of that change; the fourth root measured better on two models: very sensitive tokens push out
    fewer of those that the question looks at.
    """

    name = "question_sensitivity"
    needs_sensitivity = True

    def select(self, context: SelectionContext) -> torch.Tensor:
        """The budget's share of tokens by the summed products."""
        return top_candidates(self.scores(context), context.budget)

    def scores(self, context: SelectionContext) -> torch.Tensor:
        """Each token's part in the attention-weighted fourth root of the sensitivity, mean over layers."""
        attention = per_layer_share(context.question_attention()).cpu()
        return (attention * context.sensitivity.cpu() ** SENSITIVITY_EXPONENT).mean(dim=0)
