"""Listing, checking and shrinking a store: what it says is what it holds, and looking changes nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cachecraft_rag.store import ChunkStore, DiskStore, EntryCodec, MemoryStore, RedisStore, TieredStore
from cachecraft_rag.store.disk_survey import DiskSurvey
from tests.redis_server import RedisServer, need_redis_server, own_redis_server, redis_server
from tests.store_entries import ENTRY_BYTES, FakeClock, entry, held, key, shards
from tests.store_kinds import Kind, kind, settle

__all__ = ["kind", "own_redis_server", "redis_server"]

MASTER_KEY = bytes(range(32))


def listed(store: ChunkStore | DiskSurvey, namespace: str | None = None) -> list[str]:
    """Keys of what a store lists, in the order of their names."""
    return sorted(str(info.key) for info in store.entries(namespace))


def names(*chunks: str, namespace: str = "default") -> list[str]:
    return sorted(str(key(chunk, namespace=namespace)) for chunk in chunks)


def snapshot(path: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file and folder."""
    found = {}
    for folder, _, files in os.walk(path):
        for name in [".", *files]:
            stat = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = (stat.st_size, stat.st_mtime_ns)
    return found


def test_a_store_lists_what_it_holds(kind: Kind) -> None:
    store = kind.make(10)
    for chunk in "ab":
        store.put(key(chunk), entry())
    store.put(key("c", namespace="theirs"), entry(32), static=True)
    settle(store)
    for tier in getattr(store, "tiers", (store,)):
        assert len(tier.entries()) == len(tier)
        assert {info.tier for info in tier.entries()} <= {tier.name}
        names_of_namespaces = sum(map(len, ("default", "theirs"))) if isinstance(tier, DiskStore) else 0
        assert sum(info.nbytes for info in tier.entries()) + names_of_namespaces == tier.nbytes
    assert set(listed(store)) == {*names("a", "b"), *names("c", namespace="theirs")}
    assert set(listed(store, "theirs")) == set(names("c", namespace="theirs"))
    assert listed(store, "nobody") == []


def test_a_listed_entry_tells_its_tokens_its_last_use_and_whether_it_may_go(kind: Kind) -> None:
    store = kind.make(10, ttl_s=600)
    if isinstance(store, TieredStore):
        store = store.tiers[-1]
    store.put(key("a"), entry(20), static=True)
    store.put(key("b"), entry(16), cfo=0.25)
    store.pin(key("b"))
    static, pinned = sorted(store.entries(), key=lambda info: not info.static)
    assert (static.static, static.pinned, pinned.static, pinned.pinned) == (True, False, False, True)
    assert (static.tokens, pinned.tokens) == ((None, None) if isinstance(store, RedisStore) else (20, 12))
    assert store.get(key("a")) is not None
    kind.wait(5)
    assert store.get(key("b")) is not None
    used = {info.key: info.used_at for info in store.entries()}
    assert used[key("b")] - used[key("a")] >= (0.04 if isinstance(store, RedisStore) else 5)


def test_listing_and_checking_is_no_use(kind: Kind) -> None:
    store = kind.make(2)
    if isinstance(store, TieredStore):
        store = store.tiers[-1]
    for chunk in "ab":
        store.put(key(chunk), entry())
        kind.wait(1)
    before = sorted(store.entries(), key=lambda info: info.used_at)
    assert [info.key for info in before] == [key("a"), key("b")]
    kind.wait(1)
    list(store.verify())
    assert sorted(store.entries(), key=lambda info: info.used_at) == before
    assert (store.stats().hits, store.stats().misses) == (0, 0)
    store.put(key("c"), entry())
    assert held(store, *"abc") == ["b", "c"]


def test_a_disk_lists_uses_by_other_processes_and_still_evicts_in_their_order(tmp_path: Path) -> None:
    clock = FakeClock()
    one, other = (DiskStore(tmp_path, 2 * ENTRY_BYTES + len("default"), clock=clock) for _ in range(2))
    for chunk in "ab":
        one.put(key(chunk), entry())
        clock.now += 1
    assert other.get(key("a")) is not None
    assert max(one.entries(), key=lambda info: info.used_at).key == key("a")
    one.put(key("c"), entry())
    assert held(one, *"abc") == ["a", "c"]


