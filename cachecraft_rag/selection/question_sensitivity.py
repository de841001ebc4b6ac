"""The tokens that the question looks at, weighted by how much their values depend on context."""

from __future__ import annotations

import torch

from cachecraft_rag.selection.base import SelectionContext, per_layer_share, top_candidates


class QuestionSensitivity:
    """Question attention times the square root of the stored sensitivity, per layer, layers added up.

    What a wrong value does to the answer grows with the attention it gets and with how wrong it is. The second factor
    is measured once, when the chunk is stored: how much its values change behind an unrelated passage.
    """

    name = "question_sensitivity"
    needs_sensitivity = True

    def select(self, context: SelectionContext) -> torch.Tensor:
        """The budget's share of tokens by the summed products."""
        attention = per_layer_share(context.question_attention()).cpu()
        return top_candidates((attention * context.sensitivity.cpu().sqrt()).sum(dim=0), context.budget)
