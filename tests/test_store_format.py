"""Layout of a stored shard: what stands where, and that nothing else is taken for it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.store import format as shard_format
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.compression import compress, decompress
from cachecraft_rag.store_config import Compression
from tests.codec_entries import COMPRESSIONS, KEY, MASTER, assert_same, entry

PREAMBLE_BYTES = 8
START_BYTES = 12


def header_block(shard: bytes) -> tuple[bytes, bytes]:
    """Content of a plain shard's header block, and what follows the block."""
    (length,) = struct.unpack_from("<I", shard, PREAMBLE_BYTES)
    return shard[START_BYTES : START_BYTES + length - 16], shard[START_BYTES + length :]


def with_header(preamble: bytes, content: bytes, blocks: bytes = b"") -> bytes:
    """A plain shard with a header block whose checksum is right."""
    start = preamble + struct.pack("<I", len(content) + 16)
    return start + content + xxhash.xxh3_128_digest(start + content) + blocks


def header_of(shard: bytes) -> dict[str, Any]:
    """The header of a plain shard."""
    content, _ = header_block(shard)
    (length,) = struct.unpack_from("<I", content)
    header = json.loads(content[4 : 4 + length])
    assert isinstance(header, dict)
    return header


def resealed(shard: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A plain shard with another header and a checksum that is right: what only a forger or a bug would write."""
    content, blocks = header_block(shard)
    (length,) = struct.unpack_from("<I", content)
    header = header_of(shard)
    change(header)
    text = json.dumps(header).encode()
    return with_header(shard[:PREAMBLE_BYTES], struct.pack("<I", len(text)) + text + content[4 + length :], blocks)


@settings(max_examples=100, deadline=None)
@given(junk=st.binary(max_size=300), master_key=st.sampled_from([None, MASTER]), sealed=st.booleans())
def test_junk_is_no_entry(junk: bytes, master_key: bytes | None, sealed: bool) -> None:
    codec = EntryCodec(master_key=master_key)
    preamble = codec.encode(KEY, entry(1))[0][:PREAMBLE_BYTES]
    for shard in (junk, preamble + junk, with_header(preamble, junk) if sealed else preamble):
        with pytest.raises(CorruptEntryError):
            codec.decode(KEY, [shard])


@pytest.mark.parametrize("master_key", [None, MASTER], ids=["plain", "encrypted"])
def test_another_format_version_is_named(master_key: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = EntryCodec(master_key=master_key)
    with monkeypatch.context() as patch:
        patch.setattr(shard_format, "VERSION", 3)
        shards = codec.encode(KEY, entry())
        assert_same(codec.decode(KEY, shards), entry())
    with pytest.raises(CorruptEntryError, match="of format version 3, this release reads version 2"):
        codec.decode(KEY, shards)
    with pytest.raises(CorruptEntryError, match="of format version 1, this release reads version 2"):
        codec.decode(KEY, [b"CCKV\1\0" + shards[0][6:]])


@pytest.mark.parametrize("num_tokens", [1, 70])
def test_a_plain_shard_can_be_read_layer_by_layer_by_who_knows_its_layout(num_tokens: int) -> None:
    chunk_kv = entry(num_tokens)
    (shard,) = EntryCodec().encode(KEY, chunk_kv)
    header = header_of(shard)
    assert [(one["name"], one["dtype"], one["shape"]) for one in header["tensors"]] == [
        ("keys", "bfloat16", [2, num_tokens, 4]),
        ("values", "bfloat16", [2, num_tokens, 4]),
    ]
    at = len(shard) - sum(header["blocks"])
    for layer_idx, length in enumerate(header["blocks"]):
        block = shard[at : at + length]
        offset = 0
        for tensor in (chunk_kv.keys, chunk_kv.values):
            layer = tensor[layer_idx].contiguous().view(torch.uint8).numpy().tobytes()
            assert block[offset : offset + len(layer)] == layer
            offset += len(layer) + -len(layer) % 64
        place = struct.pack("<HII", 2, 0, layer_idx) + header["entry"].encode()
        assert block[-16:] == xxhash.xxh3_128_digest(place + block[:-16])
        assert at % 64 == 0
        at += length


def test_int4_takes_at_most_28_percent_of_bfloat16_on_the_disk_header_included() -> None:
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(30, 3, 512, 64, generator=draw).to(torch.bfloat16) for _ in range(2))
    sensitivity = torch.rand(30, 512, generator=draw).to(torch.float16)
    chunk_kv = ChunkKV(keys, values, tuple(range(40_000, 40_512)), 11, sensitivity)
    for master_key in (None, MASTER):
        (shard,) = EntryCodec("int4", master_key=master_key).encode(KEY, chunk_kv)
        assert len(shard) <= 0.28 * (keys.nbytes + values.nbytes)


FORGERIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "field missing": lambda header: header.pop("base"),
    "unknown field": lambda header: header.update(more=1),
    "text for a number": lambda header: header.update(base="far"),
    "no token ids": lambda header: header.update(token_ids=[]),
    "token ids too few": lambda header: header["token_ids"].pop(),
    "another precision": lambda header: header.update(precision="int4"),
    "unknown precision": lambda header: header.update(precision="int2"),
    "another dtype": lambda header: header.update(dtype="float16"),
    "another head dimension": lambda header: header.update(key_dim=8),
    "tensor missing": lambda header: header["tensors"].pop(0),
    "tensor twice": lambda header: header["tensors"].append(header["tensors"][0]),
    "tensor renamed": lambda header: header["tensors"][0].update(name="queries"),
    "tensor too large": lambda header: header["tensors"][0].update(shape=[2, 5, 2**40]),
    "tensor too small": lambda header: header["tensors"][0].update(shape=[1, 5, 4]),
    "negative size": lambda header: header["tensors"][0].update(shape=[2, 5, -4]),
    "unknown dtype": lambda header: header["tensors"][0].update(dtype="int128"),
    "fewer dimensions": lambda header: header["tensors"][0].update(shape=[40]),
    "sensitivity among the tensors": lambda header: header["tensors"].append(header["sensitivity"]),
    "sensitivity of other tokens": lambda header: header["sensitivity"].update(shape=[2, 4]),
    "sensitivity too large": lambda header: header["sensitivity"].update(shape=[2, 2**40]),
    "no layers": lambda header: header.update(blocks=[]),
    "a layer more": lambda header: header["blocks"].append(0),
    "a longer block": lambda header: header["blocks"].append(header["blocks"].pop() + 1),
    "blocks of other lengths": lambda header: header["blocks"].__setitem__(
        slice(None), [header["blocks"][0] - 64, header["blocks"][1] + 64]
    ),
    "negative length": lambda header: header.update(blocks=[-64, sum(header["blocks"]) + 64]),
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_header_that_makes_no_sense_is_refused_though_its_checksum_is_right(
    forgery: str, compression: Compression
) -> None:
    codec = EntryCodec("k16v8", compression)
    (shard,) = codec.encode(KEY, entry())
    if compression == "none":
        assert_same(codec.decode(KEY, [resealed(shard, lambda header: None)]), codec.decode(KEY, [shard]))
    with pytest.raises(CorruptEntryError):
        codec.decode(KEY, [resealed(shard, FORGERIES[forgery])])


def test_float_planes_are_compressed_apart_and_so_better() -> None:
    chunk_kv = entry(512, head_dim=64)
    plain = len(EntryCodec().encode(KEY, chunk_kv)[0])
    shuffled = len(EntryCodec(compression="zstd").encode(KEY, chunk_kv)[0])
    unshuffled = len(zstandard.compress(EntryCodec().encode(KEY, chunk_kv)[0], 3))
    assert shuffled < 0.8 * plain
    assert shuffled < 0.96 * unshuffled


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from([1, 2, 4, 8]), st.binary(min_size=160, max_size=160)), min_size=1
    )
)
def test_compressing_loses_nothing(items: list[tuple[int, int, bytes]]) -> None:
    tensors = [(memoryview(data[: count * itemsize]), itemsize) for count, itemsize, data in items]
    sizes = [(len(data), itemsize) for data, itemsize in tensors]
    arrays = decompress(memoryview(compress(tensors, 3)), sizes)
    assert [array.tobytes() for array in arrays] == [bytes(data) for data, _ in tensors]


def test_a_frame_of_another_size_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.compress(bytes(2**26))
    with pytest.raises(ValueError, match=r"67108864 compressed bytes, not 8"):
        decompress(memoryview(bomb), [(8, 2)])
