"""What can be reached from an object: answers must hold plain data, or every one of them would keep KV alive."""

from __future__ import annotations

import gc
from typing import Any

import torch


def find_tensors(root: Any) -> list[Any]:
    """Every tensor and module that an object holds, through containers and attributes."""
    seen: dict[int, Any] = {}
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, dict):
            waiting += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset):
            waiting += thing
        elif hasattr(thing, "__dict__") and not callable(thing):
            waiting += vars(thing).values()
            waiting.append(getattr(thing, "__pydantic_private__", None))
    return [thing for thing in seen.values() if isinstance(thing, torch.Tensor | torch.nn.Module)]


def count_alive() -> tuple[int, int]:
    """How many tensors and how many objects in all the process holds."""
    gc.collect()
    things = gc.get_objects()
    return sum(issubclass(type(thing), torch.Tensor) for thing in things), len(things)
