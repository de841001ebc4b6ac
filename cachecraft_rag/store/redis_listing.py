"""Lists what lies in Redis, from the index of all entries and their metas, without changing anything there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from urllib.parse import unquote

from cachecraft_rag.keys import ChunkKey, digest
from cachecraft_rag.store import redis_scripts as scripts
from cachecraft_rag.store.redis_client import RedisClient

_BATCH = 500  # entries asked about at once: the server answers others in between


@dataclass(frozen=True)
class ListedEntry:
    """One entry in Redis.

    Attributes:
        key: Its key.
        nbytes: Bytes of its shards.
        used_at: When it was last used, in seconds of the server's Unix time.
        expires: Whether it has a time to live.
    """

    key: ChunkKey
    nbytes: int
    used_at: float
    expires: bool


def list_entries(
    client: RedisClient, prefix: str, index: Sequence[str], namespace: str | None
) -> Iterator[ListedEntry]:
    """Entries of a namespace, or all; those that expired or that the server evicted are left out.

    Args:
        client: The connection.
        prefix: What all keys begin with.
        index: Names of the index: uses, until when, sizes.
        namespace: The tenant; ``None`` for all.

    Raises:
        StoreUnavailableError: The server can't be reached or refuses.
    """
    pattern = None if namespace is None else f"*@{digest('namespace', namespace)}"
    uses = {
        member.decode(): used_at_us / 1_000_000
        for member, used_at_us in client.call("zscan_iter", index[0], match=pattern, count=_BATCH)
    }
    members = iter(uses)
    # A cluster's mget asks the node of each slot.
    mget = "mget_nonatomic" if client.is_cluster else "mget"
    while batch := list(islice(members, _BATCH)):
        sizes = client.run(scripts.SIZES, list(index[1:]), *batch)
        metas = client.call(mget, [_meta_name(prefix, member) for member in batch])
        for member, size, meta in zip(batch, sizes, metas, strict=True):
            if size is None or meta is None:
                continue
            nbytes, expires = size
            owner = meta.partition(b":")[2].decode()
            if namespace in (None, owner):
                yield ListedEntry(_key(member, owner), nbytes, uses[member], bool(expires))


def _meta_name(prefix: str, member: str) -> str:
    chunk, context = member.split("+")
    return f"{prefix}:{{{chunk}}}:{context}"


def _key(member: str, namespace: str) -> ChunkKey:
    chunk, _, context = member.partition("+")
    return ChunkKey(namespace, unquote(chunk), unquote(context.partition("@")[0]))
