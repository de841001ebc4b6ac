"""Lets PyTorch's workers of a thread go, when that thread has nothing to compute for a while.

Every thread that computes with PyTorch on a CPU keeps a team of OpenMP workers as long as it lives. As soon as there
are more of them in a process than cores, GNU OpenMP lets all workers sleep between two operations instead of waiting
awake (``gomp_managed_threads`` in its ``wait.h``), and waking them up costs more than small operations take: with the
workers of one idle thread about, decoding took 1.4 times as long. OpenMP 5.0 has a call that ends the workers of the
calling thread; the next operation starts new ones in a tenth of a millisecond.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft: what threads have set stays


def release_workers() -> bool:
    """End the workers of the calling thread; whether there is a way to (GNU OpenMP of GCC 9 or newer)."""
    pause = _pause()
    return pause is not None and pause(_SOFT) == 0


@cache
def _pause() -> Callable[[int], int] | None:
    for file in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        pause: Callable[[int], int] | None = getattr(ctypes.CDLL(str(file)), "omp_pause_resource_all", None)
        if pause is not None:
            return pause
    return None
