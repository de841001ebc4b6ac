"""Whole engines on a shared store: no request ever gets the KV of another chunk, tenant, model or tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig
from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store import MemoryStore
from tests import engine_process
from tests.conftest import EngineMaker, rag_prompt
from tests.engine_process import TIERS
from tests.redis_server import RedisServer, own_redis_server
from tests.store_answers import ENTRY_BYTES, SECRETS, SETTINGS, ask, document, prompt_of, requests, tiers, tiers_of
from tests.tiny_models import make, rope
from tests.tiny_tokenizers import byte_level

__all__ = ["own_redis_server"]

REPOSITORY = Path(__file__).resolve().parent.parent


class TestManyThreads:
    """An answer that equals the one of a fresh engine, which never saw any other chunk, depends on nothing but the
    chunks of its own request: KV, tokens or sensitivity of any other chunk would move the logits, as the last two tests
    of this class show. A model of random weights can't repeat a secret, but every bit of its logits hangs on it.
    """

    def test_every_request_gets_the_answer_it_gets_alone(self, make_engine: EngineMaker, tmp_path: Path) -> None:
        wanted = requests(200)
        alone = {request: ask(make_engine(**SETTINGS), request) for request in dict.fromkeys(wanted)}
        engine = make_engine(store=tiers(2, disk={"path": str(tmp_path), "size": 20 * ENTRY_BYTES}), **SETTINGS)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda request: ask(engine, request), wanted))
        wrong = [request for request, answer in zip(wanted, found, strict=True) if not answer.is_same(alone[request])]
        assert wrong == []
        stats = tiers_of(engine)
        assert stats["cold"].evictions > 0
        assert stats["cold"].hits > 0
        assert stats["disk"].hits > 0
        assert (stats["disk"].errors, stats["disk"].corrupt) == (0, 0)

    def test_tenants_never_hit_each_others_chunks(self, make_engine: EngineMaker, tmp_path: Path) -> None:
        tenants = ("acme", "globex", "initech")
        wanted = [(tenants[index % 3], request) for index, request in enumerate(requests(200, seed=1))]
        alone = {request: ask(make_engine(**SETTINGS), request) for request in dict.fromkeys(r for _, r in wanted)}
        engine = make_engine(store=tiers(2, disk={"path": str(tmp_path), "size": 40 * ENTRY_BYTES}), **SETTINGS)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda item: ask(engine, item[1], namespace=item[0]), wanted))
        wrong = [item for item, answer in zip(wanted, found, strict=True) if not answer.is_same(alone[item[1]])]
        assert wrong == []
        engine.store.flush()
        for index in range(len(SECRETS)):
            with_new_tenant = engine.generate(prompt_of([index]), namespace="newcomer").stats
            assert (with_new_tenant.chunk_hits, with_new_tenant.chunk_misses) == (0, 1)
        # The texts are the same, so each tenant's copy of every chunk was computed for this tenant alone.
        assert [engine.invalidate(namespace=tenant) for tenant in (*tenants, "newcomer")] == [len(SECRETS)] * 4

    def test_one_other_chunk_gives_another_answer(self, make_engine: EngineMaker) -> None:
        engine = make_engine(**SETTINGS)
        answers = [ask(engine, (0, index)) for index in range(1, len(SECRETS))]
        assert len({answer.token_ids for answer in answers}) > 1
        for number, answer in enumerate(answers):
            for other in answers[:number]:
                assert not torch.allclose(answer.logits[0], other.logits[0], atol=0.01)

    def test_foreign_kv_under_the_right_ids_would_be_noticed(self, make_engine: EngineMaker) -> None:
        class CrossedStore(MemoryStore):
            """Keeps the KV of whatever came first under every key."""

            first: ChunkKV | None = None

            def put(self, key: ChunkKey, chunk_kv: ChunkKV, *, static: bool = False, cfo: float = 0.0) -> bool:
                self.first = first = self.first or chunk_kv
                taken = torch.arange(chunk_kv.num_tokens) % first.num_tokens
                crossed = replace(chunk_kv, keys=first.keys[:, :, taken], values=first.values[:, :, taken])
                return super().put(key, crossed, static=static, cfo=cfo)

        sound = make_engine(**SETTINGS)
        crossed = CacheCraftEngine(make("llama"), byte_level(), sound.config, store=CrossedStore(10**8))
        for engine in (sound, crossed):
            engine.warm([document(0), document(1)])
        assert ask(crossed, (0,)).is_same(ask(sound, (0,)))
        assert not ask(crossed, (1,)).is_same(ask(sound, (1,)))


class TestForeignEntries:
    """A store that others wrote to: what they computed with anything else is never found."""

    @pytest.fixture
    def open_engine(self, tmp_path: Path, own_redis_server: RedisServer) -> Callable[..., CacheCraftEngine]:
        def opened(tier: str, model: Any = None, tokenizer: Any = None, namespace: str = "default") -> CacheCraftEngine:
            place = {"path": str(tmp_path)} if tier == "disk" else {"url": own_redis_server.url}
            store = {"cold": {"size": 0}, tier: place, "compute_if_faster": False}
            config = EngineConfig.model_validate({"store": store, "namespace": namespace, **engine_process.SETTINGS})
            return CacheCraftEngine(model or make("llama"), tokenizer or byte_level(), config)

        return opened

    @pytest.mark.parametrize("tier", TIERS)
    def test_an_engine_of_the_same_kind_finds_everything(
        self, tier: str, open_engine: Callable[..., CacheCraftEngine]
    ) -> None:
        for hits in ({}, {tier: 2}):
            with open_engine(tier) as engine:
                assert engine.generate(rag_prompt(1, 2)).stats.hits_by_tier == hits

    @pytest.mark.parametrize("tier", TIERS)
    @pytest.mark.parametrize(
        "change",
        [
            lambda: {"model": make("llama", **rope("default", theta=20_000.0))},
            lambda: {"model": make("llama", torch.bfloat16)},
            lambda: {"model": make("llama", num_hidden_layers=2)},
            lambda: {"model": with_changed_weight()},
            lambda: {"model": with_adapter()},
            lambda: {"tokenizer": with_added_token()},
            lambda: {"namespace": "other"},
        ],
        ids=["rope", "dtype", "layers", "weights", "adapter", "tokenizer", "namespace"],
    )
    def test_an_engine_of_another_kind_finds_nothing(
        self, tier: str, change: Callable[[], dict[str, Any]], open_engine: Callable[..., CacheCraftEngine]
    ) -> None:
        changed = change()
        prompt = rag_prompt(1, 2)
        with open_engine(tier) as engine:
            engine.warm(prompt.chunks)
        with open_engine(tier, **changed) as engine:
            found = engine.generate(prompt)
            assert (found.stats.chunk_hits, found.stats.chunk_misses) == (0, 2)
            assert engine.generate(prompt).stats.chunk_hits == 2  # its own
            alone = CacheCraftEngine(
                engine.model, engine.tokenizer, engine.config.model_copy(update={"store": EngineConfig().store})
            )
            assert alone.generate(prompt).token_ids == found.token_ids
            alone.close()
        with open_engine(tier) as engine:
            assert engine.generate(prompt).stats.chunk_hits == 2  # both lie side by side

    def test_processes_with_different_hash_seeds_find_each_others_entries(
        self, tmp_path: Path, own_redis_server: RedisServer
    ) -> None:
        first = run_process(tmp_path, own_redis_server.url, "1,2", hash_seed="0")
        second = run_process(tmp_path, own_redis_server.url, "2,1,3", hash_seed="1")
        third = run_process(tmp_path, own_redis_server.url, "3,2,1", hash_seed="0")
        for tier in TIERS:
            assert [found[tier]["hits"] for found in (first, second, third)] == [0, 2, 3]
            with CacheCraftEngine(
                make("llama"), byte_level(), EngineConfig.model_validate(engine_process.SETTINGS)
            ) as alone:
                assert third[tier]["token_ids"] == list(alone.generate(rag_prompt(3, 2, 1)).token_ids)


def with_changed_weight() -> Any:
    model = make("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] += 0.001
    return model


def with_adapter() -> Any:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(make("llama"), settings).eval()


def with_added_token() -> Any:
    """A tokenizer that gives these texts the same ids as before."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["<|extra|>"])
    return tokenizer


def run_process(folder: Path, url: str, numbers: str, hash_seed: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine_process", str(folder), url, numbers]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
