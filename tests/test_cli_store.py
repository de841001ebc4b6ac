"""The commands of ``cachecraft store``, over real stores on a disk and in Redis."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.cli import output
from cachecraft_rag.store import ChunkStore, DiskStore, EntryCodec, RedisStore
from tests.cli_runs import run
from tests.redis_server import RedisServer, own_redis_server
from tests.store_entries import ENTRY_BYTES, FakeClock, entry, held, key, shards

__all__ = ["own_redis_server"]

MASTER_KEY = bytes(range(32))


def run_json(*arguments: object, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code))


def words(text: str) -> str:
    """Text without its line breaks and frames."""
    return " ".join(text.replace("│", " ").split())


def fill(store: ChunkStore, clock: FakeClock | None = None) -> ChunkStore:
    """Put a, b and c of one namespace and d of another, one after the other."""
    for name in (*(key(chunk) for chunk in "abc"), key("d", namespace="theirs")):
        if clock is not None:
            clock.now += 1
        store.put(name, entry(of=name), static=name == key("b"))
    return store


@pytest.fixture
def disk(tmp_path: Path) -> ChunkStore:
    """A store in ``tmp_path / "kv"``."""
    clock = FakeClock()
    return fill(DiskStore(tmp_path / "kv", 10**6, clock=clock), clock)


def snapshot(path: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file and folder."""
    found = {}
    for folder, _, files in os.walk(path):
        for name in [".", *files]:
            stat = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = (stat.st_size, stat.st_mtime_ns)
    return found


def shard_of(path: Path, chunk: str) -> Path:
    """The only file of an entry."""
    (shard,) = (shard for shard in shards(path) if shard.parent.name.startswith(key(chunk).chunk))
    return shard


def touch(path: Path, chunk: str) -> None:
    """Have an entry be used now, which is years after the others."""
    os.utime(shard_of(path, chunk).parent)


def damage(path: Path, chunk: str) -> None:
    """Flip one bit of an entry."""
    shard = shard_of(path, chunk)
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)


def test_the_version_is_shown() -> None:
    assert run("--version") == f"cachecraft-rag {version('cachecraft-rag')}\n"


def test_help_names_every_command() -> None:
    assert "store" in run("--help")
    text = run("store", "--help")
    assert all(f" {command} " in text for command in ("stats", "ls", "verify", "evict", "clear"))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1.0 MiB"), (2**51, "2048.0 TiB")],
)
def test_sizes_are_written_in_the_largest_fitting_unit(nbytes: int, text: str) -> None:
    assert output.size(nbytes) == text


@pytest.mark.parametrize("command", [["stats"], ["ls"], ["verify"], ["evict", "--to", "0"], ["clear", "--yes"]])
class TestEveryCommand:
    def test_needs_a_tier(self, command: list[str]) -> None:
        assert "--disk PATH, --remote URL" in words(run("store", *command, code=2))

    def test_says_that_a_path_holds_no_store_and_makes_none(self, command: list[str], tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "none"):
            assert "there is no chunk store in" in run("store", *command, "--disk", path, code=1)
        assert list(tmp_path.iterdir()) == []

    def test_says_that_a_server_is_not_there(self, command: list[str], own_redis_server: RedisServer) -> None:
        own_redis_server.kill()
        text = run("store", *command, "--remote", own_redis_server.url, code=1)
        assert "check that it runs" in text

    def test_says_which_urls_are_understood(self, command: list[str]) -> None:
        text = run("store", *command, "--remote", "http://localhost", code=1)
        assert "scheme 'http' is unknown; use one of redis" in text

    def test_works_on_an_empty_store(self, command: list[str], tmp_path: Path) -> None:
        DiskStore(tmp_path, 1000)
        run("store", *command, "--disk", tmp_path)


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("command", ["stats", "ls", "verify"])
def test_looking_changes_nothing(command: str, options: list[str], tmp_path: Path, disk: ChunkStore) -> None:
    (shards(tmp_path)[0].parent.parent / "foreign").write_text("a store would delete this")
    (tmp_path / "kv" / "cachecraft-v1" / "tmp" / "elsewhere-1-left-over").mkdir()
    before = snapshot(tmp_path)
    run("store", command, "--disk", tmp_path / "kv", *options)
    assert snapshot(tmp_path) == before


