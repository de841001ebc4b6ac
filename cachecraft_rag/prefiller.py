"""From a request to the logits of its first token: look up, plan, encode, place, select, recompute."""

from __future__ import annotations

import time
import warnings

import torch

from cachecraft_rag.assembly import assemble
from cachecraft_rag.capability import Capability
from cachecraft_rag.config import EngineConfig
from cachecraft_rag.decode import buffer_decoder
from cachecraft_rag.errors import StoreError
from cachecraft_rag.full_prefill import full_prefill
from cachecraft_rag.library import ChunkLibrary
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.model_state import ModelState
from cachecraft_rag.prefill import selective_prefill
from cachecraft_rag.request import Request
from cachecraft_rag.request_chunk import plan_request
from cachecraft_rag.selection import POLICIES, ScoringPolicy

_REFERENCE = "reuse=False"
"""Why the reference is prefilled in full."""


class Prefiller:
    """Prefills requests with reused chunks where it can, and says why where it can't.

    Args:
        adapter: The model.
        state: Whether the model is as it was loaded.
        capability: What the model allows.
        library: The chunks.
        config: Settings.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        state: ModelState,
        capability: Capability,
        library: ChunkLibrary,
        config: EngineConfig,
    ) -> None:
        self._adapter, self._state, self._capability = adapter, state, capability
        self._library, self._config = library, config
        self._warned: set[str] = set()

    def run(self, request: Request, reuse: bool) -> None:
        """Fill in what a request knows before its first token: logits, decoding step, figures."""
        reason = self.reason(request.capacity) if reuse else _REFERENCE
        if reason is None and not request.encoded.spans:
            self._full_prefill(request, "no known chunk in the prompt")
        elif reason is None:
            try:
                refusal = self._reuse(request)
            except (StoreError, OSError):  # met while a layer was read: load everything first, and what fails is a miss
                refusal = self._reuse(request, lazily=False)
            if refusal is not None:
                self._full_prefill(request, refusal)
        else:
            if reuse:
                self.warn(reason)
            self._full_prefill(request, reason)

    def settle(self, request: Request) -> None:
        """After the answer, complete or not: let go of what was being read."""
        with request.timed("store_s"):
            self._library.settle(request.chunks)

    def learn(self, request: Request) -> None:
        """After a complete answer: measure new chunks' sensitivity, keep KV that turned out exact, store new text.

        Nothing of that where something was forgotten meanwhile, which the request may hold, or the model has changed.
        """
        with request.timed("store_s"):
            if self._library.forgetting.count(request.namespace) == request.since:
                self._keep_what_was_learnt(request)
            is_reference = request.figures.get("fallback_reason") == _REFERENCE
            # Whether the model is undisturbed takes a look at every module, so that is asked last.
            if self._library.auto_chunks is not None and not is_reference and self.reason(0) is None:
                self._library.keep_new_parts(request.namespace, request.since)

    def is_batchable(self, request: Request) -> bool:
        """Whether its rows may be computed in one pass with those of others, and still be what they are alone.

        Not where hooks see the pass, nor where the length of the longest prompt changes everyone's rotation.
        """
        return request.kv is not None and self.reason(request.capacity) is None

    def reason(self, num_tokens: int) -> str | None:
        """Why a prompt of this length can't reuse chunks now; ``None`` when it can."""
        return self._capability.reason_for(num_tokens) or self._state.intervention()

    def warn(self, reason: str) -> None:
        """Warn once of every reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"prompts are prefilled in full: {reason}", UserWarning, stacklevel=4)

    def _reuse(self, request: Request, lazily: bool = True) -> str | None:
        """Look up, plan, encode what is missing, place, select, recompute; returns why reuse is refused, if it is."""
        policy = POLICIES[request.recompute.policy]
        ratio = {"none": 0.0, "all": 1.0}.get(policy.name, request.recompute.ratio)
        with request.timed("load_s"):
            alpha = request.recompute.alpha if policy.name == "inter_attention" else None
            keys = request.keys = self._library.keys(request.namespace)
            request.chunks = self._library.look_up(request.encoded, keys, lazily, alpha, request.since)
            head = self._library.heads.find(request.encoded, keys)
            request.count_lookups()
            request.watch_answer(self._library.history, self._adapter.num_layers)
        with self._library.store.pinned([chunk.key for chunk in request.chunks]):
            plan = request.plan = plan_request(request.encoded, request.chunks, ratio, head)
            with request.timed("encode_s"):
                measure = policy.needs_sensitivity and self._config.encode.sensitivity == "inline"
                num_encoded, num_stored = self._library.encode_missing(plan, request.chunks, with_sensitivity=measure)
            chunk_kvs = [chunk.chunk_kv for chunk in request.chunks]
            assert self._capability.rope is not None
            request.release()  # the buffer of a first attempt
            kv = request.kv = self._adapter.request_kv(request.capacity)
            if head is not None:
                kv.place(0, head.keys, head.values)
            assemble(plan, chunk_kvs, self._capability.rope, kv, self._library.store.readers if lazily else None)
            token_ids = torch.tensor(request.encoded.token_ids)
            embed_s = self._ask(request)
            settings, known = request.recompute, (request.earlier, request.deviation, request.asked)
            how = (settings.seed, request.goal, self._capability.rope, settings.offset, settings.attend_share, *known)
            prefill = selective_prefill(self._adapter, plan, chunk_kvs, token_ids, kv, policy, *how)
        request.logits, request.next_logits = prefill.logits, buffer_decoder(self._adapter, kv, request.watch)
        request.count_prefill(prefill, num_encoded, self._adapter.num_layers)
        request.figures["load_s"] += kv.fill_s
        request.figures["select_s"] += embed_s
        if request.asked is not None:
            if request.asked.hint is not None and prefill.is_hinted:
                request.figures["similarity"] = request.asked.hint.similarity
            scored = zip(request.chunks, prefill.scores, strict=False)  # nothing is scored where an earlier one did
            request.asked.scores = {chunk.exact_key.chunk: one for chunk, one in scored if one is not None}
        request.figures |= {"policy": policy.name, "stored_tokens": num_stored}
        return prefill.refusal

    def _ask(self, request: Request) -> float:
        """Look for a similar question where its scores can be of use; returns the seconds it took."""
        questions, plan, started = self._library.questions, request.plan, time.perf_counter()
        if questions is None or not request.question or plan is None or not plan.num_candidates:
            return 0.0
        has_choice = 0.0 < plan.ratio < 1.0 or request.recompute.target is not None
        if not has_choice or not isinstance(POLICIES[request.recompute.policy], ScoringPolicy):
            return 0.0
        chunks = [chunk.exact_key.chunk for chunk in request.chunks]
        lengths = [len(chunk.token_ids) for chunk in request.chunks]
        request.asked = questions.ask(request.question, request.namespace, request.recompute.policy, chunks, lengths)
        return time.perf_counter() - started

    def _full_prefill(self, request: Request, reason: str) -> None:
        full_prefill(self._adapter, request, reason, self._capability.reason is None, self._state.soft_prompted())

    def _keep_what_was_learnt(self, request: Request) -> None:
        plan, kv, keys = request.plan, request.kv, request.keys
        if plan is None or kv is None or keys is None or self._state.fingerprint() != keys.model:
            return
        if plan.chunk_budgets is not None:
            kept = self._library.keep_variants(plan, request.chunks, kv, request.recorder, request.recompute)
            request.figures["stored_tokens"] += kept
        elif plan.ratio >= 1.0 and self._config.keep_exact:
            request.figures["stored_tokens"] += self._library.keep_exact(plan, request.chunks, kv)
        request.figures["stored_tokens"] += self._library.keep_head(request.encoded, keys, kv, request.since)
        if request.watch is not None:
            request.watch.keep()
        if request.asked is not None and self._library.questions is not None:
            self._library.questions.add(request.asked)
        has_looked = 0.0 < plan.ratio < 1.0 or request.recompute.target is not None
        if has_looked and POLICIES[request.recompute.policy].needs_sensitivity:
            self._library.measure_new(request.chunks)
