"""How much of retrieved chunks is stored already: by splitter, under repeat traffic and under edits.

    python benchmarks/hitrate.py --model FOLDER --data cuad_docs.jsonl [--out hitrate]

No model runs: a chunk counts as stored when its text was in an earlier prompt. Three tables, also written as Markdown,
and a plot:

splitters  chunk sizes, and what 200 edits of one paragraph (inserted, deleted, or changed) leave to compute again
replay     2,000 questions, their frequencies Zipf-distributed, on 40 contracts; a TF-IDF retriever brings five chunks
           of the contract in question. Tokens found by a cache of chunks, and by a cache of prefixes in blocks of 16
           tokens, neither of which ever evicts; of all requests, and of the first for each question. The same with a
           tenth of the contracts edited half-way, and thereof the requests on these contracts afterwards
edits      the same requests while one contract after the other is edited, at several rates
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hitrate_replay import (
    Corpus,
    Edits,
    Replayed,
    Request,
    once_edited,
    replay,
    steadily_edited,
    zipf_requests,
)
from benchmarks.hitrate_splitters import COMPARED, Splitter, TokenIds, edit, paragraphs, splitters
from benchmarks.workload import machine
from cachecraft_rag.model_loader import load_tokenizer

LIMITS = range(512, 769)
TIMED_LENGTH = 60_000  # characters
EDITED_SHARE = 0.1
RATES = (0.0, 0.02, 0.05, 0.1, 0.2)  # edits per request


@dataclass(frozen=True)
class Sheet:
    """A table, for the terminal and for a file."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def as_rich(self) -> Table:
        """For the terminal."""
        table = Table(title=self.title)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def as_markdown(self) -> str:
        """For a file."""
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        return "\n".join([f"{self.title}\n", *(f"| {' | '.join(line)} |" for line in lines)])


def main() -> None:
    """Measure, print and write the three tables and the plot."""
    arguments = _arguments()
    console = Console(width=150)
    tokenizer = load_tokenizer(arguments.model)
    ids = TokenIds(tokenizer)
    documents = _rows(arguments.data)
    questions = _rows(arguments.data.with_name(arguments.data.name.replace("_docs", "")))
    every = splitters(ids.count, ids.count_many)
    named = {splitter.name: splitter for splitter in every}
    console.print(f"tokenizer of {arguments.model}, {machine()}")

    texts = [document["text"] for document in documents]
    sheets = [splitter_sheet(every, splitters(ids.count_anew, ids.count_many_anew), texts, ids, arguments)]
    console.print(sheets[-1].as_rich())
    scene = Scene.drawn(documents, questions, arguments)
    sheets.append(replay_sheet(every, scene, ids))
    console.print(sheets[-1].as_rich())
    shares = edit_shares([named[name] for name in COMPARED], scene, ids)
    sheets.append(edit_sheet(shares))
    console.print(sheets[-1].as_rich())

    arguments.out.mkdir(parents=True, exist_ok=True)
    title = f"# Hit rate by splitter, tokenizer of {Path(arguments.model).name}"
    text = "\n\n".join([title, *(sheet.as_markdown() for sheet in sheets)]) + "\n"
    (arguments.out / "hitrate.md").write_text(text, encoding="utf8")
    write_plot(shares, arguments.out / "hitrate.png", len(scene.requests))
    console.print(f"wrote {arguments.out / 'hitrate.md'} and {arguments.out / 'hitrate.png'}")


def splitter_sheet(
    every: Sequence[Splitter],
    uncounted: Sequence[Splitter],
    texts: Sequence[str],
    ids: TokenIds,
    arguments: argparse.Namespace,
) -> Sheet:
    """Sizes, time, and what edits change.

    Args:
        every: The splitters, with remembered counts.
        uncounted: The same, counting anew, to measure time.
        texts: The documents.
        ids: Counts tokens.
        arguments: Of the command.
    """
    draw = random.Random(arguments.seed)
    donors = paragraphs(texts)
    edits = [(text, edit(text, donors, draw)) for text in draw.choices(texts, k=arguments.edits)]
    longest = max(texts, key=len)[:TIMED_LENGTH]
    rows = []
    for splitter, anew in zip(tqdm(every, desc="splitters", unit="splitter"), uncounted, strict=True):
        chunks = [splitter.split(text) for text in texts]
        counts = ids.count_many([chunk for one in chunks for chunk in one])
        in_limits = sum(count in LIMITS for count in counts) / len(counts)
        lossless = sum("".join(one) == text for one, text in zip(chunks, texts, strict=True))
        changes = [changed_tokens(splitter, before, after, ids) for before, after in edits]
        redone = [sum(changed) / total for changed, total in changes]
        numbers = [len(changed) for changed, _ in changes]
        rows.append(
            (
                splitter.name,
                str(len(counts)),
                f"{statistics.mean(counts):.0f}",
                _percent(in_limits),
                f"{lossless} of {len(texts)}",
                f"{statistics.mean(numbers):.2f}",
                str(max(numbers)),
                _percent(statistics.mean(redone)),
                f"{1e3 * _seconds(anew.cut, longest):.0f}",
            )
        )
    columns = ("splitter", "chunks", "mean tokens", "in 512-768 %", "join to the text", "changed, mean", "max")
    title = f"{len(texts)} contracts, {len(edits)} edits of one paragraph; CPU time for {len(longest):,} characters"
    return Sheet(title, (*columns, "tokens redone %", "CPU ms"), rows)


def changed_tokens(splitter: Splitter, before: str, after: str, ids: TokenIds) -> tuple[list[int], int]:
    """Tokens of each chunk of the new version that the old one didn't have, and of all chunks of the new version."""
    known = {chunk.strip() for chunk in splitter.split(before)}
    chunks = [chunk.strip() for chunk in splitter.split(after) if chunk.strip()]
    counts = ids.count_many(chunks)
    return [count for chunk, count in zip(chunks, counts, strict=True) if chunk not in known], sum(counts)


