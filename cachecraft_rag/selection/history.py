"""The tokens that the question and earlier answers look at, weighted by how much their values depend on context."""

from __future__ import annotations

import torch

from cachecraft_rag.selection.base import SENSITIVITY_EXPONENT, SelectionContext, per_layer_share, top_candidates

_WEIGHT = 0.5
"""What earlier answers' attention counts beside the question's: they read the same chunks, for other questions."""


class History:
    """As ``question_sensitivity``, with the attention that earlier answers paid to a chunk added to the question's.

    What should be recomputed is what the answer is going to look at. The question's own attention is one forecast of
    that. Where earlier answers looked in the same chunks is another: answers also read what no question names, and
    people come back to the same clauses. Both are shares of attention, so they are added before the sensitivity weighs
    them: a token whose values depend on no context is right, however many answers have looked at it. The history of
    all chunks adds up to the attention of one answer at most. Without any, this is ``question_sensitivity``.
    """

    name = "history"
    needs_sensitivity = True

    def select(self, context: SelectionContext) -> torch.Tensor:
        """The budget's share of tokens by the summed products."""
        return top_candidates(self.scores(context), context.budget)

    def scores(self, context: SelectionContext) -> torch.Tensor:
        """Each token's part in the attention-weighted fourth root of the sensitivity, mean over layers."""
        attention = per_layer_share(context.question_attention()).cpu()
        if context.history is not None:
            attention = attention + _WEIGHT * context.history / context.history.sum().clamp(min=1.0)
        return (attention * context.sensitivity.cpu() ** SENSITIVITY_EXPONENT).mean(dim=0)