def test_stats_are_those_of_the_stores(tmp_path: Path, disk: ChunkStore, own_redis_server: RedisServer) -> None:
    remote = fill(RedisStore(own_redis_server.url))
    figures = run_json("store", "stats", "--disk", tmp_path / "kv", "--remote", own_redis_server.url)
    assert [tier["tier"] for tier in figures["tiers"]] == ["disk", "remote"]
    for tier, store in zip(figures["tiers"], (disk, remote), strict=True):
        assert (tier["entries"], tier["bytes"]) == (len(store), sum(info.nbytes for info in store.entries()))
        parts = {part["namespace"]: (part["entries"], part["bytes"]) for part in tier["namespaces"]}
        assert parts == {"default": (3, 3 * ENTRY_BYTES), "theirs": (1, tier["bytes"] - 3 * ENTRY_BYTES)}
    text = words(run("store", "stats", "--disk", tmp_path / "kv"))
    assert f"disk default 3 {output.size(3 * ENTRY_BYTES)}" in text
    assert f"disk all 4 {output.size(figures['tiers'][0]['bytes'])}" in text
    only = run_json("store", "stats", "--disk", tmp_path / "kv", "--namespace", "theirs")
    assert only["tiers"][0]["entries"] == 1


def test_entries_are_listed_by_their_last_use(tmp_path: Path, disk: ChunkStore) -> None:
    touch(tmp_path, "a")
    listing = run_json("store", "ls", "--disk", tmp_path / "kv", "--limit", 2)
    assert (listing["total"], len(listing["entries"])) == (4, 2)
    assert listing["entries"][0]["chunk"] == key("a").chunk
    everything = run_json("store", "ls", "--disk", tmp_path / "kv", "--limit", 0)["entries"]
    times = [one["used_at"] for one in everything]
    assert times == sorted(times, reverse=True)
    (static,) = (one for one in everything if one["static"])
    assert (static["chunk"], static["context"], static["tokens"]) == (key("b").chunk, key("b").context, 16)
    lines = run("store", "ls", "--disk", tmp_path / "kv", "--limit", 3).splitlines()
    assert key("a").chunk[:8] in lines[1]
    assert lines[-1] == "3 of 4 entries; --limit 0 shows all"
    assert max(map(len, lines)) <= 80
    assert len(run("store", "ls", "--disk", tmp_path / "kv", "--namespace", "theirs").splitlines()) == 2


def test_a_namespace_can_neither_style_nor_steer_the_terminal(tmp_path: Path) -> None:
    DiskStore(tmp_path, 10**6).put(key("a", namespace="[red]\x1b[2Jx"), entry())
    for command in ("stats", "ls"):
        text = run("store", command, "--disk", tmp_path)
        assert "\x1b[2J" not in text
        assert "[red]" in text


def test_the_entries_of_redis_are_listed(own_redis_server: RedisServer) -> None:
    store = fill(RedisStore(own_redis_server.url))
    listing = run_json("store", "ls", "--remote", own_redis_server.url)
    assert {one["chunk"] for one in listing["entries"]} == {info.key.chunk for info in store.entries()}
    assert {one["tokens"] for one in listing["entries"]} == {None}
    with own_redis_server.client() as client:
        assert client.pttl(f"cachecraft:{{{key('a').chunk}}}") > 0
    assert len(run("store", "ls", "--remote", own_redis_server.url).splitlines()) == 5


def test_verify_finds_a_flipped_bit_and_removes_it_when_told_to(tmp_path: Path, disk: ChunkStore) -> None:
    assert "4 entries: 4 intact, 0 damaged, 0 unreadable; 0 removed" in run(
        "store", "verify", "--disk", tmp_path / "kv"
    )
    damage(tmp_path, "b")
    result = run_json("store", "verify", "--disk", tmp_path / "kv", code=1)
    assert (result["checked"], result["intact"], result["removed"]) == (4, 3, 0)
    assert [(one["chunk"], one["state"]) for one in result["entries"]] == [(key("b").chunk, "damaged")]
    text = run("store", "verify", "--disk", tmp_path / "kv", "--remove", code=1)
    assert "checksum differs" in words(text)
    assert "3 intact, 1 damaged, 0 unreadable; 1 removed" in text
    assert held(disk, *"abc") == ["a", "c"]
    assert run_json("store", "verify", "--disk", tmp_path / "kv")["checked"] == 3