@dataclass(frozen=True)
class Scene:
    """Contracts, the requests that come, paragraphs for edits, and the texts that answer each question."""

    texts: list[str]
    requests: list[Request]
    donors: list[str]
    answers: dict[Request, list[str]]
    seed: int

    @classmethod
    def drawn(
        cls, documents: Sequence[dict[str, Any]], questions: Sequence[dict[str, Any]], arguments: argparse.Namespace
    ) -> Scene:
        """Draw the contracts, and the requests among their questions."""
        draw = random.Random(arguments.seed)
        chosen = draw.sample(list(documents), min(arguments.contracts, len(documents)))
        numbers = {document["id"]: number for number, document in enumerate(chosen)}
        others = [document["text"] for document in documents if document["id"] not in numbers]
        answers = {}
        for row in questions:
            if (number := numbers.get(row["docs"][0]["id"])) is not None:
                text = chosen[number]["text"]
                answers[Request(number, row["question"])] = [text[one["start"] : one["end"]] for one in row["spans"]]
        texts = [document["text"] for document in chosen]
        requests = zipf_requests(list(answers), arguments.requests, arguments.seed)
        return cls(texts, requests, paragraphs(others or texts), answers, arguments.seed)


def replay_sheet(every: Sequence[Splitter], scene: Scene, ids: TokenIds) -> Sheet:
    """Hit rates without edits, and with some contracts edited half-way."""
    half, num_edited = len(scene.requests) // 2, round(EDITED_SHARE * len(scene.texts))
    edits = once_edited(scene.texts, scene.donors, num_edited, half, scene.seed)
    rows = []
    for splitter in tqdm(every, desc="replay", unit="splitter"):
        corpus = Corpus(scene.texts, splitter)
        num_chunks = corpus.num_chunks
        found = [corpus.holds(request, spans) for request, spans in scene.answers.items()]
        plain = replay(corpus, scene.requests, {}, ids)
        edited = replay(Corpus(scene.texts, splitter), scene.requests, edits, ids)
        late = [one for one in edited[half:] if one.request.contract in edits[half]]
        new = list({one.request: one for one in reversed(plain)}.values())
        rows.append(
            (
                splitter.name,
                str(num_chunks),
                _percent(statistics.mean(found)),
                *_shares(plain),
                *_shares(new),
                *_shares(edited),
                *_shares(late),
            )
        )
    kinds = ("all", "new questions", "edited", "edited contracts, after")
    pairs = (f"{kind}: {cache} %" for kind in kinds for cache in ("chunks", "prefixes"))
    columns = ("splitter", "chunks", "answers in top 5 %", *pairs)
    title = (
        f"{len(scene.requests):,} requests, {len(set(scene.requests))} different ones of {len(scene.answers)}, on "
        f"{len(scene.texts)} contracts, {num_edited} of them edited half-way"
    )
    return Sheet(title, columns, rows)


def edit_shares(compared: Sequence[Splitter], scene: Scene, ids: TokenIds) -> dict[str, list[float]]:
    """For each splitter, the share of tokens found by a cache of chunks at each rate of edits."""
    shares: dict[str, list[float]] = {splitter.name: [] for splitter in compared}
    for rate in tqdm(RATES, desc="edits", unit="rate"):
        edits: Edits = steadily_edited(scene.texts, scene.donors, rate, len(scene.requests), scene.seed)
        for splitter in compared:
            replayed = replay(Corpus(scene.texts, splitter), scene.requests, edits, ids)
            shares[splitter.name].append(_total(replayed, "by_chunk") / _total(replayed, "tokens"))
    return shares


def edit_sheet(shares: dict[str, list[float]]) -> Sheet:
    """Hit rates by rate of edits."""
    columns = ("splitter", *(f"{100 * rate:g}" for rate in RATES))
    rows = [(name, *(_percent(share) for share in line)) for name, line in shares.items()]
    return Sheet("Tokens found by a cache of chunks (%), by edits per 100 requests", columns, rows)


def write_plot(shares: dict[str, list[float]], path: Path, num_requests: int) -> None:
    """Hit rates over the rate of edits, one line per splitter; PNG."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, line in shares.items():
        axes.plot([100 * rate for rate in RATES], [100 * share for share in line], marker="o", label=name)
    axes.set_xlabel("edits of one paragraph per 100 requests")
    axes.set_ylabel(f"chunk tokens found in the store, {num_requests:,} requests (%)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _shares(replayed: Sequence[Replayed]) -> tuple[str, str]:
    tokens = _total(replayed, "tokens")
    return _percent(_total(replayed, "by_chunk") / tokens), _percent(_total(replayed, "by_prefix") / tokens)


def _total(replayed: Sequence[Replayed], field: str) -> int:
    return sum(getattr(one, field) for one in replayed)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _seconds(cut: Callable[[str], list[str]], text: str) -> float:
    """Processor time of one call, the best of five: that of all threads, and what else runs doesn't count."""
    times = []
    for _ in range(5):
        started = time.process_time()
        cut(text)
        times.append(time.process_time() - started)
    return min(times)


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf8") as lines:
        return [json.loads(line) for line in lines]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer counts (default: %(default)s)")
    parser.add_argument(
        "--data", type=Path, required=True, help="JSONL of documents; questions beside it, in the file without _docs"
    )
    parser.add_argument("--out", type=Path, default=Path("hitrate"), help="folder for results (default: %(default)s)")
    parser.add_argument("--contracts", type=int, default=40)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--edits", type=int, default=200, help="edits of the table of splitters")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
