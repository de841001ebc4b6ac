"""What an earlier, similar question is worth: divergence at equal charge, and the time that its scores save.

    python benchmarks/similar.py --model FOLDER --data QUESTIONS.jsonl --embedding FOLDER [--pairs 12]

Pairs of questions of a file whose cosine is above the threshold are asked about the same chunks: those that the
embedding finds for the second one, in another order each time. The second one is answered with its own scores, with
those of the first one in their place (nothing is run to choose tokens, and what that saves goes into recomputing
more), with both, and with those of a question about something else. Questions that only differ in case or punctuation
make no pair.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workload import machine
from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig
from cachecraft_rag.evaluate import (
    answer_and_score,
    bootstrap_mean,
    bootstrap_median,
    charge_for,
    kl_divergence,
    normalise,
    paired_difference,
    score,
)
from cachecraft_rag.evaluate.questions import INSTRUCTION

OWN = "own scores"


class SentenceEmbedding:
    """Texts to vectors with a model of the BERT kind from a local folder: mean of the last layer, length 1."""

    def __init__(self, folder: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        batch = self._tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        mask = batch["attention_mask"][:, :, None].float()
        mean = (self._model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        vectors: np.ndarray[Any, np.dtype[np.float32]] = torch.nn.functional.normalize(mean, dim=1).numpy()
        return vectors


@dataclass(frozen=True)
class Pair:
    """Two similar questions, one about something else, and the chunks of the second one."""

    first: str
    second: str
    other: str
    similarity: float
    chunks: tuple[str, ...]


def find_pairs(data: Path, embed: SentenceEmbedding, count: int, num_chunks: int, threshold: float) -> list[Pair]:
    """Pairs of questions, drawn evenly from all that are similar enough; every question is in one at most."""
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    documents = [row["text"].strip() for row in map(json.loads, _beside(data).read_text(encoding="utf-8").splitlines())]
    documents = list(dict.fromkeys(text for text in documents if text))
    questions = list(dict.fromkeys(row["question"] for row in rows))
    asked, known = _vectors(embed, questions), _vectors(embed, documents)
    cosines = asked @ asked.T
    found = [
        (a, b)
        for a, b in zip(*np.nonzero(np.triu(cosines, 1) >= threshold), strict=True)
        if normalise(questions[a]) != normalise(questions[b])
    ]
    random.Random(0).shuffle(found)
    pairs: list[Pair] = []
    used: set[int] = set()
    for first, second in found:
        if len(pairs) == count:
            break
        if used.isdisjoint((first, second)):
            used |= {first, second}
            chunks = [documents[index] for index in (known @ asked[second]).argsort()[::-1][:num_chunks]]
            other = questions[int(cosines[second].argmin())]
            pair = (questions[first], questions[second], other, float(cosines[first, second]), tuple(chunks))
            pairs.append(Pair(*pair))
    return pairs


def measure(engines: dict[str, CacheCraftEngine], pair: Pair, charged: float, tokens: int) -> list[dict[str, Any]]:
    """One row per variant: what the second question's answer lost, and what choosing the tokens took."""
    plain, rows = engines[OWN], []
    prompt = _prompt(pair.second, pair.chunks)
    plain.warm(pair.chunks)
    reference = answer_and_score(plain, prompt, max_new_tokens=tokens, stop=("\n",), reuse=False)
    answer = reference.answer.token_ids or (0,)
    with_pass = charge_for(plain, prompt, RecomputeConfig(), charged).recompute
    without = charge_for(plain, prompt, RecomputeConfig(policy="chunk_start"), charged).recompute.ratio
    for name, engine in engines.items():
        recompute = with_pass
        if engine is not plain:
            chunks = list(pair.chunks)
            random.Random(pair.first).shuffle(chunks)
            earlier = _prompt(pair.other if name == "unrelated scores" else pair.first, tuple(chunks))
            engine.generate(earlier, max_new_tokens=1, recompute=with_pass)
            if engine.config.similar_questions.skip_pass:
                recompute = with_pass.changed(ratio=without)
        scored = score(engine, prompt, answer, recompute=recompute)
        if (scored.stats.similarity is None) != (engine is plain):
            raise RuntimeError(f"{name}: similarity {scored.stats.similarity}")
        figures = {field: getattr(scored.stats, field) for field in ("charged_ratio", "select_s", "ttft_s")}
        kl = float(kl_divergence(reference.logits, scored.logits).mean())
        rows.append({"variant": name, "similarity": pair.similarity, "kl": kl, **figures})
        if engine is not plain:
            assert engine.library.questions is not None
            engine.library.questions.forget(engine.config.namespace)
    return rows