def test_verify_checks_what_lies_in_redis(own_redis_server: RedisServer) -> None:
    store = fill(RedisStore(own_redis_server.url, ttl_s=None))
    with own_redis_server.client() as client:
        (shard,) = client.scan_iter(f"cachecraft:{{{key('c').chunk}}}:*:0")
        client.setrange(shard, 500, b"\0\0\0\0\0")
    result = run_json("store", "verify", "--remote", own_redis_server.url, "--remove", code=1)
    assert (result["intact"], result["removed"]) == (3, 1)
    assert held(store, *"abc") == ["a", "b"]


def test_an_encrypted_store_needs_its_key_to_be_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(DiskStore(tmp_path / "kv", 10**6, EntryCodec(master_key=MASTER_KEY)))
    (tmp_path / "key").write_bytes(MASTER_KEY)
    verify = ("store", "verify", "--disk", tmp_path / "kv")
    assert run_json(*verify, "--master-key", tmp_path / "key")["intact"] == 4
    monkeypatch.setenv("STORE_KEY", "another key, for another store")
    before = snapshot(tmp_path)
    assert "0 intact, 0 damaged, 4 unreadable; 0 removed" in run(*verify, "--remove", code=1)
    text = run(*verify, "--remove", "--master-key", "env:STORE_KEY", code=1)
    assert "probably the wrong one: nothing was deleted" in text
    assert snapshot(tmp_path) == before
    assert "can't read a file" in run(*verify, "--master-key", tmp_path / "none", code=1)
    damage(tmp_path, "a")
    assert run_json(*verify, "--master-key", tmp_path / "key", "--remove", code=1)["removed"] == 1


def test_evict_keeps_the_most_recently_used(tmp_path: Path, disk: ChunkStore) -> None:
    touch(tmp_path, "a")
    size = output.size(sum(info.nbytes for info in disk.entries()))
    text = run("store", "evict", "--disk", tmp_path / "kv", "--to", f"{(2 * ENTRY_BYTES + 100) / 1024}KiB")
    assert text.startswith(f"disk: evicted 2 entries; {size} before, ")
    assert held(disk, *"abc") == ["a"]
    assert disk.contains(key("d", namespace="theirs"))
    assert "evicted 0 entries" in run("store", "evict", "--disk", tmp_path / "kv", "--to", "2GiB")


def test_evict_shrinks_redis(own_redis_server: RedisServer) -> None:
    store = fill(RedisStore(own_redis_server.url))
    assert store.get(key("a")) is not None
    text = run("store", "evict", "--remote", own_redis_server.url, "--to", 2 * ENTRY_BYTES)
    assert text.startswith("remote: evicted 2 entries")
    assert held(store, *"abc") == ["a"]


@pytest.mark.parametrize("size", ["2 gigs", "-1", "much"])
def test_evict_refuses_what_is_no_size(tmp_path: Path, disk: ChunkStore, size: str) -> None:
    assert "is not a size" in words(run("store", "evict", "--disk", tmp_path / "kv", f"--to={size}", code=2))
    assert len(disk) == 4


def test_clear_asks_first(tmp_path: Path, disk: ChunkStore) -> None:
    clear = ("store", "clear", "--disk", tmp_path / "kv")
    text = run(*clear, answer="n\n", code=1)
    assert "disk: 4 entries, " in text
    assert len(disk) == 4
    assert "deleted 4 entries" in run(*clear, answer="y\n")
    assert len(disk) == 0


def test_clear_of_a_namespace_leaves_the_others(
    tmp_path: Path, disk: ChunkStore, own_redis_server: RedisServer
) -> None:
    remote = fill(RedisStore(own_redis_server.url))
    places = ("--disk", tmp_path / "kv", "--remote", own_redis_server.url)
    assert "deleted 3 entries of namespace default" in run("store", "clear", *places, "--namespace", "default", "--yes")
    for store in (disk, remote):
        assert [info.key for info in store.entries()] == [key("d", namespace="theirs")]


def test_a_server_that_refuses_ends_a_command_with_a_message(own_redis_server: RedisServer) -> None:
    fill(RedisStore(own_redis_server.url))
    with own_redis_server.client() as client:
        client.execute_command("ACL SETUSER default -eval")
    text = run("store", "evict", "--remote", own_redis_server.url, "--to", 0, code=1)
    assert "the remote tier failed" in text
