"""Whether a stored entry is whole, found out by reading all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.entry_info import EntryInfo
from cachecraft_rag.store.format import read_preamble


@dataclass(frozen=True)
class EntryCheck:
    """What became of reading an entry.

    Attributes:
        info: The entry.
        state: ``"intact"``; ``"damaged"``: a reader would remove it and count it as corrupt; ``"unreadable"``: nothing
            can be said, because it is encrypted and there is no master key, or because the medium refuses to be read.
        reason: Why it isn't intact; empty when it is.
    """

    info: EntryInfo
    state: Literal["intact", "damaged", "unreadable"]
    reason: str = ""


def check_shards(info: EntryInfo, shards: Sequence[bytes], codec: EntryCodec) -> EntryCheck:
    """Decode an entry as a reader does.

    With a master key, what does not decrypt counts as damaged, as it does for a reader: damage and another master key
    can't be told apart.
    """
    try:
        codec.decode(info.key, shards)
    except CorruptEntryError as error:
        is_sealed = not codec.has_master_key and _is_encrypted(shards)
        return EntryCheck(info, "unreadable" if is_sealed else "damaged", str(error))
    return EntryCheck(info, "intact")


def _is_encrypted(shards: Sequence[bytes]) -> bool:
    try:
        return bool(shards) and read_preamble(memoryview(shards[0]))
    except CorruptEntryError:
        return False
