"""Linear layers of a forward pass, without what nobody reads, and quicker on few rows.

Behind the last layer's attention only the logits of the last row are wanted, so what its projection and its MLP make of
all others is for nothing. And PyTorch hands a linear layer with one row, which is what a decoding step consists of, to
its kernel for matrices. In bfloat16 on a CPU that kernel reads the weights at half to three quarters of the memory's
bandwidth, where the product of a matrix and a vector comes close to it. A few rows, those of a batch or of a question,
are quicker as the transpose of the weights' product with theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

_PLAIN: tuple[type, ...] = (nn.Parameter, torch.Tensor)  # types made from them have products of their own
_Forward = Callable[[torch.Tensor], torch.Tensor]
_PROBE_SHAPE = (2048, 2048)  # 8 MiB: more than a core's cache holds, and read in less than a millisecond
_PROBES = 5
_FEW = 48  # beyond, the transposes take what the product saves
_PROBED = 16  # rows that stand for a few
_CLEARLY = 0.9  # both round alike, so what is no gain is left as PyTorch has it


class LinearRows:
    """The linear layers of a model, for passes that leave out rows or have only few.

    Args:
        model: The model. Layers of other types (quantised ones) and those whose ``forward`` somebody else has replaced
            are left alone, and so are all where a part of the model is compiled: it would be compiled anew.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [] if any(map(_is_compiled, model.modules())) else list(model.modules())
        linear = [module for module in modules if type(module) is nn.Linear]
        self._layers = [layer for layer in linear if type(layer.weight) in _PLAIN]
        quick = [layer for layer in self._layers if _has_quicker(layer.weight)]
        quick = quick if quick and (_pays(1) or _pays(_PROBED)) else []
        self._quick: list[tuple[nn.Linear, _Forward]] = [(layer, partial(row_product, layer)) for layer in quick]

    @contextmanager
    def active(self, num_rows: int = 1, reads_last: Callable[[], bool] | None = None) -> Iterator[None]:
        """Have the layers work that way; outside of this the model is as it was. One thread at a time.

        Args:
            num_rows: Rows of the pass.
            reads_last: Whether only the last of them is read of all that is computed from the moment of the call on;
                ``None`` when all are.
        """
        forwards = self._quick
        if reads_last is not None and num_rows > 1:
            forwards = [(layer, partial(_forward, layer, (1, num_rows), reads_last)) for layer in self._layers]
        taken = [(layer, forward) for layer, forward in forwards if "forward" not in layer.__dict__]
        try:
            for layer, forward in taken:
                layer.__dict__["forward"] = forward  # past Module.__setattr__, which takes its time
            yield
        finally:
            for layer, _ in taken:
                layer.__dict__.pop("forward", None)


def _forward(
    layer: nn.Linear, shape: tuple[int, int], reads_last: Callable[[], bool], rows: torch.Tensor
) -> torch.Tensor:
    if rows.shape[:-1] != shape or not reads_last():
        return row_product(layer, rows)
    last = row_product(layer, rows[:, -1:])
    return F.pad(last, (0, 0, shape[1] - 1, 0))  # not expanded: models may write into it


def row_product(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """What ``layer`` makes of ``rows`` ``[..., in_features]``: ``[..., out_features]``, in the quickest way."""
    weight, bias = layer.weight, cast("torch.Tensor | None", layer.bias)
    width = weight.shape[1]
    num_rows = rows.numel() // width if rows.shape[-1] == width and rows.dtype == weight.dtype else 0
    if not (0 < num_rows <= _FEW and _has_quicker(weight) and _pays(1 if num_rows == 1 else _PROBED)):
        return F.linear(rows, weight, bias)
    if num_rows == 1:
        row = rows.reshape(-1)
        output = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
    else:
        columns = rows.reshape(num_rows, width).t()
        product = torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)
        output = product.t().contiguous()  # what comes next is slower on transposed rows
    return output.view(*rows.shape[:-1], -1)


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` made it, or ``module.compile()`` was called."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _has_quicker(weight: torch.Tensor) -> bool:
    return type(weight) in _PLAIN and weight.is_cpu and weight.dtype == torch.bfloat16


@cache
def _pays(num_rows: int) -> bool:
    """Whether PyTorch's own way is the slower one here: that depends on processor and release. Measured once."""
    weight = torch.ones(_PROBE_SHAPE, dtype=torch.bfloat16)
    rows = torch.ones(num_rows, _PROBE_SHAPE[1], dtype=torch.bfloat16)
    kernels: tuple[Callable[..., Any], ...] = (
        lambda: torch.mv(weight, rows[0]) if num_rows == 1 else torch.mm(weight, rows.t()).t().contiguous(),
        lambda: F.linear(rows, weight),
    )
    best = [float("inf")] * len(kernels)
    for _ in range(_PROBES):
        for index, kernel in enumerate(kernels):
            started = time.perf_counter()
            kernel()
            best[index] = min(best[index], time.perf_counter() - started)
    return best[0] < _CLEARLY * best[1]
