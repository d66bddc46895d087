"""Completions -> submission. Decoding needs no model and can be run again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panjue.eval.classifier import CLASSIFIER_NAME
from panjue.eval.decide import Decider, decision_sha256, fitted_decider
from panjue.eval.rank import ranked
from panjue.eval.tally import Tally
from panjue.prompts.example import (
    Answer,
    Decoded,
    Example,
    call_key,
    first_reply,
    run_steps,
)
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.model import model_sha256
from panjue.prompts.plumbing.errors import Unreadable, UserError
from panjue.prompts.plumbing.files import (
    ANSWERS,
    answers_in,
    atomic_write,
    dump,
    generation,
    sha256,
    trained_in,
    write_json,
)
from panjue.prompts.plumbing.progress import counted
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import Reader
from panjue.prompts.task import Task, configured, load_task


@dataclass(frozen=True)
class Run:
    """A folder of answers: their task, test file, labels and provenance."""

    folder: Path
    reader: Reader
    test: Path
    labels: Labels
    provenance: Mapping[str, Any]

    @property
    def task(self) -> Task:
        """Return the task that was asked."""
        return self.reader.task

    @property
    def trained(self) -> Path:
        """Return the folder of the adapter or model that answered."""
        trained = trained_in(self.folder, self.provenance)
        assert trained, "an endpoint without a training has no such folder"
        return trained

    @property
    def name(self) -> str:
        """Return the name of the folder, after that of its run if it still lies there."""
        folder = self.folder.resolve()
        is_in_run = folder.parent.name == ANSWERS
        return f"{folder.parent.parent.name}/{folder.name}" if is_in_run else folder.name

    @property
    def held_out(self) -> bool:
        """Say whether the run answered only the tenth that training held out."""
        return bool(self.provenance.get("held_out"))

    def card_folder(self) -> Path | None:
        """Return the folder of the adapter that answered, here or at its old path, if unchanged."""
        digest, run = self.provenance["trained_sha256"], self.folder.resolve().parent.parent
        for folder in (run / self.trained.name, self.trained):
            if folder.is_dir() and model_sha256(folder) == digest:
                return folder
        return None

    @property
    def is_of_adapter(self) -> bool:
        """Say whether the fine-tuned model answered, not its base or an endpoint."""
        is_other = self.provenance.get("endpoint") or self.provenance.get("adapter") == "none"
        return bool(self.provenance["trained"]) and not is_other

    def examples(self) -> Iterator[Example]:
        """Yield the examples that were asked."""
        return self.reader.read(self.test)

    def completions(self) -> Iterator[tuple[Example, dict[str, Any]]]:
        """Yield every example with its row; for tasks of one call.

        Raises:
            UserError: A row is missing.
        """
        rows = self.rows()
        for example in self.examples():
            yield example, self.row(rows, {"id": example.id})

    def rows(self) -> Rows:
        """Return the rows of all calls.

        Raises:
            UserError: A row is broken.
        """
        try:
            return Rows(self.folder / "completions.jsonl", key=call_key)
        except Unreadable as error:
            raise Unreadable(f"{error}; run `panjue generate`") from None
        except UserError as error:
            raise UserError(
                f"{error}; `panjue generate` again drops it if it is the last line, cut by a "
                "kill; delete any other broken line by hand: generate asks that example again"
            ) from None

    def row(self, rows: Rows, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of one call.

        Raises:
            UserError: It is missing.
        """
        row = rows.get(call_key(call))
        if row is None:
            raise UserError(
                f"{rows.path}: no row for id {call['id']}; "
                "run `panjue generate` again, it continues where it stopped"
            )
        return row


def open_run(path: Path, gold: Path | None = None) -> Run:
    """Return the answers in a folder.

    Args:
        path: The folder of the answers, or a run folder that has one such folder for `gold`.
        gold: Is read instead of the test file that was answered.

    Raises:
        UserError: There are no completions, the test file has changed since, or `gold` has other
            examples.
    """
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder")
    folder = answers_in(path, gold)
    provenance = generation(folder)
    if not provenance:
        raise UserError(f"{folder}: is no run with completions; `panjue generate` makes one")
    test = gold or Path(provenance["test"])
    if not gold and (not test.exists() or sha256(test) != provenance["test_sha256"]):
        raise UserError(
            f"{test}: missing, or not the file that {folder}/completions.jsonl was made from"
        )
    reader = Reader(
        configured(load_task(provenance["task"]), provenance.get("solve", {})),
        held_out=bool(provenance.get("held_out")),
        on_bad_row=provenance.get("on_bad_row", "stop"),
    )
    run = Run(folder, reader, test, load_labels(folder / "labels.json"), provenance)
    if gold:
        _check_gold(run)
    return run


def _check_gold(run: Run) -> None:
    """Refuse gold whose examples are not those of the run.

    Raises:
        UserError: With the number of examples without a row and of rows without an example.
    """
    answered = run.task.data.submission.index(run.task.data.submission.find(run.folder)).ids()
    examples = {str(example.id) for example in run.examples()}
    if answered != examples:
        raise UserError(
            f"{run.test}: is not the gold file of {run.folder}: {len(examples - answered)} "
            f"examples have no row there, {len(answered - examples)} rows no example"
        )


