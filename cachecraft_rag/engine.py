"""The engine: tokenise, look up, plan, encode what is missing, place, select, recompute, decode.

Orchestrates and computes nothing itself. It knows chunks and prompts, and neither LlamaIndex nor LangChain.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch

from cachecraft_rag.capability import probe
from cachecraft_rag.config import EngineConfig, RecomputeConfig, SamplingConfig
from cachecraft_rag.decode import PlainDecoder, buffer_decoder, decode, end_of_sequence_ids
from cachecraft_rag.detokenizer import Detokenizer
from cachecraft_rag.errors import PromptTooLongError
from cachecraft_rag.library import ChunkLibrary, as_texts
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.model_loader import context_window, load
from cachecraft_rag.model_state import ModelState
from cachecraft_rag.plan import make_plan
from cachecraft_rag.prefill import assemble, selective_prefill
from cachecraft_rag.prompt import PromptEncoder, RagPrompt
from cachecraft_rag.request import Request
from cachecraft_rag.result import AnswerStream, FinishReason, GenerationResult
from cachecraft_rag.sampling import Sampler
from cachecraft_rag.selection import POLICIES
from cachecraft_rag.store import ChunkStore
from cachecraft_rag.store.build import open_store
from cachecraft_rag.verify import VerifyReport, verify


class CacheCraftEngine:
    """Answers prompts whose chunks are reused from a store.

    Args:
        model: A transformers causal language model; put into evaluation mode.
        tokenizer: Its tokenizer.
        config: Settings.
        store: Where chunk KV is kept; ``None`` makes the tiers of ``config.store``.

    Attributes:
        library: The chunks: texts that are looked for in prompts, and their KV.
        prompts: Renders and tokenises prompts.
        context_window: Largest prompt plus answer in tokens; ``None`` without a limit.
        fallback_reason: Why this model can't reuse chunks at all; ``None`` when it can.
    """

    def __init__(
        self, model: Any, tokenizer: Any, config: EngineConfig | None = None, store: ChunkStore | None = None
    ) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"model: {type(model).__name__} is an encoder-decoder; give a causal language model")
        self.config = config or EngineConfig()
        self.model = model.eval()
        self.prompts = PromptEncoder(tokenizer)
        self._adapter = ModelAdapter(model)
        self._state = ModelState(model)
        self._capability = probe(self._adapter)
        store = store if store is not None else open_store(self.config.store)
        self.library = ChunkLibrary(self._adapter, self._state, self.prompts, self.config, store)
        self.context_window = self.config.context_window or context_window(self._adapter.config, tokenizer)
        self.fallback_reason = self._capability.reason
        self._eos_ids = end_of_sequence_ids(model, tokenizer)
        self._warned: set[str] = set()
        self._is_closed = False
        if self.fallback_reason is not None:
            self._warn(self.fallback_reason)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        config: EngineConfig | None = None,
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        store: ChunkStore | None = None,
    ) -> CacheCraftEngine:
        """Load a model by name.

        Args:
            name: A local folder, the alias ``smollm2-135m``, or a hub id.
            config: Settings.
            dtype: A torch dtype or its name; ``"auto"`` takes the checkpoint's.
            device: Where to run; ``None`` takes the first GPU, else the CPU.
            store: Where chunk KV is kept; ``None`` makes the tiers of ``config.store``.

        Raises:
            ValueError: There is no such model, or it lacks a tokenizer.
        """
        model, tokenizer = load(name, dtype, device)
        return cls(model, tokenizer, config, store)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self.prompts.tokenizer

    @property
    def fingerprint(self) -> str:
        """Identity of the model as it is now (weights, configuration, adapters), 32 hexadecimal digits."""
        return self._state.fingerprint()

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed."""
        return self._is_closed

    @property
    def store(self) -> ChunkStore:
        """Where chunk KV is kept."""
        return self.library.store

    def generate(
        self,
        prompt: RagPrompt,
        *,
        reuse: bool = True,
        recompute: RecomputeConfig | None = None,
        namespace: str | None = None,
        **sampling: Any,
    ) -> GenerationResult:
        """Answer a prompt.

        Args:
            prompt: The prompt.
            reuse: ``False`` prefills the same ids in the ordinary way: the reference.
            recompute: Policy and ratio for this request; ``None`` takes the engine's.
            namespace: Whose chunks are reused and stored; ``None`` takes the engine's.
            **sampling: Fields of ``SamplingConfig``: max_new_tokens, temperature, top_p, top_k, repetition_penalty,
                seed, stop.

        Raises:
            PromptTooLongError: The prompt fills the context window.
            ValueError: A sampling field has a value that is not allowed.
        """
        stream = self.stream(prompt, reuse=reuse, recompute=recompute, namespace=namespace, **sampling)
        for _ in stream:
            continue
        return stream.result

    def stream(
        self,
        prompt: RagPrompt,
        *,
        reuse: bool = True,
        recompute: RecomputeConfig | None = None,
        namespace: str | None = None,
        **sampling: Any,
    ) -> AnswerStream:
        """Answer a prompt piece by piece; arguments and errors as in ``generate``.

        Errors in the arguments are raised here, errors during generation where the deltas are taken.
        """
        started = time.perf_counter()
        if self._is_closed:
            raise RuntimeError("this engine is closed; make a new one")
        if not isinstance(prompt, RagPrompt):
            raise TypeError(
                f"prompt: {type(prompt).__name__} is no RagPrompt; see RagPrompt.from_text and from_messages"
            )
        settings = SamplingConfig.of(self.config.max_new_tokens, sampling)
        namespace = self._namespace(namespace)
        self.library.register(prompt.chunks, namespace)
        encoded = self.prompts.encode(prompt, self.library.registry, namespace)
        num_tokens = len(encoded.token_ids)
        if num_tokens == 0:
            raise ValueError("prompt: '' renders to no tokens; give a question, a chunk or a message")
        if self.context_window is not None:
            if num_tokens >= self.context_window:
                raise PromptTooLongError(num_tokens, self.context_window)
            room = min(settings.max_new_tokens, self.context_window - num_tokens)
            settings = settings.model_copy(update={"max_new_tokens": room})
        request = Request(encoded, settings, recompute or self.config.recompute, namespace, started)
        return AnswerStream(self._answer(request, reuse))

    def generate_batch(self, prompts: Sequence[RagPrompt], **options: Any) -> list[GenerationResult]:
        """Answer several prompts, one after another; results in the same order. Options as in ``generate``."""
        return [self.generate(prompt, **options) for prompt in prompts]

    def warm(self, texts: Iterable[str], show_progress: bool = False, namespace: str | None = None) -> int:
        """Compute and store the KV of chunks ahead of time, and look for their texts in later prompts.

        Args:
            texts: Chunk texts.
            show_progress: Whether to show a progress bar.
            namespace: Whose chunks these are; ``None`` takes the engine's.

        Returns:
            How many chunks were computed; those already stored are left alone.
        """
        texts, namespace = as_texts(texts), self._namespace(namespace)
        self.library.register(texts, namespace)
        reason = self._reason(0)
        if reason is not None:
            self._warn(reason)
            return 0
        return self.library.warm(texts, namespace, show_progress)

    def register(self, texts: Iterable[str], namespace: str | None = None) -> int:
        """Look for these chunk texts in later prompts of the namespace; returns how many are new."""
        return self.library.register(texts, self._namespace(namespace))

    def invalidate(self, texts: Iterable[str] | None = None, namespace: str | None = None) -> int:
        """Forget chunks and drop their KV, computed behind whatever.

        Args:
            texts: Chunk texts; ``None`` means everything in the namespace.
            namespace: Whose chunks; ``None`` takes the engine's.

        Returns:
            How many stored entries were dropped.
        """
        return self.library.invalidate(None if texts is None else as_texts(texts), self._namespace(namespace))

    def verify(self) -> VerifyReport:
        """Measure the identities that reuse rests on.

        Raises:
            UnsupportedModelError: The model can't reuse chunks, or an identity does not hold.
        """
        return verify(self._adapter, self._capability, type(self.model).__name__)

    def close(self) -> None:
        """Release the stored KV; the engine can't answer afterwards. Closing twice is harmless."""
        if not self._is_closed:
            self._is_closed = True
            self.library.close()

    def __enter__(self) -> CacheCraftEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _answer(self, request: Request, reuse: bool) -> Generator[str, None, GenerationResult]:
        reason = self._reason(request.capacity) if reuse else "reuse=False"
        if reason is None and not request.encoded.spans:
            self._full_prefill(request, "no known chunk in the prompt")
        elif reason is None:
            self._reuse(request)
        else:
            if reuse:
                self._warn(reason)
            self._full_prefill(request, reason)
        assert request.logits is not None
        assert request.next_logits is not None

        sampling, prompt_ids = request.sampling, request.encoded.token_ids
        sampler = Sampler(sampling, prompt_ids, request.logits.device)
        detokenizer = Detokenizer(lambda ids: self.prompts.decode(ids, skip_special_tokens=True), sampling.stop)
        token_ids: list[int] = []
        first_token_at = time.perf_counter()
        for token_id in decode(request.logits, request.next_logits, sampler, self._eos_ids, sampling.max_new_tokens):
            if not token_ids:
                first_token_at = time.perf_counter()
            token_ids.append(token_id)
            if delta := detokenizer.push(token_id):
                yield delta
            if detokenizer.is_stopped:
                break
        if delta := detokenizer.finish():
            yield delta
        request.figures |= {
            "ttft_s": first_token_at - request.started,
            "decode_s": time.perf_counter() - first_token_at,
            "output_tokens": len(token_ids),
        }
        with request.timed("store_s"):
            self._keep_what_was_learnt(request)
        is_full = len(token_ids) == sampling.max_new_tokens and not detokenizer.is_stopped
        finish_reason: FinishReason = "length" if is_full else "stop"
        return GenerationResult(detokenizer.text, tuple(token_ids), request.stats(), finish_reason)

    def _reuse(self, request: Request) -> None:
        """Look up, plan, encode what is missing, place, select, recompute."""
        policy = POLICIES[request.recompute.policy]
        ratio = {"none": 0.0, "all": 1.0}.get(policy.name, request.recompute.ratio)
        with request.timed("load_s"):
            request.chunks = self.library.look_up(request.encoded, request.namespace)
            request.count_lookups()
        spans = [(span.start, span.end) for span in request.encoded.spans]
        stored = [chunk.chunk_kv is not None for chunk in request.chunks]
        exact = [chunk.is_exact for chunk in request.chunks]
        plan = request.plan = make_plan(request.num_tokens, spans, stored, exact, ratio)
        with request.timed("encode_s"):
            measure = policy.needs_sensitivity and self.config.encode.sensitivity == "inline"
            num_encoded, num_stored = self.library.encode_missing(plan, request.chunks, with_sensitivity=measure)
        chunk_kvs = [chunk.chunk_kv for chunk in request.chunks]
        assert self._capability.rope is not None
        with request.timed("load_s"):
            request.kv = self._adapter.new_kv(request.capacity)
            assemble(plan, chunk_kvs, self._capability.rope, request.kv)
        token_ids = torch.tensor(request.encoded.token_ids)
        prefill = selective_prefill(
            self._adapter, plan, chunk_kvs, token_ids, request.kv, policy, request.recompute.seed
        )
        request.logits, request.next_logits = prefill.logits, buffer_decoder(self._adapter, request.kv)
        request.count_tokens(prefill.selected)
        token_layers = prefill.token_layers + num_encoded * self._adapter.num_layers
        request.figures |= {
            "charged_ratio": token_layers / (request.num_tokens * self._adapter.num_layers),
            "select_s": prefill.select_s,
            "prefill_s": prefill.prefill_s,
            "policy": policy.name,
            "stored_tokens": num_stored,
        }

    def _full_prefill(self, request: Request, reason: str) -> None:
        """Compute the whole prompt in the ordinary way."""
        request.figures |= {"prefilled_tokens": request.num_tokens, "fallback_reason": reason, "policy": "full_prefill"}
        with request.timed("prefill_s"):
            if self._capability.reason is None:
                request.kv = self._adapter.new_kv(request.capacity)
                request.logits = self._adapter.forward_plain(torch.tensor(request.encoded.token_ids), request.kv)
                request.next_logits = buffer_decoder(self._adapter, request.kv)
            else:
                plain = PlainDecoder(self._adapter.model, self._adapter.device)
                request.logits = plain.prefill(list(request.encoded.token_ids))
                request.next_logits = plain.next_logits

    def _keep_what_was_learnt(self, request: Request) -> None:
        """After the answer: measure new chunks' sensitivity, and keep KV that turned out exact."""
        plan, kv = request.plan, request.kv
        if plan is None or kv is None:
            return
        if plan.ratio >= 1.0 and self.config.keep_exact:
            request.figures["stored_tokens"] += self.library.keep_exact(plan, request.chunks, kv)
        elif 0.0 < plan.ratio < 1.0 and POLICIES[request.recompute.policy].needs_sensitivity:
            self.library.measure_new(request.chunks)

    def _namespace(self, namespace: str | None) -> str:
        if namespace == "":
            raise ValueError("namespace: '' is empty; give a name, or None for the engine's own")
        return self.config.namespace if namespace is None else namespace

    def _reason(self, num_tokens: int) -> str | None:
        return self._capability.reason_for(num_tokens) or self._state.intervention()

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"prompts are prefilled in full: {reason}", UserWarning, stacklevel=3)