def test_shrinking_keeps_what_was_used_last_and_what_is_pinned(kind: Kind) -> None:
    store = kind.make(10)
    if isinstance(store, TieredStore):
        store = store.tiers[-1]
    for chunk in "abcde":
        store.put(key(chunk), entry())
        kind.wait(1)
    assert store.get(key("b")) is not None
    size = store.entries()[0].nbytes
    with store.pinned([key("c")]):
        assert store.shrink(3 * size + len("default")) == 2
        assert held(store, *"abcde") == ["b", "c", "e"]
        assert store.shrink(10**9) == 0
        assert store.shrink(0) == 2
        assert held(store, *"abcde") == ["c"]
    assert store.stats().evictions == 4
    assert store.shrink(0) == 1
    assert (len(store), store.entries()) == (0, [])


def test_no_store_shrinks_below_nothing(kind: Kind) -> None:
    with pytest.raises(ValueError, match="nbytes: -1 is negative"):
        kind.make(1).shrink(-1)


def test_what_is_evicted_by_shrinking_is_really_deleted(tmp_path: Path, redis_server: RedisServer) -> None:
    disk = DiskStore(tmp_path, 10**6)
    remote = RedisStore(redis_server.url, prefix="shrunk")
    for store in (disk, remote):
        for number in range(250):
            store.put(key(str(number)), entry(1))
        assert store.shrink(0) == 250
    assert shards(tmp_path) == []
    with redis_server.client() as client:
        assert list(client.scan_iter("shrunk:*:*:*", count=1000)) == []


def test_shrinking_all_tiers_leaves_no_more_in_all_of_them_together(tmp_path: Path) -> None:
    size = entry().nbytes
    tiers = [MemoryStore(4 * size, name="hot"), MemoryStore(4 * size, name="cold"), DiskStore(tmp_path, 10 * size)]
    store = TieredStore(tiers)
    for number in range(8):
        store.put(key(str(number)), entry())
        store.flush()
    assert len(store) >= 12
    assert store.shrink(3 * size) > 0
    assert 2 * size <= store.nbytes <= 3 * size
    assert store.contains(key("7"))
    store.close()


def flip(path: Path, at: int = 1000) -> None:
    """Change one bit of a file, and not its time of change."""
    data, stat = bytearray(path.read_bytes()), path.stat()
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_flipped_bit_is_found_and_left_to_the_caller_to_remove(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10**6)
    for chunk in "abc":
        store.put(key(chunk), entry(of=key(chunk)))
    flip(shards(tmp_path)[1])
    before = snapshot(tmp_path)
    for checking in (store, DiskSurvey(tmp_path)):
        states = [check.state for check in checking.verify()]
        assert sorted(states) == ["damaged", "intact", "intact"]
        assert any("checksum differs" in check.reason for check in checking.verify())
    assert snapshot(tmp_path) == before
    assert store.stats().corrupt == 0


def test_a_damaged_entry_in_redis_is_found_without_renewing_its_time_to_live(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, prefix="checked", ttl_s=1000)
    for chunk in "ab":
        store.put(key(chunk), entry())
    damaged = f"checked:{{{key('a').chunk}}}:*:0"
    with redis_server.client() as client:
        names_of_shards = list(client.scan_iter("checked:*:0"))
        for name in names_of_shards:
            client.pexpire(name, 500_000)
        (shard,) = client.scan_iter(damaged)
        client.setrange(shard, 1000, b"\xff\xff\xff")
        assert {check.info.key: check.state for check in store.verify()} == {key("a"): "damaged", key("b"): "intact"}
        assert all(client.pttl(name) <= 500_000 for name in names_of_shards)
        client.delete(shard)  # as a full server does
        assert {check.info.key: check.state for check in store.verify()} == {key("b"): "intact"}


