"""The shared tier, on a real server: keys that everyone finds, and a server that may come and go."""

from __future__ import annotations

import datetime
import ipaddress
import logging
import math
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.store import RedisStore
from cachecraft_rag.store.redis_client import parse_url
from tests.redis_server import RedisServer, free_port, need_redis_server, own_redis_server, redis_server
from tests.store_entries import ENTRY_BYTES, entry, held, is_same, key

__all__ = ["own_redis_server", "redis_server"]

ROOT = Path(__file__).resolve().parents[1]


def store_on(server: RedisServer, **options: Any) -> RedisStore:
    """A store that no other test uses."""
    return RedisStore(server.url, **{"prefix": f"t{secrets.token_hex(6)}", **options})


def run(hash_seed: int, *arguments: object) -> int:
    """Run ``tests.store_process``; what it counted."""
    command = [sys.executable, "-m", "tests.store_process", *map(str, arguments)]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    return int(subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True).stdout)


@pytest.mark.parametrize(
    ("url", "expected", "is_cluster"),
    [
        ("redis://h:1/2", "redis://h:1/2", False),
        ("rediss://u:p@h:1?ssl_cert_reqs=none", "rediss://u:p@h:1?ssl_cert_reqs=none", False),
        ("valkey://h", "redis://h", False),
        ("valkeys://h", "rediss://h", False),
        ("redis+cluster://h:1", "redis://h:1", True),
        ("rediss+cluster://h:1", "rediss://h:1", True),
        ("redis://h:1?cluster=true&db=0", "redis://h:1?db=0", True),
        ("redis://h:1?cluster=false", "redis://h:1", False),
    ],
)
def test_urls_of_servers_and_clusters_are_understood(url: str, expected: str, is_cluster: bool) -> None:
    assert parse_url(url) == (expected, is_cluster)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://h"}, "url: scheme 'http' is unknown"),
        ({"url": "redis+sentinel://h"}, r"url: scheme 'redis\+sentinel' is unknown"),
        ({"ttl_s": 0}, "ttl_s: 0 is out of range"),
        ({"ttl_s": math.inf}, "ttl_s: inf is out of range; give 0.001 to"),
        ({"capacity_bytes": -1}, "capacity_bytes: -1 is negative"),
        ({"prefix": "a:b"}, "prefix: 'a:b' is no name"),
    ],
)
def test_a_useless_setting_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RedisStore(**{"url": "redis://localhost", **options})


@pytest.mark.parametrize("first", [1, 2])
def test_two_processes_with_different_hash_seeds_hit_each_others_entries(redis_server: RedisServer, first: int) -> None:
    author = secrets.token_hex(4)
    assert run(first, "put", "redis", redis_server.url, 0, author, 10) == 10
    assert run(3 - first, "get", "redis", redis_server.url, 0, author, 10) == 10


def test_shards_lie_under_the_chunks_hash_tag_and_expire(redis_server: RedisServer) -> None:
    store = store_on(redis_server, prefix="layout", ttl_s=100)
    store.put(key("a"), entry(2100))
    with redis_server.client() as client:
        names = sorted(client.scan_iter(match="layout:{" + key("a").chunk + "}*"))
        assert len(names) == 5  # contexts, meta, three shards
        assert all(90_000 < client.pttl(name) <= 100_000 for name in names)
        assert sum(client.strlen(name) for name in names[2:]) == store.nbytes
        for name in names:
            client.pexpire(name, 5000)
        assert store.get(key("a")) is not None
        assert all(90_000 < client.pttl(name) <= 100_000 for name in names)


def test_a_static_entry_has_no_time_to_live(redis_server: RedisServer) -> None:
    store = store_on(redis_server, prefix="static", ttl_s=100)
    store.put(key("a", "x"), entry())
    store.put(key("a"), entry(), static=True)
    store.put(key("a", "y"), entry())
    assert store.get(key("a")) is not None
    with redis_server.client() as client:
        times = {
            name.decode(): client.pttl(name) for name in client.scan_iter(match="static:{" + key("a").chunk + "}*")
        }
        assert sum(time_left == -1 for time_left in times.values()) == 3  # contexts, meta, shard
    assert store.put(key("a"), entry())
    with redis_server.client() as client:
        assert all(client.pttl(name) > 0 for name in client.scan_iter(match=f"static:*{key('a').context}*:*"))


def test_a_store_without_time_to_live_keeps_its_entries(redis_server: RedisServer) -> None:
    store = store_on(redis_server, prefix="lasting", ttl_s=None)
    store.put(key("a"), entry())
    assert store.get(key("a")) is not None
    with redis_server.client() as client:
        assert all(client.pttl(name) == -1 for name in client.scan_iter(match="lasting:*"))


