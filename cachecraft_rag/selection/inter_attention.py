"""The tokens that paid most attention to the chunks that their KV was made behind (Cache-Craft)."""

from __future__ import annotations

import torch

from cachecraft_rag.selection.base import SelectionContext, top_candidates


class InterAttention:
    """Cache-Craft (arXiv 2502.15734): what a token took from other chunks is what may be wrong behind others.

    KV that was made alone has no record; its first tokens are taken, which had nothing but themselves to attend to.
    """

    name = "inter_attention"
    needs_sensitivity = False

    def select(self, context: SelectionContext) -> torch.Tensor:
        """The tokens of highest recorded attention, in every chunk as many as its CFO says."""
        paid = context.inter_attention
        if paid is None:
            paid = torch.zeros(context.positions.numel())
        if context.chunk_budgets is None:
            return top_candidates(paid, context.budget)
        chosen = []
        for chunk, budget in enumerate(context.chunk_budgets):
            inside = (context.chunk_index == chunk).nonzero().squeeze(1)
            chosen.append(inside[top_candidates(paid[inside], budget)])
        return torch.cat(chosen)
