"""A connection to Redis or Valkey that reports failures as one error, and spares a server that just failed."""

from __future__ import annotations

import threading
import time
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from cachecraft_rag.errors import StoreUnavailableError

_SCHEMES = ("redis", "rediss", "valkey", "valkeys")
_CONNECT_TIMEOUT_S = 2.0
_ALLOWED = (
    "url: a part of it can't be used; give redis://[[user]:password@]host[:port][/database][?option=value&...], the"
    " port being 0 to 65535, options those of redis-py's connections, such as socket_timeout=2.5, and %XX for special"
    " characters of a password"
)


def parse_url(url: str) -> tuple[str, bool]:
    """What redis-py understands of a URL, and whether it names a cluster.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``valkey(s)://``; a cluster with ``+cluster`` or ``?cluster=true``.

    Raises:
        ValueError: Another scheme, or no URL at all.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(_ALLOWED) from None  # the reason may quote a password
    scheme, _, suffix = parts.scheme.partition("+")
    if scheme not in _SCHEMES or suffix not in ("", "cluster"):
        raise ValueError(
            f"url: scheme {parts.scheme!r} is unknown; use one of {', '.join(_SCHEMES)}, with +cluster for a cluster"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    is_cluster = suffix == "cluster" or options.pop("cluster", "false").lower() in ("true", "1", "yes")
    options.pop("cluster", None)
    scheme = "rediss" if scheme in ("rediss", "valkeys") else "redis"
    return urlunsplit((scheme, parts.netloc, parts.path, urlencode(options), "")), is_cluster


class RedisClient:
    """Runs scripts and commands; connects when it is first needed and again after every failure. Thread-safe.

    Args:
        url: See ``parse_url``.
        timeout_s: Longest wait for an answer, in seconds.
        retry_after_s: After a failure, seconds in which no other attempt is made, so that requests don't all wait.

    Raises:
        ImportError: redis-py is missing.
        ValueError: No connection can be made from the URL.
    """

    def __init__(self, url: str, timeout_s: float, retry_after_s: float) -> None:
        try:
            import redis  # only who wants this tier needs it
        except ImportError as error:
            raise ImportError("a remote tier needs redis-py: pip install 'cachecraft-rag[redis]'") from error
        self._redis = redis
        self._url, self.is_cluster = parse_url(url)
        self._options = self._make_options(timeout_s)
        self._check_url()
        self._retry_after_s = retry_after_s
        self._client: Any = None
        self._down_until = 0.0
        self._lock = threading.Lock()

    @property
    def is_resting(self) -> bool:
        """Whether the last attempt failed so recently that another would be in vain."""
        return time.monotonic() < self._down_until

    def run(self, script: str, keys: list[str], *arguments: str | bytes | int) -> Any:
        """Run a script.

        Raises:
            StoreUnavailableError: The server can't be reached or refuses.
        """
        return self.call("eval", script, len(keys), *keys, *arguments)

    def call(self, command: str, *arguments: Any, **options: Any) -> Any:
        """Run a command; lists are given back whole.

        Raises:
            StoreUnavailableError: The server can't be reached or refuses.
        """
        try:
            result = getattr(self._connected(), command)(*arguments, **options)
            return list(result) if command.endswith("_iter") else result
        except (self._redis.RedisError, self._redis.exceptions.RedisClusterException, OSError) as error:
            is_refusal = isinstance(error, self._redis.ResponseError)
            if not is_refusal:
                self._down_until = time.monotonic() + self._retry_after_s
            raise StoreUnavailableError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _make_options(self, timeout_s: float) -> dict[str, Any]:
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        return {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": min(_CONNECT_TIMEOUT_S, timeout_s),
            "decode_responses": False,
            # One more attempt replaces a connection that the server closed; more would hold up a request.
            "retry": Retry(NoBackoff(), 1),
        }

    def _check_url(self) -> None:
        """Make a connection that is never opened: what is wrong with the URL shows now, not at every request."""
        try:
            pool = self._redis.ConnectionPool.from_url(self._url, **self._options)
            if not self.is_cluster:  # which leaves out options that it does not know
                pool.make_connection()
        except (ValueError, TypeError, self._redis.RedisError):
            raise ValueError(_ALLOWED) from None  # the reason may quote a password

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                kind = self._redis.RedisCluster if self.is_cluster else self._redis.Redis
                self._client = kind.from_url(self._url, **self._options)
            return self._client
