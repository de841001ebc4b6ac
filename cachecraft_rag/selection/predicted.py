"""The tokens that the question looks at, weighted by how far their values are predicted to be off."""

from __future__ import annotations

import torch

from cachecraft_rag.selection.base import SelectionContext, per_layer_share, top_candidates


class Predicted:
    """Question attention times predicted deviation, per layer, layers added up.

    The deviation of every token is predicted by a regressor of the model that ``cachecraft calibrate`` fits, from what
    is known without running the model: stored sensitivity, place, key norm and the like. Only the question's own
    tokens run before the choice is made.
    """

    name = "predicted"
    needs_sensitivity = True

    def select(self, context: SelectionContext) -> torch.Tensor:
        """The budget's share of tokens by the summed products."""
        return top_candidates(self.scores(context), context.budget)

    def scores(self, context: SelectionContext) -> torch.Tensor:
        """Each token's part in the attention-weighted relative change of the values, mean over layers.

        Raises:
            ValueError: There is no regressor for the model.
        """
        if context.predicted_deviation is None:
            raise ValueError("policy: 'predicted' needs a regressor of the model; `cachecraft calibrate` fits it")
        attention = per_layer_share(context.question_attention()).cpu()
        return (attention * context.predicted_deviation().cpu()).mean(dim=0)
