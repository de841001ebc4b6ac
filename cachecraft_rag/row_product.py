"""Linear layers on one row: what a decoding step consists of, and the logits behind every prefill.

PyTorch hands a linear layer with one row to its kernel for matrices. In bfloat16 on a CPU that kernel reads the weights
at half to three quarters of the memory's bandwidth, where the product of a matrix and a vector comes close to it.
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
_PROBE_SHAPE = (4096, 1024)  # 8 MiB: more than a core's cache holds, and read in less than a millisecond
_PROBES = 5
_CLEARLY = 0.9  # both round alike, so what is no gain is left as PyTorch has it


class RowProducts:
    """The linear layers of a model, for passes in which they multiply one row by a vector product.

    Args:
        model: The model. Layers of other types (quantised ones), in other dtypes or on other devices, and those whose
            ``forward`` somebody else has replaced, are left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if type(module) is nn.Linear and _is_plain(module.weight)]
        self._layers = layers if layers and _pays() else []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have the layers use it; outside of this the model is as it was. One thread at a time."""
        taken = [layer for layer in self._layers if "forward" not in layer.__dict__]
        try:
            for layer in taken:
                layer.__dict__["forward"] = partial(row_product, layer)  # past Module.__setattr__, which takes its time
            yield
        finally:
            for layer in taken:
                layer.__dict__.pop("forward", None)


def row_product(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """What ``layer`` makes of ``rows`` ``[..., in_features]``: ``[..., out_features]``; one row by a vector product."""
    weight, bias = layer.weight, cast("torch.Tensor | None", layer.bias)
    if rows.numel() != weight.shape[1] or rows.dtype != weight.dtype or not _is_plain(weight):
        return F.linear(rows, weight, bias)
    row = rows.reshape(-1)
    output = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
    return output.view(*rows.shape[:-1], -1)


def _is_plain(weight: torch.Tensor) -> bool:
    return type(weight) in _PLAIN and weight.is_cpu and weight.dtype == torch.bfloat16


@cache
def _pays() -> bool:
    """Whether the vector product is the quicker one here: that depends on processor and release. Measured once."""
    weight, row = torch.ones(_PROBE_SHAPE, dtype=torch.bfloat16), torch.ones(_PROBE_SHAPE[1], dtype=torch.bfloat16)
    kernels: tuple[Callable[..., Any], ...] = (lambda: torch.mv(weight, row), lambda: F.linear(row[None], weight))
    best = [float("inf")] * len(kernels)
    for _ in range(_PROBES):
        for index, kernel in enumerate(kernels):
            started = time.perf_counter()
            kernel()
            best[index] = min(best[index], time.perf_counter() - started)
    return best[0] < _CLEARLY * best[1]