def test_nothing_is_left_behind_when_all_is_cleared(redis_server: RedisServer) -> None:
    store = store_on(redis_server, prefix="cleared")
    with redis_server.client() as client:
        client.set("clear_me_not", 1)
        for number in range(1200):
            store.put(key(f"{number}", namespace="ab"[number % 2]), entry(1))
        assert store.clear("a") == 600
        assert len(store) == 600
        assert store.clear() == 600
        left = {name.decode() for name in client.scan_iter(match="cleared:*")}
        assert left <= {"cleared:{index}:sizes"}
        assert store.nbytes == 0
        assert client.get("clear_me_not") == b"1"


def test_a_replaced_entry_leaves_no_shards_behind(redis_server: RedisServer) -> None:
    store = store_on(redis_server, prefix="replaced")
    store.put(key("a"), entry(5000))
    store.put(key("a"), entry(16, of=key("a")))
    assert is_same(store.get(key("a")), entry(16, of=key("a")))
    with redis_server.client() as client:
        assert len(list(client.scan_iter(match="replaced:{" + key("a").chunk + "}*"))) == 3
    assert (len(store), store.nbytes) == (1, ENTRY_BYTES)


def test_the_budget_is_shared_by_all_clients(redis_server: RedisServer) -> None:
    one, other = (store_on(redis_server, prefix="shared", capacity_bytes=3 * ENTRY_BYTES) for _ in range(2))
    for number, store in enumerate((one, other, one)):
        store.put(key(str(number)), entry())
        time.sleep(0.003)
    assert other.get(key("0")) is not None
    with one.pinned([key("1")]):
        one.put(key("3"), entry())
    assert held(other, *"0123") == ["0", "1", "3"]
    assert one.stats().evictions == 1
    with redis_server.client() as client:
        shards = [name for name in client.scan_iter(match="shared:{*") if name.endswith(b":0")]
        assert sum(client.strlen(name) for name in shards) == one.nbytes == 3 * ENTRY_BYTES


def test_what_expired_no_longer_counts(redis_server: RedisServer) -> None:
    store = store_on(redis_server, ttl_s=0.1, capacity_bytes=2 * ENTRY_BYTES)
    store.put(key("a"), entry())
    assert store.nbytes == ENTRY_BYTES
    time.sleep(0.15)
    assert (store.nbytes, len(store), store.get(key("a"))) == (0, 0, None)


