"""Entries as bytes: whole, of the right key and version, or refused; unreadable without the master key."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store import codec as codec_module
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.crypto import load_master_key
from cachecraft_rag.store.precision import PRECISIONS, pack
from cachecraft_rag.store_config import Compression, Precision
from tests.codec_entries import COMPRESSIONS, KEY, MASTER, SETTING_NAMES, SETTINGS, assert_same, entry


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("compression", "master_key"), SETTINGS, ids=SETTING_NAMES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_entry_comes_back_as_its_precision_leaves_it(
    precision: Precision, compression: Compression, master_key: bytes | None, dtype: torch.dtype
) -> None:
    chunk_kv = entry(70, dtype, head_dim=5)
    codec = EntryCodec(precision, compression, master_key=master_key)
    shards = codec.encode(KEY, chunk_kv)
    assert_same(codec.decode(KEY, shards), pack(chunk_kv, precision).unpack())
    assert_same(codec.decode(KEY, [memoryview(bytearray(shard)) for shard in shards]), codec.decode(KEY, shards))


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 130),
    head_dim=st.integers(1, 70),
    precision=st.sampled_from(PRECISIONS),
    variant=st.sampled_from(SETTINGS),
    measured=st.booleans(),
    namespace=st.text(),
)
def test_any_shape_and_namespace_comes_back(
    num_tokens: int,
    head_dim: int,
    precision: Precision,
    variant: tuple[Compression, bytes | None],
    measured: bool,
    namespace: str,
) -> None:
    chunk_kv = entry(num_tokens, head_dim=head_dim)
    if not measured:
        chunk_kv = replace(chunk_kv, sensitivity=None)
    key = replace(KEY, namespace=namespace)
    codec = EntryCodec(precision, variant[0], master_key=variant[1])
    assert_same(codec.decode(key, codec.encode(key, chunk_kv)), pack(chunk_kv, precision).unpack())


@pytest.mark.parametrize("master_key", [None, MASTER], ids=["plain", "encrypted"])
def test_a_namespace_of_lone_surrogates_is_a_namespace(master_key: bytes | None) -> None:
    codec, key = EntryCodec(master_key=master_key), replace(KEY, namespace="\ud800 x")
    assert_same(codec.decode(key, codec.encode(key, entry())), entry())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_2500_tokens_are_three_shards(precision: Precision) -> None:
    chunk_kv = entry(2500)
    codec = EntryCodec(precision)
    shards = codec.encode(KEY, chunk_kv)
    decoded = codec.decode(KEY, shards)
    assert len(shards) == 3
    assert (decoded.token_ids, decoded.base, decoded.num_tokens) == (chunk_kv.token_ids, 11, 2500)
    assert decoded.sensitivity is not None
    assert chunk_kv.sensitivity is not None
    assert torch.equal(decoded.sensitivity, chunk_kv.sensitivity)
    for at in (0, 1024, 2048):  # each shard is packed on its own
        tokens = slice(at, at + 1024)
        alone = ChunkKV(chunk_kv.keys[:, :, tokens], chunk_kv.values[:, :, tokens], chunk_kv.token_ids[tokens], 0)
        unpacked = pack(alone, precision).unpack()
        assert torch.equal(decoded.keys[:, :, tokens], unpacked.keys)
        assert torch.equal(decoded.values[:, :, tokens], unpacked.values)
    assert [len(EntryCodec().encode(KEY, entry(count))) for count in (1024, 1025)] == [1, 2]


def test_a_shard_of_a_wide_model_holds_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_kv = entry(300)
    bytes_per_token = (chunk_kv.keys.nbytes + chunk_kv.values.nbytes) // 300
    for limit, expected in ((bytes_per_token * 200, 2), (bytes_per_token * 100, 5), (1, 5)):  # 192, 64, 64 tokens
        monkeypatch.setattr(codec_module, "SHARD_BYTES", limit)
        shards = EntryCodec().encode(KEY, chunk_kv)
        assert len(shards) == expected
        assert_same(EntryCodec().decode(KEY, shards), chunk_kv)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_plain_bytes_are_the_same_every_time_and_encrypted_ones_never(compression: Compression) -> None:
    plain, secret = EntryCodec("int4", compression), EntryCodec("int4", compression, master_key=MASTER)
    assert plain.encode(KEY, entry(70)) == plain.encode(KEY, entry(70))
    shards = [secret.encode(KEY, entry(70))[0] for _ in range(2)]
    assert shards[0][12:24] != shards[1][12:24]
    assert shards[0][24:] != shards[1][24:]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_entry_is_unpacked_on_the_device_it_is_wanted_on(precision: Precision) -> None:
    codec = EntryCodec(precision)
    decoded = codec.decode(KEY, codec.encode(KEY, entry(1100)), torch.device("meta"))
    assert decoded.keys.device.type == decoded.values.device.type == "meta"
    assert decoded.keys.shape == decoded.values.shape == (2, 2, 1100, 4)


def test_settings_of_the_reader_need_not_be_those_of_the_writer_except_for_the_master_key() -> None:
    shards = EntryCodec("int8", "zstd", level=9).encode(KEY, entry(70))
    assert_same(EntryCodec("model", "none").decode(KEY, shards), pack(entry(70), "int8").unpack())


def test_decoded_tensors_do_not_lie_in_the_bytes_they_came_from() -> None:
    buffer = bytearray(EntryCodec().encode(KEY, entry())[0])
    decoded = EntryCodec().decode(KEY, [memoryview(buffer)])
    buffer[:] = bytes(len(buffer))
    decoded.keys.add_(0)  # writable, too
    assert_same(decoded, entry())


@pytest.mark.parametrize(("compression", "master_key"), SETTINGS, ids=SETTING_NAMES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_is_noticed(compression: Compression, master_key: bytes | None, data: st.DataObject) -> None:
    codec = EntryCodec("k16v8", compression, master_key=master_key)
    (shard,) = codec.encode(KEY, entry())
    at, mask = data.draw(st.integers(0, len(shard) - 1)), data.draw(st.integers(1, 255))
    damaged = shard[:at] + bytes([shard[at] ^ mask]) + shard[at + 1 :]
    with pytest.raises(CorruptEntryError):
        codec.decode(KEY, [damaged])


@pytest.mark.parametrize(("compression", "master_key"), SETTINGS, ids=SETTING_NAMES)
def test_every_truncation_and_every_longer_shard_is_noticed(compression: Compression, master_key: bytes | None) -> None:
    codec = EntryCodec("int4", compression, master_key=master_key)
    (shard,) = codec.encode(KEY, entry(2))
    for length in range(len(shard)):
        with pytest.raises(CorruptEntryError):
            codec.decode(KEY, [shard[:length]])
    for extra in (b"\0", b"\0" * 64, shard):
        with pytest.raises(CorruptEntryError):
            codec.decode(KEY, [shard + extra])


@pytest.mark.parametrize("master_key", [None, MASTER], ids=["plain", "encrypted"])
@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, namespace="tenant-of-others"),
        replace(KEY, chunk="f" * 32),
        replace(KEY, context="f" * 32),
        ChunkKey(KEY.namespace, KEY.context, KEY.chunk),
    ],
)
def test_an_entry_under_another_key_is_refused(other: ChunkKey, master_key: bytes | None) -> None:
    codec = EntryCodec(master_key=master_key)
    with pytest.raises(CorruptEntryError, match="another key" if master_key else "belongs to"):
        codec.decode(other, codec.encode(KEY, entry()))


def test_the_parts_of_a_key_do_not_run_into_each_other() -> None:
    codec = EntryCodec(master_key=MASTER)
    with pytest.raises(CorruptEntryError):
        codec.decode(ChunkKey("n", "a", "bc"), codec.encode(ChunkKey("n", "ab", "c"), entry()))


@pytest.mark.parametrize("master_key", [None, MASTER], ids=["plain", "encrypted"])
@pytest.mark.parametrize("order", [(), (0,), (0, 1), (1, 0, 2), (0, 0, 1), (0, 1, 1), (0, 1, 2, 2), (1, 2), (2,)])
def test_missing_repeated_and_misplaced_shards_are_refused(order: tuple[int, ...], master_key: bytes | None) -> None:
    codec = EntryCodec("int4", master_key=master_key)
    shards = codec.encode(KEY, entry(2500))
    with pytest.raises(CorruptEntryError, match="shard"):
        codec.decode(KEY, [shards[index] for index in order])


@pytest.mark.parametrize("other", [entry(1100, seed=1), replace(entry(1100), base=12)])
def test_shards_of_two_versions_of_an_entry_do_not_mix(other: ChunkKV) -> None:
    first, second = (EntryCodec("int8").encode(KEY, chunk_kv) for chunk_kv in (entry(1100), other))
    with pytest.raises(CorruptEntryError, match="another version of the entry"):
        EntryCodec().decode(KEY, [first[0], second[1]])
    with pytest.raises(CorruptEntryError, match="another version of the entry"):
        EntryCodec().decode(KEY, [first[0], EntryCodec("model").encode(KEY, entry(1100))[1]])


def test_an_entry_that_is_not_encrypted_is_refused_where_a_master_key_is_set_and_the_other_way_round() -> None:
    plain, secret = EntryCodec(), EntryCodec(master_key=MASTER)
    with pytest.raises(CorruptEntryError, match="not encrypted"):
        secret.decode(KEY, plain.encode(KEY, entry()))
    with pytest.raises(CorruptEntryError, match="has no master key"):
        plain.decode(KEY, secret.encode(KEY, entry()))


def test_a_new_master_key_turns_old_entries_into_misses() -> None:
    shards = EntryCodec(master_key=MASTER).encode(KEY, entry())
    with pytest.raises(CorruptEntryError, match="master key"):
        EntryCodec(master_key=MASTER[::-1]).decode(KEY, shards)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_neither_token_ids_nor_names_nor_numbers_are_readable_in_encrypted_bytes(compression: Compression) -> None:
    chunk_kv = entry(40)
    (secret,) = EntryCodec(compression=compression, master_key=MASTER).encode(KEY, chunk_kv)
    (plain,) = EntryCodec().encode(KEY, chunk_kv)
    ids = ",".join(str(token) for token in chunk_kv.token_ids).encode()
    keys = chunk_kv.keys.view(torch.uint8).numpy().tobytes()[:64]
    for readable in (ids, KEY.namespace.encode(), KEY.chunk.encode(), b"precision", keys):
        assert readable in plain
        assert readable not in secret
    integers = np.asarray(chunk_kv.token_ids[:2], "<i4").tobytes()
    assert integers not in secret


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int2"}, "precision: 'int2'"),
        ({"compression": "gzip"}, "compression: 'gzip' is none of none, zstd"),
        ({"level": 0}, "level: 0 is not in 1 to 22"),
        ({"level": 23}, "level: 23"),
        ({"master_key": b"short"}, "master_key: the given bytes hold 5 bytes; give at least 16"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EntryCodec(**options)


def test_a_chunk_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        EntryCodec().encode(KEY, entry(0))


def test_a_master_key_is_read_from_bytes_a_file_or_the_variable_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "correct horse battery staple"
    path = tmp_path / "master.key"
    path.write_bytes(secret.encode())
    monkeypatch.setenv("KV_MASTER_KEY", secret)
    sources = (secret.encode(), path, str(path), "env:KV_MASTER_KEY")
    assert {load_master_key(source) for source in sources} == {secret.encode()}
    binary = os.urandom(31) + b"\n"
    path.write_bytes(binary)
    assert load_master_key(path) == binary


def test_a_bad_master_key_is_refused_without_being_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_SHORT", "secret")
    short = tmp_path / "secret.key"
    short.write_bytes(b"secret")
    wrong: list[tuple[bytes | str | Path, str]] = [
        (b"secret", "given bytes hold 6 bytes"),
        (short, "the file hold 6 bytes"),
        ("env:KV_SHORT", "environment variable hold 6 bytes"),
        ("env:KV_SECRET_UNSET", "is not set"),
        ("my-secret-passphrase-in-the-wrong-place", "can't read a file"),
        ("secret\0", "can't read a file"),
        (tmp_path, "can't read a file"),
    ]
    for source, message in wrong:
        with pytest.raises(ValueError, match=message) as caught:
            load_master_key(source)
        assert "secret" not in str(caught.value).lower()
        assert caught.value.__cause__ is None
