"""Every engine a user could pick instead, on the same questions: time to first token, cost and faithfulness.

    benchmarks/rivals/install.sh RIVALS
    python benchmarks/replay.py --model FOLDER --data FOLDER --rivals RIVALS [--requests 30] [--out replay]

A stream of questions about contracts and a manual, some of them again and again, each with the five to eight chunks
that a retriever finds, in its order. All engines have the same weights in the same precision, the same threads and the
same budget of memory for kept KV, and a process of their own; every engine answers a question before any gets the
next. Answers are compared with those of the engine's own full prefill, which are made afterwards.

Results are written as they come, one file per engine in the folder of results; a run that was interrupted goes on where
it stopped, and engines may be added to it. An engine that can't be started has a row that says why.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm.auto import tqdm
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.replay_report import as_markdown, as_rich, plot, summarise
from benchmarks.results_file import ResultsFile
from benchmarks.rivals.base import Prompt, Settings
from benchmarks.rivals.catalogue import BY_NAME, ENGINES, Entry
from benchmarks.rivals.process import EngineError, EngineProcess
from benchmarks.stream import Asked, load_asked, make_stream, recurrence
from benchmarks.workload import machine
from cachecraft_rag import RagPrompt
from cachecraft_rag.evaluate.questions import INSTRUCTION
from cachecraft_rag.prompt import PromptEncoder
from cachecraft_rag.store_config import parse_bytes


class Replay:
    """One run over a stream.

    Args:
        stream: The questions, as they come.
        prompts: Renders and counts.
        arguments: Of the command line.
    """

    def __init__(self, stream: list[Asked], prompts: PromptEncoder, arguments: argparse.Namespace) -> None:
        self._stream, self._arguments = stream, arguments
        self.prompts = {one.id: _prompt(one, prompts) for one in stream}
        longest = max(len(prompts.encode_text(prompt.text)) for prompt in self.prompts.values())
        room = longest + arguments.max_new_tokens + 64  # tokenisers cut the seams of a prompt in other ways
        self._window = -(-room // 256) * 256
        self._greeting = _prompt(Asked("greeting", "Are you ready?", ()), prompts)
        names = ("model", "dtype", "start", "requests", "distinct", "zipf", "seed", "threads", "memory")
        self._run = {name: getattr(arguments, name) for name in (*names, "max_new_tokens", "chunk_tokens")}
        self._files = {entry.name: ResultsFile(arguments.out / f"{entry.name}.jsonl", self._run) for entry in ENGINES}
        self._running: dict[str, EngineProcess] = {}
        self._session = int(time.time())
        self.failures: dict[str, str] = {}

    @property
    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Answers by engine, in the order of the stream."""
        return {name: self._answered(name) for name in self._files}

    def play(self, names: list[str]) -> None:
        """Ask engines everything that they have not answered yet, one question after the other."""
        try:
            for entry in self._needed(names):
                self._start(entry)
            draw = random.Random(self._arguments.seed)
            for number, one in enumerate(tqdm(self._stream, desc="replay", unit="question")):
                order = list(self._running)
                draw.shuffle(order)  # none always runs behind the same other
                for name in order:
                    if number >= len(self._answered(name)):
                        self._ask(name, number, one)
            self._answer_cold()
        finally:
            for process in self._running.values():
                process.close()

    @property
    def indexed(self) -> dict[str, float]:
        """Seconds to prepare for all chunks, by engine; what one of our presets computed the others read."""
        found = {name: [row["index_s"] for row in file.rows if "index_s" in row] for name, file in self._files.items()}
        return {name: max(seconds) for name, seconds in found.items() if seconds}

    def cold(self) -> dict[str, dict[str, str]]:
        """Answers of full prefill by ``Entry.cold`` and question."""
        found: dict[str, dict[str, str]] = {}
        for entry in ENGINES:
            texts = found.setdefault(entry.cold, {})
            file = self._files[entry.name]
            texts.update({row["id"]: row["cold"] for row in file.rows if "cold" in row})
            if any(row.get("keeps") is False for row in file.rows):
                texts.update({row["id"]: row["text"] for row in self._answered(entry.name)})
        return found

    def _needed(self, names: list[str]) -> list[Entry]:
        """Engines that have something to do: questions left, or full prefill for all that answer alike."""
        known = self.cold()
        groups = {
            BY_NAME[name].cold for name in names if any(one not in known[BY_NAME[name].cold] for one in self.prompts)
        }
        needed = []
        for entry in (BY_NAME[name] for name in names):
            if len(self._answered(entry.name)) < len(self._stream) or entry.cold in groups:
                needed.append(entry)
                groups.discard(entry.cold)
        return needed

    def _start(self, entry: Entry) -> None:
        """Load an engine, let it prepare, and bring it to where it was when an earlier run ended."""
        python = entry.python(self._arguments.rivals)
        if python is None:
            self.failures[entry.name] = f"not installed: benchmarks/rivals/install.sh FOLDER {entry.environment}"
            return
        arguments = self._arguments
        options = dict(entry.options)
        if "preset" in options:
            options["shared"] = str(arguments.out.resolve() / "chunks")
        if "preset" in options and arguments.calibration is not None:
            options["calibration"] = str(arguments.calibration.resolve())
        limits = (arguments.threads, arguments.memory, self._window)
        settings = Settings(str(Path(arguments.model).resolve()), arguments.dtype, *limits, options)
        print(f"starting {entry.title}", file=sys.stderr)
        try:
            process = EngineProcess(python, entry.module, settings, arguments.out / f"{entry.name}.log")
        except EngineError as error:
            self.failures[entry.name] = str(error)
            return
        self._running[entry.name] = process
        try:
            self._prepare(entry.name, process)
        except EngineError as error:
            self._drop(entry.name, error)

    def _prepare(self, name: str, process: EngineProcess) -> None:
        """Warm an engine up, have it take in the chunks, and ask again what it answered in an earlier run."""
        process.ask(self._greeting, 8)
        started: dict[str, Any] = {"keeps": process.keeps, "ready_s": process.ready_s}
        answered = len(self._answered(name))
        if answered < len(self._stream):
            chunks = {chunk for one in self._stream for chunk in one.chunks} if self._run["start"] == "indexed" else ()
            started |= process.index(sorted(chunks))
            for one in self._stream[:answered] if process.keeps else ():
                process.ask(self.prompts[one.id], 1)
        self._files[name].append(started)

    def _ask(self, name: str, number: int, one: Asked) -> None:
        try:
            answer = self._running[name].ask(self.prompts[one.id], self._arguments.max_new_tokens)
        except EngineError as error:
            self._drop(name, error)
        else:
            self._files[name].append({"number": number, "id": one.id, "session": self._session, **answer})

    def _answer_cold(self) -> None:
        known = self.cold()
        asked: dict[str, str] = {}
        for name in self._running:  # one engine for all that answer alike
            asked.setdefault(BY_NAME[name].cold, name)
        for group, name in asked.items():
            missing = [one for one in self.prompts if one not in known[group]]
            for one in tqdm(missing, desc=f"full prefill of {name}", unit="question"):
                try:
                    text = self._running[name].cold(self.prompts[one], self._arguments.max_new_tokens)
                except EngineError as error:
                    self._drop(name, error)
                    break
                self._files[name].append({"id": one, "cold": text})

    def _drop(self, name: str, error: EngineError) -> None:
        self.failures[name] = str(error)
        self._running.pop(name).close()

    def _answered(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self._files[name].rows if "number" in row]


