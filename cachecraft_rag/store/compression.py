"""Lossless compression of a shard's tensors: byte planes side by side, then zstd.

The high bytes of 16-bit floats (sign and exponent) repeat, the low bytes are close to noise. Taken apart, each plane
gets a code of its own: first all first bytes of a tensor's numbers, then all second bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import zstandard

MAX_LEVEL = zstandard.MAX_COMPRESSION_LEVEL
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def compress(tensors: Iterable[tuple[memoryview, int]], level: int) -> bytes:
    """Compress tensors into one zstd frame.

    Args:
        tensors: The bytes of each tensor, and the bytes per number.
        level: Level of zstd.
    """
    planes = [_shuffled(np.frombuffer(data, dtype=np.uint8), itemsize) for data, itemsize in tensors]
    return zstandard.ZstdCompressor(level=level).compress(np.concatenate(planes).data)


def decompress(frame: memoryview, sizes: Sequence[tuple[int, int]]) -> list[_Bytes]:
    """Undo ``compress``.

    Args:
        frame: The zstd frame.
        sizes: Bytes of each tensor, and the bytes per number.

    Returns:
        The bytes of each tensor, writable.

    Raises:
        ValueError: The frame is damaged, or holds more or fewer bytes than ``sizes``.
    """
    expected = sum(nbytes for nbytes, _ in sizes)
    try:
        # The size is compared first: a frame can't make us allocate more than the header says.
        found = zstandard.frame_content_size(frame)
        if found != expected:
            raise ValueError(f"{found} compressed bytes, not {expected}")
        data = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd: {error}") from error
    ends = np.cumsum([nbytes for nbytes, _ in sizes])
    return [
        _unshuffled(data[end - nbytes : end], itemsize) for end, (nbytes, itemsize) in zip(ends, sizes, strict=True)
    ]


def _shuffled(data: _Bytes, itemsize: int) -> _Bytes:
    return np.concatenate([data[plane::itemsize] for plane in range(itemsize)])


def _unshuffled(planes: _Bytes, itemsize: int) -> _Bytes:
    data = np.empty_like(planes)
    for plane, part in enumerate(planes.reshape(itemsize, -1)):
        data[plane::itemsize] = part
    return data
