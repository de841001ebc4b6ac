"""The engine: tokenise, look up, plan, encode what is missing, place, select, recompute, decode.

Orchestrates and computes nothing itself. It knows chunks and prompts, and neither LlamaIndex nor LangChain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from cachecraft_rag.capability import probe
from cachecraft_rag.config import EngineConfig, RecomputeConfig, SamplingConfig
from cachecraft_rag.decode import end_of_sequence_ids
from cachecraft_rag.in_flight import requests_in_flight
from cachecraft_rag.intake import Intake, as_texts, check_timeout
from cachecraft_rag.library import ChunkLibrary
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.model_loader import context_window, load
from cachecraft_rag.model_state import ModelState
from cachecraft_rag.prefiller import Prefiller
from cachecraft_rag.prompt import PromptEncoder, RagPrompt
from cachecraft_rag.quality import Quality
from cachecraft_rag.refinement import Refinement
from cachecraft_rag.request import Request
from cachecraft_rag.result import AnswerStream, GenerationResult
from cachecraft_rag.scheduler import Scheduler
from cachecraft_rag.similar import Embed, SimilarQuestions
from cachecraft_rag.step_runner import StepRunner
from cachecraft_rag.store import ChunkStore
from cachecraft_rag.store.build import open_store
from cachecraft_rag.thread_workers import release_workers
from cachecraft_rag.verify import VerifyReport, verify


class CacheCraftEngine:
    """Answers prompts whose chunks are reused from a store.

    Args:
        model: A transformers causal language model; put into evaluation mode.
        tokenizer: Its tokenizer.
        config: Settings.
        store: Where chunk KV is kept; ``None`` makes the tiers of ``config.store``.
        embed: Sentence embeddings for ``config.similar_questions``: texts to vectors, ``[num_texts, dim]``, such as
            LlamaIndex's ``embed_model.get_text_embedding_batch`` or LangChain's ``embeddings.embed_documents``.

    Attributes:
        library: The chunks: texts that are looked for in prompts, and their KV.
        prompts: Renders and tokenises prompts.
        intake: Makes requests of prompts.
        refinement: Computes while no request runs what comes again; ``None`` unless ``config.refine`` enables it.
        context_window: Largest prompt plus answer in tokens; ``None`` without a limit.
        fallback_reason: Why this model can't reuse chunks at all; ``None`` when it can.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig | None = None,
        store: ChunkStore | None = None,
        *,
        embed: Embed | None = None,
    ) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"model: {type(model).__name__} is an encoder-decoder; give a causal language model")
        self.config = EngineConfig.model_validate(config or {})
        questions = SimilarQuestions.of(embed, self.config.similar_questions)
        self.model = model.eval()
        self.prompts = PromptEncoder(tokenizer)
        self._adapter = adapter = ModelAdapter(model)
        self._state = state = ModelState(model)
        capability = probe(adapter)
        self.fallback_reason = capability.reason
        store = store if store is not None else open_store(self.config.store, self._adapter.device)
        self.library = ChunkLibrary(adapter, state, self.prompts, self.config, store, capability)
        self._capability = self.library.capability
        self.library.questions = questions
        self.context_window = self.config.context_window or context_window(self._adapter.config, tokenizer)
        self.intake = Intake(self.prompts, self.library, self.config, Quality(self.config, state), self.context_window)
        self._prefiller = Prefiller(adapter, state, self._capability, self.library, self.config)
        self._in_flight = requests_in_flight(self._adapter.model)
        self.refinement: Refinement | None = None
        if self.config.refine.enabled:
            what = (adapter, state, self._capability, self.library)
            self.refinement = Refinement(*what, self._in_flight, self.config.refine)
        runner = StepRunner(
            adapter,
            self._prefiller,
            partial(self.prompts.decode, skip_special_tokens=True),
            end_of_sequence_ids(model, tokenizer),
            self.config.scheduler,
            one_by_one=self.fallback_reason is not None,
            in_flight=self._in_flight,
            refinement=self.refinement,
        )
        self._scheduler = Scheduler(runner, self.config.scheduler.max_waiting)
        self._is_closed = False
        if self.fallback_reason is not None:
            self._prefiller.warn(self.fallback_reason)
        release_workers()

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        config: EngineConfig | None = None,
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        store: ChunkStore | None = None,
        embed: Embed | None = None,
    ) -> CacheCraftEngine:
        """Load a model by name.

        Args:
            name: A local folder, the alias ``smollm2-135m``, or a hub id.
            config: Settings.
            dtype: A torch dtype or its name; ``"auto"`` takes the checkpoint's.
            device: Where to run; ``None`` takes the first GPU, else the CPU.
            store: Where chunk KV is kept; ``None`` makes the tiers of ``config.store``.
            embed: Sentence embeddings for ``config.similar_questions``: texts to vectors, ``[num_texts, dim]``.

        Raises:
            ValueError: There is no such model, or it lacks a tokenizer.
        """
        return cls(*load(name, dtype, device), config, store, embed=embed)

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
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> GenerationResult:
        """Answer a prompt. Called from several threads, prompts are decoded together.

        Args:
            prompt: The prompt.
            reuse: ``False`` prefills the same ids in the ordinary way: the reference.
            recompute: Policy, and ratio or target, for this request; ``None`` takes the engine's.
            namespace: Whose chunks are reused and stored; ``None`` takes the engine's.
            timeout_s: Seconds from now after which the answer is given up; ``None`` for no limit.
            **sampling: Fields of ``SamplingConfig``: max_new_tokens, temperature, top_p, top_k, repetition_penalty,
                seed, stop.

        Raises:
            PromptTooLongError: The prompt fills the context window.
            EngineBusyError: So many requests wait that another one is not taken in.
            DeadlineExceededError: ``timeout_s`` was over.
            RuntimeError: The engine was closed.
            ValueError: A sampling field has a value that is not allowed, or nothing is calibrated for the target.
        """
        request = self._request(prompt, recompute, namespace, timeout_s, sampling)
        return self._scheduler.answer_all([request], reuse, timeout_s)[0]

    def stream(
        self,
        prompt: RagPrompt,
        *,
        reuse: bool = True,
        recompute: RecomputeConfig | None = None,
        namespace: str | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> AnswerStream:
        """Answer a prompt piece by piece; arguments and errors as in ``generate``.

        Errors in the arguments are raised here, errors during generation where the deltas are taken. The request gets
        into line when the first one is.
        """
        request = self._request(prompt, recompute, namespace, timeout_s, sampling)
        return AnswerStream(self._scheduler.stream(request, reuse, timeout_s))

    def generate_batch(
        self,
        prompts: Sequence[RagPrompt],
        *,
        reuse: bool = True,
        recompute: RecomputeConfig | None = None,
        namespace: str | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> list[GenerationResult]:
        """Answer several prompts, decoded together; results in the same order. Arguments and errors as in ``generate``.

        An error in a prompt is raised before anything is computed; when an answer fails, the others are given up.
        """
        requests = [self._request(prompt, recompute, namespace, timeout_s, sampling) for prompt in prompts]
        return self._scheduler.answer_all(requests, reuse, timeout_s)

    def warm(
        self,
        texts: Iterable[str],
        show_progress: bool = False,
        namespace: str | None = None,
        *,
        document_id: str | None = None,
        static: bool = False,
    ) -> int:
        """Compute and store the KV of chunks ahead of time, and look for their texts in later prompts.

        Args:
            texts: Chunk texts; best all of an application, as they are computed behind those that are most like them.
            show_progress: Whether to show a progress bar.
            namespace: Whose chunks these are; ``None`` takes the engine's.
            document_id: The document they were cut from, for ``invalidate``.
            static: Whether they live as long as the store: never out of date, and never pushed out of the hot tier.

        Returns:
            How many chunks were computed; those already stored are left alone.
        """
        texts, namespace = as_texts(texts), self._namespace(namespace)
        self.library.register(texts, namespace, document_id)
        reason = self._prefiller.reason(0)
        if reason is not None:
            self._prefiller.warn(reason)
            return 0
        with self._in_flight:
            return self.library.warm(texts, namespace, show_progress, static)

    def is_stored(self, texts: Iterable[str], namespace: str | None = None) -> list[bool]:
        """Whether KV of each chunk text is stored, in any tier and made behind whatever; loads nothing."""
        return self.library.is_stored(as_texts(texts), self._namespace(namespace))

    def prefetch(self, texts: Iterable[str], namespace: str | None = None) -> int:
        """Begin to load the KV of chunks from disk or remote into memory, while the user still types.

        Args:
            texts: Chunk texts; those not stored, or in memory already, are left alone.
            namespace: Whose chunks; ``None`` takes the engine's.

        Returns:
            How many entries are on their way; it does not wait for them.
        """
        return self.library.prefetch(as_texts(texts), self._namespace(namespace))

    def prefetch_similar(self, question: str, namespace: str | None = None) -> int:
        """Begin to load the chunks that the most similar earlier question had, while the retriever still searches.

        Args:
            question: The new question, as it will stand in ``RagPrompt.question``.
            namespace: Whose questions; ``None`` takes the engine's.

        Returns:
            How many entries are on their way; 0 where no question is similar enough, or ``config.similar_questions``
            is off.
        """
        questions, namespace = self.library.questions, self._namespace(namespace)
        return 0 if questions is None else self.library.prefetch_chunks(questions.chunks_of(question, namespace))

    def register(self, texts: Iterable[str], namespace: str | None = None, document_id: str | None = None) -> int:
        """Look for these chunk texts, perhaps of one document, in later prompts; returns how many are new."""
        return self.library.register(as_texts(texts), self._namespace(namespace), document_id)

    def invalidate(
        self,
        texts: Iterable[str] | None = None,
        namespace: str | None = None,
        *,
        document_ids: Iterable[str] | None = None,
    ) -> int:
        """Forget chunks and drop their KV from every tier, computed behind whatever, and what was computed behind them.

        Args:
            texts: Chunk texts. Without texts and documents, everything in the namespace goes.
            namespace: Whose chunks; ``None`` takes the engine's.
            document_ids: Documents all of whose chunks go, as named in ``register`` and ``warm``, in any process that
                shares a disk or remote tier with this one.

        Returns:
            How many stored entries were dropped.
        """
        namespace = self._namespace(namespace)
        with self.library.forgetting.forgetting(namespace):
            if self.refinement is not None:
                self.refinement.forget(namespace)
            if texts is None and document_ids is None:
                return self.library.clear(namespace)
            return self.library.invalidate(as_texts(texts or ()), as_texts(document_ids or ()), namespace)

    def verify(self) -> VerifyReport:
        """Measure the identities that reuse rests on.

        Raises:
            UnsupportedModelError: The model can't reuse chunks, or an identity does not hold.
        """
        return verify(self._adapter, self._capability, type(self.model).__name__)

    def close(self) -> None:
        """End the requests that run with an error, and release the stored KV. Closing twice is harmless."""
        if not self._is_closed:
            self._is_closed = True
            self._scheduler.close()
            if self.refinement is not None:
                self.refinement.close()
            self.library.close()

    def __enter__(self) -> CacheCraftEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def prefill(self, request: Request, reuse: bool) -> None:
        """Fill in what a request knows before its first token: logits, decoding step, figures."""
        self._prefiller.run(request, reuse)

    def _request(
        self,
        prompt: RagPrompt,
        recompute: RecomputeConfig | None,
        namespace: str | None,
        timeout_s: float | None,
        sampling: dict[str, Any],
    ) -> Request:
        namespace = self._namespace(namespace)
        check_timeout(timeout_s)
        return self.intake.take(prompt, SamplingConfig.of(self.config.max_new_tokens, sampling), recompute, namespace)

    def _namespace(self, namespace: str | None) -> str:
        """The namespace of a call, which an engine that was closed refuses."""
        if self._is_closed:
            raise RuntimeError("this engine is closed; make a new one")
        return self.intake.namespace(namespace)