def main() -> None:
    """Play, print the table, write it and the plot."""
    arguments = _arguments()
    console = Console(width=150)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    asked = load_asked(arguments.data, tokenizer, arguments.chunk_tokens, arguments.seed)
    stream = make_stream(asked, arguments.requests, arguments.distinct, arguments.zipf, arguments.seed)
    replay = Replay(stream, PromptEncoder(tokenizer), arguments)
    seen, behind, again = recurrence(stream)
    title = f"{Path(arguments.model).name}, {arguments.dtype}, {len(stream)} requests, store {arguments.start}"
    lines = [
        f"{title}; {machine()}",
        f"{len(replay.prompts)} different questions, {again:.0%} of requests repeat one; chunk look-ups seen before: "
        f"{seen:.0%}, behind the same beginning: {behind:.0%}",
    ]
    console.print(*lines, sep="\n", highlight=False)
    replay.play(arguments.engines)
    chosen = [entry for entry in ENGINES if entry.name in arguments.engines or replay.rows[entry.name]]
    summaries = summarise(chosen, replay.rows, replay.cold(), replay.failures, replay.indexed)
    console.print(as_rich(summaries, title))
    (arguments.out / "replay.md").write_text("\n\n".join([*lines, as_markdown(summaries)]) + "\n", encoding="utf-8")
    plot(summaries, title, arguments.out / "replay.png")
    console.print(f"wrote {arguments.out / 'replay.md'} and {arguments.out / 'replay.png'}")


def _prompt(one: Asked, prompts: PromptEncoder) -> Prompt:
    parts = RagPrompt(system=INSTRUCTION, chunks=one.chunks, question=f"Question: {one.question}\nAnswer:")
    return Prompt(prompts.render(parts), parts.system, parts.chunks, parts.question)


def _bytes(text: str) -> int:
    found = parse_bytes(text)
    assert isinstance(found, int)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, help="folder with cuad and manual_tv, questions and docs")
    parser.add_argument("--rivals", type=Path, help="folder that install.sh was given")
    parser.add_argument("--out", type=Path, default=Path("replay"), help="folder of results (default: %(default)s)")
    parser.add_argument("--engines", nargs="+", choices=list(BY_NAME), default=list(BY_NAME), metavar="NAME")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--distinct", type=int, default=100, help="questions that users know (default: %(default)s)")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent; 0 asks all alike (default: %(default)s)")
    parser.add_argument(
        "--start", choices=["indexed", "empty"], default="indexed", help="what chunk stores hold at the beginning"
    )
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every engine")
    parser.add_argument("--memory", type=_bytes, default="2GiB", help="for kept KV, of every engine (default: 2GiB)")
    parser.add_argument("--calibration", type=Path, help="of cachecraft calibrate, for our presets")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
