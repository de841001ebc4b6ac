"""A process of its own that uses a shared store: ``python -m tests.store_process COMMAND KIND PLACE ...``."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

from cachecraft_rag.store import ChunkStore, DiskStore, RedisStore
from tests.store_entries import entry, is_same, key


def open_store(kind: str, place: str, capacity: int) -> ChunkStore:
    return DiskStore(place, capacity) if kind == "disk" else RedisStore(place, prefix="processes")


def put(store: ChunkStore, author: str, count: int) -> int:
    """Put entries; returns how many were kept."""
    names = [key(f"{author} {number}") for number in range(count)]
    return sum(store.put(name, entry(of=name)) for name in names)


def get(store: ChunkStore, author: str, count: int) -> int:
    """Look for another process's entries; returns how many are there and right."""
    names = [key(f"{author} {number}") for number in range(count)]
    return sum(is_same(store.get(name), entry(of=name)) for name in names)


def be_killed(place: str, capacity: int, times: int) -> int:
    """Write in child processes, each killed at some moment of it; returns how many were killed while at it."""
    killed = 0
    for time_number in range(times):
        child = os.fork()
        if child == 0:
            store = DiskStore(place, capacity)
            for number in range(10**6):
                name = key(f"{time_number} {number}")
                store.put(name, entry(1500, of=name))
        time.sleep(random.Random(time_number).uniform(0.005, 0.06))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
    return killed


if __name__ == "__main__":
    command, kind, place, capacity, author, count = sys.argv[1:]
    if command == "be_killed":
        result = be_killed(place, int(capacity), int(count))
    else:
        store = open_store(kind, place, int(capacity))
        result = {"put": put, "get": get}[command](store, author, int(count))
        store.close()
    sys.stdout.write(f"{result}\n")