def test_what_redis_evicted_or_expired_is_not_listed(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, prefix="leaky", ttl_s=1000)
    for chunk in "abc":
        store.put(key(chunk), entry())
    with redis_server.client() as client:
        for name in client.scan_iter(f"leaky:{{{key('a').chunk}}}:*"):
            client.delete(name)
        (member,) = [name for name, _ in client.zscan_iter("leaky:{index}:until") if key("b").chunk.encode() in name]
        client.zadd("leaky:{index}:until", {member: 1})
        before = client.zrange("leaky:{index}:uses", 0, -1, withscores=True)
        assert listed(store) == names("c")
        assert client.zrange("leaky:{index}:uses", 0, -1, withscores=True) == before


def test_listing_a_server_that_is_not_there_is_a_counted_error(own_redis_server: RedisServer) -> None:
    store = RedisStore(own_redis_server.url)
    own_redis_server.kill()
    assert (store.entries(), list(store.verify()), store.shrink(0)) == ([], [], 0)
    assert store.stats().errors >= 3


def test_a_cluster_lists_checks_and_shrinks(tmp_path: Path) -> None:
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
        store = RedisStore(f"redis+cluster://127.0.0.1:{server.port}")
        for chunk in "abc":
            assert store.put(key(chunk), entry())
        assert listed(store) == names("a", "b", "c")
        assert [check.state for check in store.verify()] == ["intact"] * 3
        assert store.shrink(2 * ENTRY_BYTES) == 1
        assert listed(store) == names("b", "c")
        store.close()
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("written_with", "read_with", "state"),
    [
        (MASTER_KEY, MASTER_KEY, "intact"),
        (MASTER_KEY, None, "unreadable"),  # not damaged as far as anyone can tell
        (MASTER_KEY, bytes(32), "damaged"),
        (None, MASTER_KEY, "damaged"),
    ],
)
def test_a_master_key_decides_what_can_be_said(
    tmp_path: Path, written_with: bytes | None, read_with: bytes | None, state: str
) -> None:
    DiskStore(tmp_path, 10**6, EntryCodec(master_key=written_with)).put(key("a"), entry())
    assert [check.state for check in DiskSurvey(tmp_path, EntryCodec(master_key=read_with)).verify()] == [state]


def test_a_survey_sees_what_the_store_sees_and_changes_nothing(tmp_path: Path) -> None:
    clock = FakeClock()
    store = DiskStore(tmp_path, 10**6, clock=clock)
    for chunk in "abc":
        clock.now += 1
        store.put(key(chunk), entry(), static=chunk == "a")
    store.put(key("d", namespace="theirs"), entry())
    expected = sorted(store.entries(), key=lambda info: str(info.key))
    bucket = shards(tmp_path)[0].parent.parent
    (bucket / "foreign").write_text("not ours")  # a store would delete it
    (tmp_path / "cachecraft-v1" / "tmp" / "elsewhere-1-a").mkdir()
    before = snapshot(tmp_path)
    survey = DiskSurvey(tmp_path)
    assert sorted(survey.entries(), key=lambda info: str(info.key)) == expected
    assert listed(survey, "theirs") == names("d", namespace="theirs")
    assert len(list(survey.verify())) == 4
    assert snapshot(tmp_path) == before


def test_a_survey_makes_no_folders(tmp_path: Path) -> None:
    survey = DiskSurvey(tmp_path / "none")
    assert not survey.is_store
    assert (survey.entries(), list(survey.verify())) == ([], [])
    assert list(tmp_path.iterdir()) == []


def test_of_two_entries_with_one_key_a_survey_lists_the_newer(tmp_path: Path) -> None:
    for folder, version in (("one", 16), ("two", 32)):
        DiskStore(tmp_path / folder, 10**6).put(key("a"), entry(version))
    (older,), (newer,) = shards(tmp_path / "one"), shards(tmp_path / "two")
    os.rename(older.parent, newer.parent.parent / older.parent.name)
    assert [info.tokens for info in DiskSurvey(tmp_path / "two").entries()] == [32]


def test_an_entry_that_the_file_system_refuses_to_read_is_not_called_damaged(tmp_path: Path) -> None:
    DiskStore(tmp_path, 10**6).put(key("a"), entry())
    (shard,) = shards(tmp_path)
    shard.unlink()
    shard.symlink_to(shard)  # a loop: even root can't open it
    assert [check.state for check in DiskSurvey(tmp_path).verify()] == ["unreadable"]
