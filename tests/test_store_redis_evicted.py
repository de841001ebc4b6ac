"""What a server without room evicts: shards singly, in no order that an entry would have."""

from __future__ import annotations

import secrets

import pytest

from cachecraft_rag.store import RedisStore
from tests.redis_server import RedisServer, own_redis_server, redis_server
from tests.store_entries import entry, is_same, key

__all__ = ["own_redis_server", "redis_server"]


@pytest.mark.parametrize("shard", [0, 1])
def test_an_entry_that_lost_a_shard_is_not_there_and_counts_as_evicted(redis_server: RedisServer, shard: int) -> None:
    store = RedisStore(redis_server.url, prefix=f"t{secrets.token_hex(6)}")
    store.put(key("a"), entry(1500))
    store.put(key("a", "other"), entry(1500, of=key("a", "other")))
    with redis_server.client() as client:
        (name,) = client.scan_iter(match=f"{store._prefix}:*{key('a').context}*:{shard}")
        client.delete(name)
    assert not store.contains(key("a"))
    assert store.variants(key("a").chunk) == [key("a", "other")]
    assert [check.info.key for check in store.verify()] == [key("a", "other")]
    assert store.get(key("a")) is None
    stats = store.stats()
    assert (stats.corrupt, stats.evictions, stats.misses, stats.entries) == (0, 1, 1, 1)
    assert is_same(store.get(key("a", "other")), entry(1500, of=key("a", "other")))


def test_a_server_without_room_serves_what_it_says_is_there_and_nothing_counts_as_damaged(
    own_redis_server: RedisServer,
) -> None:
    store = RedisStore(own_redis_server.url)
    keys = [key(f"{number}") for number in range(120)]
    with own_redis_server.client() as client:
        client.config_set("maxmemory-policy", "volatile-lru")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 3_000_000)
        for one in keys:
            store.put(one, entry(1024))
        client.config_set("maxmemory", 0)  # reading takes room too
    there = [one for one in keys if store.contains(one)]
    assert 0 < len(there) < len(keys)
    assert [one for one in keys if store.get(one) is not None] == there
    assert store.stats().corrupt == 0
