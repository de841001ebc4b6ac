"""The attention function that is registered with transformers, and what it must know of the pass that runs.

A name without a mask function makes transformers skip mask building, so the positions decide what every row sees.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from cachecraft_rag.attention import (
    BlockAttention,
    QueryBlock,
    attend,
    attend_with_mass,
    attention_mass,
    plan_blocks,
    sdpa_block,
)
from cachecraft_rag.attention_record import AttentionObserver
from cachecraft_rag.model_cache import EndOfForward
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.sparse_attention import SparseKeys

ATTENTION_NAME = "cachecraft"

_active = threading.local()


@dataclass(eq=False)
class RowPass:
    """A forward pass over some rows of one prompt.

    Attributes:
        positions: ``[num_rows]`` int64 on the CPU, strictly increasing.
        windows: Sliding window per layer.
        base: ``"sdpa"`` or ``"eager"``: whose numbers to give.
        observe: Called in every layer, in order, before its attention.
        sparse: Chooses the keys that are read; ``None`` reads all.
        every_row: Whether the logits of all rows are wanted, not only those of the last.
        calls: Layers that have computed their attention.
    """

    positions: torch.Tensor
    windows: tuple[int | None, ...]
    base: str
    observe: AttentionObserver | None = None
    sparse: SparseKeys | None = None
    every_row: bool = False
    calls: int = 0
    _blocks: dict[int | None, list[QueryBlock]] = field(default_factory=dict)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kernel: BlockAttention,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention of one layer; ``query`` ``[1, num_heads, num_rows, head_dim]``."""
        window = self._next_window()
        if self.observe is not None:
            self.observe(query, key, self.positions, window, scaling, softcap)
        if self.sparse is not None:
            blocks = self._blocks_of(self.positions, window)
            return self.sparse.attend(query, key, value, blocks, kernel, scaling, softcap)
        if self.reads_last():
            last = attend(query[:, :, -1:], key, value, plan_blocks(self.positions[-1:], window), kernel)
            return F.pad(last, (0, 0, 0, 0, query.shape[2] - 1, 0))
        return attend(query, key, value, self._blocks_of(self.positions, window), kernel)

    def reads_last(self) -> bool:
        """Whether only the last of several rows is read from now on: the last layer has all keys it needs."""
        return not self.every_row and self.calls == len(self.windows) and self.positions.numel() > 1

    def _next_window(self) -> int | None:
        window = self.windows[self.calls] if self.calls < len(self.windows) else None
        self.calls += 1
        return window

    def _blocks_of(self, positions: torch.Tensor, window: int | None) -> list[QueryBlock]:
        if window not in self._blocks:
            self._blocks[window] = plan_blocks(positions, window, allow_causal=self.base == "sdpa")
        return self._blocks[window]


@dataclass(eq=False)
class RecordingPass(RowPass):
    """A forward pass that is run for the attention that its last rows pay; it ends with the last layer's.

    Attributes:
        record_from: First of the rows whose attention is wanted.
        masses: What they pay to every position, summed over heads and rows, ``[positions[-1] + 1]`` float32 per layer.
    """

    record_from: int = 0
    masses: list[torch.Tensor] = field(default_factory=list)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kernel: BlockAttention,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention of one layer; ``query`` ``[1, num_heads, num_rows, head_dim]``.

        Raises:
            EndOfForward: It was the last layer: what comes behind is of no use here.
        """
        window = self._next_window()
        before, wanted = query[:, :, : self.record_from], query[:, :, self.record_from :]
        places = self.positions[self.record_from :]
        if self.base != "sdpa" or self.calls == len(self.windows):
            self.masses.append(attention_mass(wanted, key, places, window, scaling, softcap))
            if self.calls == len(self.windows):
                raise EndOfForward
            return attend(query, key, value, self._blocks_of(self.positions, window), kernel)
        blocks = self._blocks_of(self.positions[: self.record_from], window)
        outputs = [attend(before, key, value, blocks, kernel)] if blocks else []
        output, mass = attend_with_mass(wanted, key, value, places, window, scaling)
        self.masses.append(mass)
        return torch.cat([*outputs, output], dim=1)


@dataclass(eq=False)
class BatchPass:
    """A forward pass over the next row of several prompts, each over its own buffer.

    Attributes:
        kvs: The buffers; their ``length`` is the position of the row.
        windows: Sliding window per layer.
        base: As in ``RowPass``.
        observers: As ``RowPass.observe``, one per prompt.
        calls: Layers that have computed their attention.
    """

    kvs: Sequence[PromptKV]
    windows: tuple[int | None, ...]
    base: str
    observers: Sequence[AttentionObserver | None]
    calls: int = 0

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kernel: BlockAttention,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention of one layer; ``query`` ``[num_prompts, num_heads, 1, head_dim]``, keys and values unused."""
        layer_idx = self.calls
        self.calls += 1
        window = self.windows[layer_idx]
        outputs = []
        for index, (kv, observe) in enumerate(zip(self.kvs, self.observers, strict=True)):
            row, end = query[index : index + 1], kv.length + 1
            keys, values = kv.keys[layer_idx], kv.values[layer_idx]
            if observe is not None:
                observe(row, keys[:, :, :end], torch.tensor([kv.length]), window, scaling, softcap)
            block = QueryBlock((0, 1), (0 if window is None else max(0, end - window), end), visible=None)
            outputs.append(attend(row, keys, values, [block], kernel))
        return torch.cat(outputs)


def set_pass(context: RowPass | BatchPass | None) -> None:
    """Have the attention function compute for this pass on this thread; ``None`` when it is over."""
    _active.context = context


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in transformers' signature."""
    context: RowPass | BatchPass | None = getattr(_active, "context", None)
    if context is None:
        raise RuntimeError(
            "the model is running inside a CacheCraftEngine on another thread; call it through the engine, or load a "
            "second copy of the model"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if context.base == "sdpa":

        def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: QueryBlock) -> torch.Tensor:
            return sdpa_block(q, k, v, block, scale)

    else:
        eager = sys.modules[type(module).__module__].eager_attention_forward  # each architecture brings its own

        def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: QueryBlock) -> torch.Tensor:
            bias = block.bias(q.dtype, q.device)
            output: torch.Tensor = eager(module, q, k, v, bias, scaling=scale, dropout=0.0, **options)[0]
            return output

    return context.attend(query, key, value, kernel, scale, options.get("softcap")), None


AttentionInterface.register(ATTENTION_NAME, _attend)
