"""Completions -> submission: decoding that can be rerun without a model."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from panjue.prompts.errors import UserError
from panjue.prompts.files import Rows, dump, read_json, sha256, whole_file, write_json
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.task import Answer, Example, Task, load_task


@dataclass
class Tally:
    """What decoding met, over all examples of a run."""

    examples: int = 0
    valid: int = 0
    repaired: int = 0
    unreadable: int = 0
    cut: int = 0
    refused: int = 0
    shortened: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    near_ties: int = 0
    repairs: Counter[str] = field(default_factory=Counter)

    def lines(self) -> Iterator[str]:
        """Yield the summary for a person."""
        yield (
            f"{self.examples} examples: {self.valid} replies valid as they came, "
            f"{self.repaired} repaired, "
            f"{self.unreadable} unreadable (answered by the commonest labels)"
        )
        yield (
            f"{self.cut} cut by length, {self.refused} too long to ask, "
            f"{self.shortened} shortened to fit"
        )
        share = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0
        yield (
            f"{self.prompt_tokens:,} prompt tokens ({share:.0%} from the cache), "
            f"{self.completion_tokens:,} output tokens"
        )
        if self.near_ties:
            yield f"{self.near_ties} greedy replies pass a near tie: another run may differ there"
        yield from (f"  {count:5d} × {kind}" for kind, count in self.repairs.most_common(8))


def decode_run(run: Path) -> Tally:
    """Write `submission.jsonl` and `decode.json` of a run from its `completions.jsonl`.

    Every example of the test file is answered once, in its order; one without a completion, or
    whose reply is unreadable, by the commonest labels, which is counted.

    Raises:
        UserError: The run has no completions, misses some, or the test file has changed since.
    """
    made = read_json(run / "manifest.json").get("generate")
    if made is None:
        raise UserError(f"{run}: has no completions yet; run `panjue generate` first")
    test = Path(made["test"])
    if not test.exists() or sha256(test) != made["test_sha256"]:
        raise UserError(
            f"{test}: missing, or not the file that {run}/completions.jsonl was made from"
        )
    return decode(load_task(made["task"]), test, load_labels(run / "labels.json"), run)


def decode(task: Task, test: Path, labels: Labels, run: Path) -> Tally:
    """Decode the completions in `run` for the examples in `test`; see `decode_run`."""
    completions = Rows(run / "completions.jsonl")
    tally = Tally()
    with whole_file(run / "submission.jsonl") as out:
        for example in task.read(test):
            completion = completions.get(example.id)
            if completion is None:
                raise UserError(
                    f"{completions.path}: no row for id {example.id}; "
                    "run `panjue generate` again, it continues where it stopped"
                )
            answer = _answer(task, example, completion, labels, tally)
            out.write(dump(task.submission(example, answer)) + "\n")
    report = {**vars(tally), "repairs": dict(tally.repairs.most_common())}
    write_json(run / "decode.json", report)
    return tally


def _answer(
    task: Task, example: Example, completion: dict[str, Any], labels: Labels, tally: Tally
) -> Answer:
    """Decode one completion (its first sample) and count what happened."""
    refused = completion.get("refused") is not None
    decoded = task.decode("" if refused else completion["texts"][0], example, labels)
    tally.examples += 1
    tally.refused += refused
    if not refused:
        tally.cut += completion["finish"][0] == "length"
        tally.shortened += completion["dropped_sentences"] > 0
        tally.prompt_tokens += completion["prompt_tokens"]
        tally.cached_tokens += completion["cached_tokens"]
        tally.completion_tokens += completion["completion_tokens"]
        tally.near_ties += bool(completion["near_ties"])
        tally.unreadable += not decoded.readable
        tally.valid += not decoded.repairs
        tally.repaired += bool(decoded.repairs) and decoded.readable
        # The part before the colon is the defendant's name, the part after the kind of repair.
        tally.repairs.update(text.rpartition(": ")[2] for text in decoded.repairs)
    return decoded.answer