def make_engines(
    plain: CacheCraftEngine, embed: SentenceEmbedding, threshold: float, weight: float
) -> dict[str, CacheCraftEngine]:
    """One engine per variant, on one model and one store."""

    def engine(skip_pass: bool, embedding: Any) -> CacheCraftEngine:
        similar = {"enabled": True, "threshold": threshold, "skip_pass": skip_pass, "weight": weight}
        config = EngineConfig.model_validate(plain.config.model_dump() | {"similar_questions": similar})
        return CacheCraftEngine(plain.model, plain.tokenizer, config, plain.store, embed=embedding)

    return {
        OWN: plain,
        "earlier scores": engine(True, embed),
        "both": engine(False, embed),
        "unrelated scores": engine(True, lambda texts: np.ones((len(texts), 2))),  # everything counts as similar
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    """All variants in Markdown, beside the second question's own scores."""
    by_variant = defaultdict(list)
    for row in rows:
        by_variant[row["variant"]].append(row)
    header = ("variant", "charged", "mean KL", "median KL", "KL beyond own", "select s", "TTFT s")
    lines = [header, ("---",) * len(header)]
    own = [row["kl"] for row in by_variant[OWN]]
    for name, found in by_variant.items():
        kl = [row["kl"] for row in found]
        median = {field: float(np.median([row[field] for row in found])) for field in ("select_s", "ttft_s")}
        lines.append(
            (
                name,
                f"{np.mean([row['charged_ratio'] for row in found]):.3f}",
                f"{bootstrap_mean(kl):.4f}",
                f"{bootstrap_median(kl):.4f}",
                "" if name == OWN else f"{paired_difference(kl, own):.4f}",
                f"{median['select_s']:.3f}",
                f"{median['ttft_s']:.3f}",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Measure all pairs and print the table."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    embed = SentenceEmbedding(arguments.embedding)
    pairs = find_pairs(arguments.data, embed, arguments.pairs, arguments.chunks, arguments.threshold)
    config = EngineConfig.model_validate({"store": {"cold": {"size": arguments.memory}}})
    rows: list[dict[str, Any]] = []
    with CacheCraftEngine.from_pretrained(arguments.model, config, dtype=arguments.dtype) as plain:
        engines = make_engines(plain, embed, arguments.threshold, arguments.weight)
        for pair in tqdm(pairs, unit="pair"):
            rows += measure(engines, pair, arguments.charged, arguments.max_new_tokens)
            if arguments.out is not None:
                arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    similarity = np.mean([pair.similarity for pair in pairs])
    print(f"{arguments.model}, {arguments.dtype}, {machine()}")
    print(f"{len(pairs)} pairs, mean cosine {similarity:.3f}, {arguments.chunks} chunks, charged {arguments.charged}\n")
    print(as_table(rows))


def _prompt(question: str, chunks: tuple[str, ...]) -> RagPrompt:
    return RagPrompt(system=INSTRUCTION, chunks=chunks, question=question)


def _vectors(embed: SentenceEmbedding, texts: list[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate([embed(texts[start : start + 32]) for start in range(0, len(texts), 32)])


def _beside(data: Path) -> Path:
    return data.with_name(f"{data.stem}_docs{data.suffix}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, alias or hub id")
    parser.add_argument("--dtype", default="float32", help="torch dtype (default: %(default)s)")
    parser.add_argument("--data", type=Path, required=True, help="questions, with NAME_docs.jsonl beside")
    parser.add_argument("--embedding", required=True, help="folder of a sentence embedding model, such as MiniLM")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--chunks", type=int, default=5)
    parser.add_argument("--charged", type=float, default=0.2, help="of a full prefill")
    parser.add_argument("--threshold", type=float, default=0.85, help="least cosine of a pair")
    parser.add_argument("--weight", type=float, default=0.5, help="of the earlier scores beside the own ones")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", default="1GiB", help="host memory for chunks")
    parser.add_argument("--out", type=Path, help="JSONL file of all rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
