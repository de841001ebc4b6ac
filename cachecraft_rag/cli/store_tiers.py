"""The tiers that a ``cachecraft store`` command is about, opened so that looking at them changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.crypto import load_master_key
from cachecraft_rag.store.disk import DiskStore
from cachecraft_rag.store.disk_survey import DiskSurvey
from cachecraft_rag.store.redis import RedisStore
from cachecraft_rag.store.redis_client import RedisClient

Tier = DiskSurvey | RedisStore

_NO_LIMIT = sys.maxsize  # a budget that evicts nothing
_TIMEOUT_S = 30.0


def fail(message: str) -> NoReturn:
    """End the command with a message and exit code 1."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(1)


@contextmanager
def surveyed(disk: Path | None, remote: str | None, master_key: str | None = None) -> Iterator[list[Tier]]:
    """The tiers to look at; what goes wrong in the block and a user can change ends the command with a message.

    Raises:
        typer.BadParameter: No tier is named.
        typer.Exit: There is no store at the path, the server or the master key can't be used, or the block failed.
    """
    if disk is None and remote is None:
        raise typer.BadParameter("name the store: --disk PATH, --remote URL, or both")
    tiers: list[Tier] = []
    try:
        codec = EntryCodec(master_key=None if master_key is None else load_master_key(master_key))
        if disk is not None:
            tiers.append(_disk(disk, codec))
        if remote is not None:
            tiers.append(_remote(remote, codec))
        yield tiers
    except (ValueError, ImportError, OSError, StoreError) as error:
        fail(str(error))
    finally:
        for tier in tiers:
            if isinstance(tier, RedisStore):
                tier.close()


@contextmanager
def opened(tier: Tier) -> Iterator[ChunkStore]:
    """A tier to be changed, without a budget: opening it evicts nothing.

    Raises:
        typer.Exit: An operation failed.
    """
    store = DiskStore(tier.path, _NO_LIMIT) if isinstance(tier, DiskSurvey) else tier
    check_errors(store)
    yield store
    check_errors(store)
    if store is not tier:
        store.close()


def check_errors(tier: ChunkStore | DiskSurvey) -> None:
    """End the command when an operation of a store failed; the store has logged why.

    Raises:
        typer.Exit: One did.
    """
    if isinstance(tier, ChunkStore) and tier.counters.stats(0, 0, None).errors:
        fail(f"the {tier.name} tier failed, as the warning says; what was done before stays done")


def _disk(path: Path, codec: EntryCodec) -> DiskSurvey:
    survey = DiskSurvey(path, codec)
    if not survey.is_store:
        fail(f"there is no chunk store in {path}; give the path that the engine's disk tier was given")
    return survey


def _remote(url: str, codec: EntryCodec) -> RedisStore:
    client = RedisClient(url, _TIMEOUT_S, retry_after_s=1.0)
    try:
        client.call("ping")
    except StoreError as error:
        fail(f"the server can't be used ({error}); check that it runs, and host, port and password in --remote")
    finally:
        client.close()
    return RedisStore(url, codec, ttl_s=None, timeout_s=_TIMEOUT_S)  # no time to live: reading would renew it
