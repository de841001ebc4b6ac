"""The policies that look at nothing: recompute no token, or every one."""

from __future__ import annotations

import torch

from cachecraft_rag.selection.base import SelectionContext


class NoTokens:
    """Reuse every stored chunk as it is, only moved to its position."""

    name = "none"
    needs_sensitivity = False

    def select(self, context: SelectionContext) -> torch.Tensor:
        """Nothing."""
        return torch.empty(0, dtype=torch.long)


class AllTokens:
    """Recompute every token: equals a full prefill."""

    name = "all"
    needs_sensitivity = False

    def select(self, context: SelectionContext) -> torch.Tensor:
        """Everything, whatever the budget."""
        return torch.arange(context.positions.numel())
