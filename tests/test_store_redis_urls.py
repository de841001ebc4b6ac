"""URLs that no connection can be made from are refused when the store is opened, not at every request."""

from __future__ import annotations

import traceback

import pytest

from cachecraft_rag import StoreConfig
from cachecraft_rag.store import RedisStore
from cachecraft_rag.store.build import open_store


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@localhost:99999/0",
        "redis://user:secret@localhost:port/0",
        "redis://user:secret/1@localhost:6379/0",
        "redis://user:secret@[localhost/0",
        "redis://user:secret@localhost:6379/0?foo=1",
        "redis://user:secret@localhost:6379/0?socket_timeout=abc",
        "redis+cluster://user:secret@localhost:99999",
        "redis+cluster://user:secret@localhost:6379?socket_timeout=abc",
    ],
)
def test_a_url_that_can_not_work_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"url: .* the port being 0 to 65535, options") as caught:
        open_store(StoreConfig.model_validate({"remote": {"url": url}}))
    assert "secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "url",
    ["redis://user:secret@localhost:1/0?socket_timeout=2.5", "rediss://localhost:1", "redis+cluster://localhost:1"],
)
def test_a_url_that_may_work_is_taken_though_nobody_answers(url: str) -> None:
    assert len(RedisStore(url)) == 0