def method_of(provenance: Mapping[str, Any], decoding: Mapping[str, Any]) -> str:
    """Say how answers were made of replies, by their provenance and their decode.json."""
    method = "sampled" if provenance.get("sampling", {}).get("temperature") else "greedy"
    if decoding.get("decided"):
        method = "decided from several replies" if provenance.get("samples") else "decided"
    return method + (" with the text classifier" if decoding.get("classifier") else "")


def decode_run(path: Path, *, greedy: bool = False) -> Tally:
    """Write the submission and `decode.json` of a folder of answers from its `completions.jsonl`.

    Every example of the test file is answered once, in order. If it was refused or its reply is
    unreadable, the answer is the task's fallback, which is counted. If a row has several replies,
    the answer is decided from all of them (`eval.decide`) with the priors that `panjue tune`
    fitted, and its confidence goes to `confidence.jsonl`. With `greedy` only the first reply
    counts. Ranked lists are voted on and filled up (`eval.rank`).

    Raises:
        UserError: The run has no completions, misses some, or the test file has changed since.
    """
    run = open_run(path)
    folder = run.folder
    task, submission = run.task, folder / run.task.data.submission.name
    tally = Tally(fallback=task.score.fallback, submission=submission)
    fitted = run.trained if run.is_of_adapter else None
    decider = None if greedy else fitted_decider(task, run.labels, fitted)
    if decider and decider.pool:
        tally.fallback = CLASSIFIER_NAME
    with (
        task.data.submission.writing(submission) as write,
        atomic_write(folder / "confidence.jsonl") as confidences,
    ):
        rows = run.rows()
        for example in counted(run.examples(), len(rows)):
            answer, confidence = _answer(run, rows, example, decider, tally, greedy=greedy)
            write(task.data.write(example, answer))
            if confidence is not None:
                confidences.write(dump({"id": example.id, "confidence": confidence}) + "\n")
            tally.examples += 1
    if decider and tally.decided:
        tally.pair_price, tally.class_prior = decider.pair_price, decider.class_prior
        tally.classifier = decider.pool.exponents if decider.pool else None
        tally.decision_sha256 = decision_sha256(fitted)
    else:
        (folder / "confidence.jsonl").unlink()
    tally.skipped_rows = len(run.reader.skipped.rows)
    report = {
        **vars(tally),
        "repairs": dict(tally.repairs.most_common()),
        "submission": submission.name,
    }
    report["submission_sha256"] = sha256(submission)
    write_json(folder / "decode.json", report)
    return tally


def _answer(
    run: Run,
    rows: Rows,
    example: Example,
    decider: Decider | None,
    tally: Tally,
    *,
    greedy: bool,
) -> tuple[Answer, list[dict[str, float]] | None]:
    """Return the answer to an example, and its confidence if it was decided."""
    task = run.task
    if task.answer.several_calls:
        return _solved(run, rows, example, tally), None
    row = run.row(rows, {"id": example.id})
    first = _decoded(task, example, row, run.labels, tally).answer
    replies = row.get("texts", ())[: 1 if greedy else None]
    if (decider and decider.pool) or (len(replies) > 1 and (decider or task.answer.ranked)):
        tally.decided += 1
        tally.replies += len(replies)
    if task.answer.ranked:
        answer, filled = ranked(task, example, replies, run.labels)
        tally.filled += filled
        return answer, None
    if decider and (len(replies) > 1 or decider.pool):
        decision = decider.decide(example, row) if replies else decider.decide_alone(example)
        return decision.answer, decision.confidence
    return first, None


def _solved(run: Run, rows: Rows, example: Example, tally: Tally) -> Answer:
    """Return the answer to an example of several calls, from the stored replies."""

    def reply(call: int, question: Example) -> Decoded:
        row = run.row(rows, {"id": example.id, "call": call})
        if row["question"] != str(question.id):
            raise UserError(
                f"{rows.path}: call {call} of id {example.id} asked {row['question']!r}, but now "
                f"asks {question.id!r}; generate again into another run=FOLDER"
            )
        return _decoded(run.task, question, row, run.labels, tally)

    return run_steps(run.task.answer.solving(example), reply)


def _decoded(
    task: Task, example: Example, completion: dict[str, Any], labels: Labels, tally: Tally
) -> Decoded:
    """Decode the first reply of one completion and count what happened."""
    refused = completion.get("refused") is not None
    decoded = task.ask.decode(first_reply(completion), example, labels)
    tally.calls += 1
    tally.refused += refused
    if refused:
        tally.refusals.append(f"{example.id}: {completion['refused']}")
    else:
        tally.cut += completion["finish"][0] == "length"
        tally.shortened += completion["dropped_sentences"] > 0
        tally.loosened += completion.get("loosened_schema", False)
        tally.prompt_tokens += completion["prompt_tokens"]
        tally.cached_tokens += completion["cached_tokens"]
        tally.completion_tokens += completion["completion_tokens"]
        tally.near_ties += bool(completion["near_ties"])
        tally.unreadable += not decoded.readable
        tally.valid += not decoded.repairs
        tally.repaired += bool(decoded.repairs) and decoded.readable
        # The part before the colon is the defendant's name, the part after the kind of repair.
        tally.repairs.update(text.rpartition(": ")[2] for text in decoded.repairs)
    return decoded
