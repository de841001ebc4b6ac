"""Stored entries read layer by layer: equal to the whole, verified block by block, once, by any number of threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.errors import CorruptEntryError, StoreUnavailableError
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.lazy import LazyKV
from cachecraft_rag.store.precision import PRECISIONS
from cachecraft_rag.store.readers import BytesReader
from cachecraft_rag.store.shard import open_shard
from cachecraft_rag.store_config import Compression, Precision
from tests import codec_entries
from tests.codec_entries import KEY, MASTER, assert_same

LAYERS = 3
SEALS = pytest.mark.parametrize("master_key", [None, MASTER], ids=["plain", "encrypted"])
COMPRESSIONS = pytest.mark.parametrize("compression", ["none", "zstd"])


def entry(num_tokens: int = 70, seed: int = 0) -> ChunkKV:
    return codec_entries.entry(num_tokens, head_dim=8, seed=seed, num_layers=LAYERS)


def opened(codec: EntryCodec, shards: list[bytes], key: ChunkKey = KEY, **callbacks: Any) -> LazyKV:
    return codec.open(key, [BytesReader(shard) for shard in shards], **callbacks)


def boundaries(shard: bytes, master_key: bytes | None) -> list[int]:
    """Where preamble, length, header and every block of a shard begin, and where the last ends."""
    found = open_shard(KEY, BytesReader(shard), master_key)
    return [0, 8, 12, *accumulate(found.header.blocks, initial=found.offsets[0])]


def flipped(shard: bytes, bit: int) -> bytes:
    return shard[: bit // 8] + bytes([shard[bit // 8] ^ 1 << bit % 8]) + shard[bit // 8 + 1 :]


class CountingReader(BytesReader):
    """Counts how often each piece is read."""

    def __init__(self, shard: bytes) -> None:
        super().__init__(shard)
        self.counts: Counter[int] = Counter()

    def read_at(self, offset: int, length: int) -> memoryview:
        self.counts[offset] += 1
        time.sleep(0.001)  # lets other threads in
        return super().read_at(offset, length)


def in_threads(number: int, work: Callable[[int], object]) -> None:
    """Do something in so many threads that begin together."""
    barrier = threading.Barrier(number)

    def begin(index: int) -> None:
        barrier.wait()
        work(index)

    threads = [threading.Thread(target=begin, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("num_tokens", [70, 1100])
@SEALS
@COMPRESSIONS
@pytest.mark.parametrize("precision", PRECISIONS)
def test_layers_are_those_of_the_whole(
    precision: Precision, compression: Compression, master_key: bytes | None, num_tokens: int
) -> None:
    codec = EntryCodec(precision, compression, master_key=master_key)
    shards = codec.encode(KEY, entry(num_tokens))
    whole = codec.decode(KEY, shards)
    lazy = opened(codec, shards)
    assert (lazy.num_tokens, lazy.num_layers, lazy.base) == (num_tokens, LAYERS, 11)
    assert lazy.nbytes == sum(len(shard) for shard in shards)
    assert lazy.matches(list(whole.token_ids))
    assert not lazy.matches(whole.token_ids[1:])
    measured = entry(num_tokens).sensitivity
    assert lazy.sensitivity is not None
    assert measured is not None
    assert torch.equal(lazy.sensitivity, measured)
    for layer_idx in (2, 0, 2, 1):
        keys, values = lazy.layer(layer_idx)
        assert torch.equal(keys, whole.keys[layer_idx])
        assert torch.equal(values, whole.values[layer_idx])
    assert_same(lazy.complete(), whole)
    assert torch.equal(lazy.layer(1)[0], whole.keys[1])


def test_opening_reads_headers_and_the_sensitivity_only() -> None:
    codec = EntryCodec("int4")
    readers = [CountingReader(shard) for shard in codec.encode(KEY, entry(1100))]
    lazy = codec.open(KEY, readers)
    assert lazy.sensitivity is not None
    assert not lazy.is_read
    assert [sorted(reader.counts) for reader in readers] == [[0, 12], [0, 12]]


@SEALS
@COMPRESSIONS
def test_every_flipped_bit_is_refused_where_it_matters(compression: Compression, master_key: bytes | None) -> None:
    codec = EntryCodec("int8", compression, master_key=master_key)
    (shard,) = codec.encode(KEY, entry(2))
    ends = boundaries(shard, master_key)
    for bit in range(8 * ends[3]):
        with pytest.raises(CorruptEntryError):
            opened(codec, [flipped(shard, bit)])
    for layer_idx in range(LAYERS):
        for bit in range(8 * ends[3 + layer_idx], 8 * ends[4 + layer_idx]):
            lazy = opened(codec, [flipped(shard, bit)])
            for other in range(layer_idx):
                lazy.read(other)
            with pytest.raises(CorruptEntryError, match=f"layer {layer_idx}"):
                lazy.read(layer_idx)


@SEALS
@COMPRESSIONS
def test_a_shard_cut_off_anywhere_or_longer_is_refused_when_it_is_opened(
    compression: Compression, master_key: bytes | None
) -> None:
    codec = EntryCodec("int4", compression, master_key=master_key)
    (shard,) = codec.encode(KEY, entry())
    for end in boundaries(shard, master_key):
        for cut in {end - 1, end, end + 1} & set(range(len(shard))):
            with pytest.raises(CorruptEntryError):
                opened(codec, [shard[:cut]])
    for more in (b"\0", bytes(64), shard):
        with pytest.raises(CorruptEntryError, match="something was added"):
            opened(codec, [shard + more])


@SEALS
def test_blocks_of_other_layers_shards_versions_and_keys_are_refused(master_key: bytes | None) -> None:
    codec = EntryCodec(master_key=master_key)
    shards = codec.encode(KEY, entry(2048))
    later = codec.encode(KEY, entry(2048, seed=1))
    other = codec.encode(replace(KEY, chunk="b" * 32), entry(2048, seed=2))
    ends = boundaries(shards[0], master_key)
    block = slice(ends[3], ends[4])
    foreign = {
        "layer": shards[0][ends[4] : ends[5]],
        "shard": shards[1][block],
        "version": later[0][block],
        "entry": other[0][block],
    }
    if master_key is not None:
        foreign["key"] = codec.encode(replace(KEY, context="c" * 32), entry(2048))[0][block]
    for name, content in foreign.items():
        assert len(content) == ends[4] - ends[3], name
        swapped = shards[0][: ends[3]] + content + shards[0][ends[4] :]
        lazy = opened(codec, [swapped, shards[1]])
        lazy.read(1)
        with pytest.raises(CorruptEntryError, match="layer 0"):
            lazy.read(0)


def test_a_medium_that_refuses_is_damage() -> None:
    class FailingReader(CountingReader):
        def read_at(self, offset: int, length: int) -> memoryview:
            if offset > 12:
                raise OSError(5, "Input/output error")
            return super().read_at(offset, length)

    codec, reports = EntryCodec(), []
    readers = [FailingReader(shard) for shard in codec.encode(KEY, entry())]
    lazy = codec.open(KEY, readers, on_corrupt=lambda: reports.append("corrupt"))
    with pytest.raises(CorruptEntryError, match="Input/output error"):
        lazy.layer(0)
    assert reports == ["corrupt"]


@pytest.mark.parametrize("use", ["read", "layer", "complete"])
def test_threads_read_each_layer_once_and_one_of_them_reports_it(use: str) -> None:
    codec, reports = EntryCodec("int8", "zstd", master_key=MASTER), []
    readers = [CountingReader(shard) for shard in codec.encode(KEY, entry(1100))]
    lazy = codec.open(KEY, readers, on_read=lambda nbytes, seconds: reports.append((nbytes, seconds)))
    results: list[object] = []

    def work(index: int) -> None:
        if use == "complete":
            results.append(lazy.complete())
        else:
            for step in range(LAYERS):
                results.append(getattr(lazy, use)((index + step) % LAYERS))

    in_threads(8, work)
    assert len(results) == 8 * (1 if use == "complete" else LAYERS)
    assert all(set(reader.counts.values()) == {1} and len(reader.counts) == 2 + LAYERS for reader in readers)
    assert lazy.is_read
    ((nbytes, seconds),) = reports
    assert nbytes == lazy.nbytes
    assert 0 < seconds < 60
    assert_same(lazy.complete(), codec.decode(KEY, codec.encode(KEY, entry(1100))))
    assert lazy.complete() is lazy.complete()
    assert len(reports) == 1


def test_damage_is_reported_once_before_anyone_learns_of_it_and_raised_every_time() -> None:
    codec, reports, early = EntryCodec(), [], []
    (shard,) = codec.encode(KEY, entry())
    damaged = flipped(shard, 8 * (boundaries(shard, None)[4] + 5))  # layer 1
    reporting = threading.Event()

    def report() -> None:
        reporting.wait(0.05)  # nobody sets it: others get the time to raise too early
        reports.append("corrupt")

    lazy = opened(codec, [damaged], on_corrupt=report, on_read=lambda nbytes, seconds: reports.append("read"))
    lazy.read(0)

    def work(index: int) -> None:
        with pytest.raises(CorruptEntryError, match="layer 1"):
            lazy.read(1)
        early.append(not reports)

    in_threads(8, work)
    for use in (lambda: lazy.read(0), lambda: lazy.layer(0), lambda: lazy.layer(2), lazy.complete):
        with pytest.raises(CorruptEntryError, match="layer 1"):
            use()
    assert reports == ["corrupt"]
    assert early == [False] * 8


def test_what_was_read_before_closing_stays_and_the_rest_is_gone() -> None:
    codec, reports = EntryCodec("int4"), []
    shards = codec.encode(KEY, entry())
    lazy = opened(codec, shards, on_corrupt=lambda: reports.append("corrupt"))
    lazy.read(1)
    lazy.close()
    assert torch.equal(lazy.layer(1)[0], codec.decode(KEY, shards).keys[1])
    for use in (lambda: lazy.read(0), lambda: lazy.layer(2), lazy.complete):
        with pytest.raises(StoreUnavailableError, match="closed before layer"):
            use()
    assert reports == []


def test_reading_a_layer_does_no_arithmetic_of_torch_only_views() -> None:
    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.names: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    for precision, compression, master_key in product(PRECISIONS, ("none", "zstd"), (None, MASTER)):
        codec = EntryCodec(precision, compression, master_key=master_key)  # type: ignore[arg-type]
        lazy = opened(codec, codec.encode(KEY, entry(1100)))
        with Recorder() as recorder:
            lazy.read(0)
        assert recorder.names == {"aten::view", "aten::unsqueeze", "aten::detach", "aten::lift_fresh"}


@pytest.mark.parametrize("layer_idx", [-1, LAYERS])
def test_a_layer_that_there_is_not_is_refused(layer_idx: int) -> None:
    codec = EntryCodec()
    lazy = opened(codec, codec.encode(KEY, entry()))
    with pytest.raises(ValueError, match=f"layer_idx: {layer_idx} is not in 0 to 2"):
        lazy.read(layer_idx)
    with pytest.raises(ValueError, match="layer_idx"):
        lazy.layer(layer_idx)


def test_shards_of_different_kinds_are_refused_though_they_claim_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachecraft_rag.store.codec.digest", lambda *parts: "0" * 32)
    long = entry(1100)
    narrow = ChunkKV(long.keys[..., :4], long.values, long.token_ids, long.base, long.sensitivity)
    codec = EntryCodec()
    first, second = codec.encode(KEY, long)[0], codec.encode(KEY, narrow)[1]
    with pytest.raises(CorruptEntryError, match="shard 1 is of another kind"):
        opened(codec, [first, second])
