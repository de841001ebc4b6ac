"""The first tokens of every chunk (EPIC)."""

from __future__ import annotations

import torch

from cachecraft_rag.selection.base import SelectionContext


class ChunkStart:
    """EPIC's LegoLink (arXiv 2410.15332): a chunk's first tokens took the role of attention sinks; recompute them."""

    name = "chunk_start"
    needs_sensitivity = False

    def select(self, context: SelectionContext) -> torch.Tensor:
        """The same number of leading tokens of every chunk, as far as the budget goes."""
        order = torch.sort(context.offset_in_chunk, stable=True).indices
        return order[: context.budget].sort().values