@pytest.mark.parametrize("damage", ["flipped", "cut", "foreign"])
def test_a_damaged_entry_is_a_counted_miss_and_is_removed(redis_server: RedisServer, damage: str) -> None:
    store = store_on(redis_server, prefix=f"damaged_{damage}")
    store.put(key("a"), entry(1500))
    with redis_server.client() as client:
        name = next(name for name in client.scan_iter(match=f"damaged_{damage}:*") if name.endswith(b":1"))
        data = bytearray(client.get(name) or b"")
        data[len(data) // 2] ^= 1
        client.set(name, {"flipped": bytes(data), "cut": bytes(data[:100]), "foreign": b"?"}[damage])
    assert store.get(key("a")) is None
    assert not store.contains(key("a"))
    assert (store.stats().corrupt, store.stats().misses, len(store)) == (1, 1, 0)


def test_damage_of_a_layer_is_found_when_it_is_read_and_the_entry_is_dropped(redis_server: RedisServer) -> None:
    store = store_on(redis_server, prefix="late")
    store.put(key("a"), entry(1500))
    with redis_server.client() as client:
        name = next(name for name in client.scan_iter(match="late:*") if name.endswith(b":1"))
        data = bytearray(client.get(name) or b"")
        data[-100] ^= 1
        client.set(name, bytes(data))
    opened = store.open(key("a"))
    assert opened is not None
    opened.read(0)
    assert (store.stats().hits, store.stats().corrupt) == (1, 0)
    for _ in range(2):
        with pytest.raises(CorruptEntryError, match="layer 1"):
            opened.layer(1)
    assert (store.stats().corrupt, len(store)) == (1, 0)
    assert store.get(key("a")) is None


def test_fetching_counts_as_loading(redis_server: RedisServer) -> None:
    store = store_on(redis_server)
    store.put(key("a"), entry(1500))
    original = store._client.run

    def run_slowly(script: str, keys: list[str], *arguments: str | bytes | int) -> Any:
        time.sleep(0.02)
        return original(script, keys, *arguments)

    store._client.run = run_slowly  # type: ignore[method-assign]
    opened = store.open(key("a"))
    assert opened is not None
    assert store.stats().bytes_loaded == 0
    opened.complete()
    stats = store.stats()
    assert stats.bytes_loaded == opened.nbytes == store.nbytes
    assert stats.load_s >= 0.02
    assert stats.open_s >= 0.02


def test_an_entry_that_was_cleared_while_it_was_written_stays_away(redis_server: RedisServer) -> None:
    store, other = (store_on(redis_server, prefix="overtaken") for _ in range(2))
    original = store._client.run

    def run_after_clearing(script: str, keys: list[str], *arguments: str | bytes | int) -> Any:
        if "lasting" in script:  # between reserving and writing
            other.clear()
        return original(script, keys, *arguments)

    store._client.run = run_after_clearing  # type: ignore[method-assign]
    assert not store.put(key("a"), entry())
    assert other.get(key("a")) is None
    with redis_server.client() as client:
        assert not list(client.scan_iter(match="overtaken:{" + key("a").chunk + "}*"))


def test_a_server_that_is_not_there_is_a_counted_miss_and_warned_about_once(
    own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    own_redis_server.kill()
    store = store_on(own_redis_server, retry_after_s=0.0001)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            time.sleep(0.001)
            assert store.get(key("a")) is None
            time.sleep(0.001)
            assert not store.put(key("a"), entry())
    assert not store.remove(key("a"))
    assert (store.clear(), store.variants(key("a").chunk), store.nbytes) == (0, [], 0)
    assert store.stats().misses == 3
    assert store.stats().errors >= 8
    assert len(caplog.records) == 1
    store.close()


def test_a_server_that_was_killed_and_started_again_is_used_again(
    own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_on(own_redis_server, retry_after_s=0.05)
    store.put(key("a"), entry(of=key("a")))
    with caplog.at_level(logging.WARNING):
        own_redis_server.kill()
        assert store.get(key("a")) is None
        assert not store.put(key("b"), entry())
        own_redis_server.start()
        time.sleep(0.06)
        assert store.get(key("a")) is None
        assert store.put(key("a"), entry(of=key("a")))
    assert is_same(store.get(key("a")), entry(of=key("a")))
    assert store.stats().errors == 1
    assert len(caplog.records) == 1


def test_requests_do_not_all_wait_for_a_server_that_is_down(own_redis_server: RedisServer) -> None:
    store = store_on(own_redis_server, retry_after_s=60)
    own_redis_server.kill()
    for _ in range(50):
        assert store.get(key("a")) is None
    assert (store.stats().errors, store.stats().misses) == (1, 50)


def test_a_server_without_memory_left_refuses_without_an_error_for_the_caller(own_redis_server: RedisServer) -> None:
    store = store_on(own_redis_server)
    store.put(key("a"), entry(of=key("a")))
    with own_redis_server.client() as client:
        client.config_set("maxmemory", "1mb")
        client.config_set("maxmemory-policy", "noeviction")
    assert not store.put(key("b"), entry(5000))
    assert store.stats().errors >= 1
    assert is_same(store.get(key("a")), entry(of=key("a")))
    assert store.clear() == 1
    assert store.get(key("a")) is None


@pytest.mark.parametrize("form", ["redis+cluster://127.0.0.1:{port}", "redis://127.0.0.1:{port}?cluster=true"])
def test_a_cluster_works_like_a_single_server(tmp_path: Path, form: str) -> None:
    need_redis_server()
    server = RedisServer(tmp_path, "--cluster-enabled", "yes")
    server.start()
    try:
        with server.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE 0 16383")
            deadline = time.monotonic() + 20
            while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                assert time.monotonic() < deadline
                time.sleep(0.05)
        store = RedisStore(form.format(port=server.port), capacity_bytes=4 * ENTRY_BYTES)
        for number in range(6):
            assert store.put(key(str(number)), entry(of=key(str(number))))
        assert held(store, *"012345") == ["2", "3", "4", "5"]
        assert is_same(store.get(key("4")), entry(of=key("4")))
        assert store.variants(key("4").chunk) == [key("4")]
        assert store.remove(key("4"))
        assert store.clear("default") == 3
        assert (len(store), store.nbytes, store.stats().errors) == (0, 0, 0)
        store.put(key("a"), entry())
        server.kill()
        assert store.get(key("a")) is None
        assert store.stats().errors == 1
        store.close()
    finally:
        server.kill()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    signed = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    (folder / "server.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return folder / "server.crt", folder / "server.key"


def test_a_server_with_tls_is_reached_and_its_certificate_checked(tmp_path: Path) -> None:
    need_redis_server()
    signed, private = certificate(tmp_path)
    files = ["--tls-cert-file", str(signed), "--tls-key-file", str(private), "--tls-ca-cert-file", str(signed)]
    port = free_port()
    server = RedisServer(tmp_path, "--tls-port", str(port), "--tls-auth-clients", "no", *files)
    server.start()
    try:
        url = f"rediss://127.0.0.1:{port}"
        store = RedisStore(f"{url}?ssl_ca_certs={signed}")
        assert store.put(key("a"), entry(of=key("a")))
        assert is_same(store.get(key("a")), entry(of=key("a")))
        stranger = RedisStore(url)
        assert stranger.get(key("a")) is None
        assert stranger.stats().errors == 1
    finally:
        server.kill()
