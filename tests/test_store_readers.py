"""Files and bytes of stored entries: read whatever happens to them, and held no longer than needed."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.lazy import LazyKV
from cachecraft_rag.store.readers import BytesReader, FileReader, open_file
from tests import codec_entries
from tests.codec_entries import KEY, MASTER, assert_same

LAYERS = 3
SEALS = pytest.mark.parametrize("master_key", [None, MASTER], ids=["plain", "encrypted"])


def entry(num_tokens: int = 70, seed: int = 0) -> ChunkKV:
    return codec_entries.entry(num_tokens, head_dim=8, seed=seed, num_layers=LAYERS)


def files_open_below(folder: Path) -> int:
    """How many descriptors of this process belong to files below a folder."""
    found = Path("/proc/self/fd")
    if not found.is_dir():
        pytest.skip("needs /proc")
    links = [os.readlink(link) for link in found.iterdir() if link.is_symlink()]
    return sum(link.startswith(str(folder)) for link in links)


def written(folder: Path, shards: list[bytes]) -> list[Path]:
    paths = [folder / f"{index}.kv" for index in range(len(shards))]
    for path, shard in zip(paths, shards, strict=True):
        path.write_bytes(shard)
    return paths


@SEALS
def test_a_file_that_is_deleted_while_it_is_open_still_reads(tmp_path: Path, master_key: bytes | None) -> None:
    codec = EntryCodec(master_key=master_key)
    paths = written(tmp_path, codec.encode(KEY, entry(1100)))
    lazy = codec.open(KEY, [open_file(path) for path in paths])
    lazy.read(0)
    for path in paths:
        path.unlink()
    assert_same(lazy.complete(), entry(1100))


def test_a_file_that_is_cut_off_while_it_is_open_is_refused(tmp_path: Path) -> None:
    codec = EntryCodec()
    (path,) = written(tmp_path, codec.encode(KEY, entry()))
    lazy = codec.open(KEY, [FileReader(path)])
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(CorruptEntryError, match="truncated"):
        lazy.layer(LAYERS - 1)


def test_files_are_closed_when_the_last_layer_is_read(tmp_path: Path) -> None:
    codec = EntryCodec()
    paths = written(tmp_path, codec.encode(KEY, entry(1100)))
    lazy = codec.open(KEY, [FileReader(path) for path in paths])
    for layer_idx in range(LAYERS):
        assert files_open_below(tmp_path) == 2
        lazy.read(layer_idx)
    assert files_open_below(tmp_path) == 0
    assert_same(lazy.complete(), entry(1100))


def test_files_are_closed_when_an_entry_is_dropped_closed_or_damaged(tmp_path: Path) -> None:
    codec = EntryCodec()
    paths = written(tmp_path, codec.encode(KEY, entry(1100)))

    def open_it() -> LazyKV:
        return codec.open(KEY, [FileReader(path) for path in paths], on_read=lambda nbytes, seconds: None)

    gc.disable()  # dropping the last reference must be enough
    try:
        lazy = open_it()
        lazy.read(0)
        assert files_open_below(tmp_path) == 2
        del lazy
        assert files_open_below(tmp_path) == 0
        lazy = open_it()
        lazy.close()
        lazy.close()
        assert files_open_below(tmp_path) == 0
        paths[1].write_bytes(b"junk")
        with pytest.raises(CorruptEntryError):
            open_it()
        assert files_open_below(tmp_path) == 0
    finally:
        gc.enable()


def test_bytes_in_memory_are_let_go_of_when_the_last_layer_is_read() -> None:
    codec = EntryCodec()
    readers = [BytesReader(shard) for shard in codec.encode(KEY, entry())]
    assert readers[0].read_at(0, 4).readonly
    assert bytes(readers[0].read_at(0, 4)) == b"CCKV"
    codec.open(KEY, readers).complete()
    assert bytes(readers[0].read_at(0, 4)) == b""


def test_a_file_gives_what_there_is_of_a_piece_in_memory_of_its_own(tmp_path: Path) -> None:
    (path,) = written(tmp_path, [bytes(range(100))])
    reader = FileReader(path)
    assert reader.size == 100
    assert [bytes(reader.read_at(at, 10)) for at in (0, 95, 200)] == [bytes(range(10)), bytes(range(95, 100)), b""]
    piece = reader.read_at(5, 1)
    piece[0] = 99
    assert bytes(reader.read_at(5, 1)) == b"\x05"
