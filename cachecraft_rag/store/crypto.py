"""Encryption of stored entries: AES-256-GCM with a key per namespace, derived from one master key by HKDF-SHA256.

A namespace's key opens no other namespace's entries, and a new master key turns all old entries into misses. Every
shard has a random 96-bit nonce, which is safe for 2**32 shards per namespace and master key. The length of a shard is
not hidden: it tells the number of tokens.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.keys import ChunkKey

MIN_MASTER_KEY_BYTES = 16
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


def seal(master_key: bytes, key: ChunkKey, preamble: bytes, body: bytes) -> bytes:
    """Encrypt a shard's body; preamble and key are authenticated with it.

    Returns:
        Nonce, ciphertext, tag.
    """
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + _cipher(master_key, key.namespace).encrypt(nonce, body, _associated(key, preamble))


def unseal(master_key: bytes, key: ChunkKey, preamble: bytes, sealed: memoryview) -> bytes:
    """Decrypt what ``seal`` returned.

    Raises:
        CorruptEntryError: A byte differs, or it was sealed with another master key, entry key or preamble.
    """
    if len(sealed) < _NONCE_BYTES + _TAG_BYTES:
        raise CorruptEntryError(f"truncated: {len(sealed)} encrypted bytes hold no nonce and tag")
    nonce, ciphertext = bytes(sealed[:_NONCE_BYTES]), sealed[_NONCE_BYTES:]
    try:
        return _cipher(master_key, key.namespace).decrypt(nonce, ciphertext, _associated(key, preamble))
    except InvalidTag:
        raise CorruptEntryError("does not decrypt: damaged, of another key, or of another master key") from None


def _cipher(master_key: bytes, namespace: str) -> AESGCM:
    purpose = _PURPOSE + namespace.encode("utf-8", "surrogatepass")
    return AESGCM(HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(master_key))


def _associated(key: ChunkKey, preamble: bytes) -> bytes:
    fields = (key.namespace, key.chunk, key.context)
    encoded = [field.encode("utf-8", "surrogatepass") for field in fields]
    return preamble + b"".join(len(field).to_bytes(4, "little") + field for field in encoded)
