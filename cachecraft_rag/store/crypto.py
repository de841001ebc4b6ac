"""Seals: how a block of a stored entry tells that it is whole and stands where it was written, and who may read it.

Without a master key a block ends in a checksum. With one it is encrypted: AES-256-GCM with a key per namespace, derived
by HKDF-SHA256. A namespace's key opens no other namespace's entries, and a new master key turns all old entries into
misses. Every block, one per layer and one for the header, has a random 96-bit nonce, which is safe for 2**32 blocks
per namespace and master key. The length of a block is not hidden: it tells the number of tokens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.keys import ChunkKey

MIN_MASTER_KEY_BYTES = 16
CHECKSUM_BYTES = 16
_NONCE_BYTES = 12
_TAG_BYTES = 16
_PURPOSE = b"cachecraft-rag chunk store, AES-256-GCM\0"


def load_master_key(source: bytes | str | Path) -> bytes:
    """Read a master key.

    Args:
        source: The key itself as bytes; ``"env:NAME"``, the UTF-8 text of that environment variable; or the path of a
            file whose bytes, all of them, are the key. Only a variable that is named here is ever read.

    Raises:
        ValueError: There is no such variable or file, or the key is shorter than 16 bytes. Messages don't show
            ``source``: it may be a secret given in the wrong place.
    """
    if isinstance(source, bytes):
        key, origin = source, "the given bytes"
    elif isinstance(source, str) and source.startswith("env:"):
        value = os.environ.get(source.removeprefix("env:"))
        if value is None:
            raise ValueError("master_key: the environment variable named after env: is not set")
        key, origin = os.fsencode(value), "the environment variable"
    else:
        try:
            key, origin = Path(source).read_bytes(), "the file"
        except (OSError, ValueError):  # the cause would show the path
            raise ValueError(
                "master_key: can't read a file of this name; give bytes, the path of a key file, or env:NAME"
            ) from None
    return check_master_key(key, origin)


def check_master_key(key: bytes, origin: str = "the given bytes") -> bytes:
    """The key itself.

    Raises:
        ValueError: It is shorter than 16 bytes.
    """
    if len(key) < MIN_MASTER_KEY_BYTES:
        raise ValueError(
            f"master_key: {origin} hold {len(key)} bytes; give at least {MIN_MASTER_KEY_BYTES} random bytes"
        )
    return key


def checksum(*parts: bytes | memoryview) -> bytes:
    """xxh3-128 over parts, one after the other."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


class Seal(Protocol):
    """Protects blocks. Stateless, so threads may share one.

    ``place`` says where a block belongs. It isn't stored, but a block is only opened with the place it was sealed for.

    Attributes:
        overhead: Bytes that sealing adds.
    """

    overhead: int

    def close(self, content: bytes, place: bytes) -> bytes:
        """The sealed block."""

    def open(self, sealed: memoryview, place: bytes) -> memoryview:
        """What ``close`` was given.

        Raises:
            CorruptEntryError: A byte differs, or it was sealed for another place.
        """


class ChecksumSeal:
    """The content, then its checksum: against damage and mistakes, not against forgers."""

    overhead = CHECKSUM_BYTES

    def close(self, content: bytes, place: bytes) -> bytes:
        """The content and a checksum."""
        return content + checksum(place, content)

    def open(self, sealed: memoryview, place: bytes) -> memoryview:
        """The content; shares memory with ``sealed``."""
        end = len(sealed) - CHECKSUM_BYTES
        if end < 0:
            raise CorruptEntryError(f"truncated: {len(sealed)} bytes hold no checksum")
        if checksum(place, sealed[:end]) != sealed[end:]:
            raise CorruptEntryError("checksum differs: damaged, truncated, or of another layer or entry")
        return sealed[:end]


class CipherSeal:
    """Nonce, ciphertext, tag. The entry's key is authenticated with every block.

    Args:
        master_key: Where the namespace's key is derived from.
        key: The entry's key.
    """

    overhead = _NONCE_BYTES + _TAG_BYTES

    def __init__(self, master_key: bytes, key: ChunkKey) -> None:
        fields = [field.encode("utf-8", "surrogatepass") for field in (key.namespace, key.chunk, key.context)]
        purpose = _PURPOSE + fields[0]
        derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(master_key)
        self._cipher = AESGCM(derived)
        self._entry = b"".join(len(field).to_bytes(4, "little") + field for field in fields)

    def close(self, content: bytes, place: bytes) -> bytes:
        """The content encrypted."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, content, self._entry + place)

    def open(self, sealed: memoryview, place: bytes) -> memoryview:
        """The content decrypted."""
        if len(sealed) < self.overhead:
            raise CorruptEntryError(f"truncated: {len(sealed)} encrypted bytes hold no nonce and tag")
        nonce, ciphertext = bytes(sealed[:_NONCE_BYTES]), sealed[_NONCE_BYTES:]
        try:
            return memoryview(self._cipher.decrypt(nonce, ciphertext, self._entry + place))
        except InvalidTag:
            raise CorruptEntryError("does not decrypt: damaged, of another key, or of another master key") from None
