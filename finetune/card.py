"""The model card of a training: README.md beside its weights, made from the records of the run.

The card contains no text of a case, only file names and hashes, settings, numbers and label counts.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from panjue.finetune.trained import Trained
from panjue.prompts.labels import Labels
from panjue.prompts.model import is_demo, is_hub_name
from panjue.prompts.plumbing.config import DATA_FILES, scrubbed
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import atomic_write, dump
from panjue.prompts.plumbing.intervals import interval_text, with_interval
from panjue.prompts.plumbing.progress import duration
from panjue.prompts.plumbing.records import (
    MANIFEST,
    AnswersRecord,
    Choice,
    RunRecord,
    StoredScores,
    TrainingSummary,
    model_less_classifier,
)
from panjue.prompts.plumbing.run import (
    ANSWERS,
    held_out_losses,
    is_held_out_folder,
)
from panjue.prompts.task import load_task

CARD = "README.md"

KINDS = {"lora": "LoRA adapter", "qlora": "LoRA adapter (base in four bits)", "full": "Model"}

NOT_FOR = """\
A statistical guess, not legal advice; not for use on real defendants.

统计意义上的猜测，不构成法律意见；不得用于真实的被告人。
"""

OF_DEMO = """\
Trained on invented cases: its answers and scores have no legal meaning.

只用虚构案件训练：回答和得分没有任何法律意义。
"""

SEAL = "<!-- made by panjue, which leaves the card alone once its text is changed: "
"""Beginning of the last line, which contains the hash of the text above."""


def write_card(trained: Trained, step: int | None) -> None:
    """Write the card of a training into the folder of its weights, which come from `step`."""
    text = "\n".join(card_lines(trained, step)) + "\n"
    with atomic_write(trained.folder / CARD, is_as_written) as out:
        out.write(f"{text}{SEAL}{text_sha256(text)} -->\n")


def update_card(trained: Trained) -> None:
    """Write the card of a training again after new scores, unless somebody has changed the card.

    The card of an adapter without its run folder also stays, because it contains numbers that no
    record beside the adapter has.
    """
    card = trained.folder / CARD
    if not card.exists() or not os.access(trained.folder, os.W_OK):
        return
    summary = TrainingSummary.read(trained.run)
    if summary and is_as_written(card):
        write_card(trained, trained.step(summary))


def is_as_written(path: Path) -> bool:
    """Say whether a card is as panjue wrote it."""
    text = path.read_text("utf-8", errors="replace")
    above, _, rest = text.rpartition(SEAL)
    return rest == f"{text_sha256(above)} -->\n"


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def card_lines(trained: Trained, step: int | None) -> Iterator[str]:
    record = trained.record
    run = trained.run
    summary = TrainingSummary.read(run) or TrainingSummary()
    yield from front_matter(record)
    yield f"# {run.resolve().name}"
    yield ""
    base = scrubbed(record.base)
    by = "trained by another program, and adopted" if record.adopted else "trained"
    yield f"{KINDS[record.method]} for `{base}`, {by} by panjue for its task `{record.task}`."
    yield ""
    yield OF_DEMO if is_demo(trained.folder) else NOT_FOR
    yield "## Base and data"
    yield ""
    yield from table(("", "name", "SHA-256"), files(record))
    use = "Labels and text classifier come from" if record.adopted else "Trained on"
    yield f"{use} {record.examples:,} examples. {labels_line(trained.labels)}"
    yield ""
    yield "## Training"
    yield ""
    yield from training_lines(record, summary)
    yield from held_out_lines(trained, summary, step)
    yield from test_lines(trained)
    yield "## Use"
    yield ""
    yield "panjue writes the prompts and reads the replies. In a checkout of panjue:"
    yield "`panjue generate FOLDER TEST` answers a file, `panjue serve FOLDER` answers over HTTP."
    yield ""


def front_matter(record: RunRecord) -> Iterator[str]:
    """Yield the lines that the hub reads."""
    yield "---"
    if is_hub_name(record.base):
        yield f"base_model: {record.base}"
    yield f"library_name: {'transformers' if record.method == 'full' else 'peft'}"
    yield "pipeline_tag: text-generation"
    yield "tags: [panjue]"
    yield "---"
    yield ""


def files(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield what the base, the adapter at the start and each data file are called, and hashes."""
    values = scrubbed(record.model_dump())
    for name in ("base", "from_run", *DATA_FILES):
        if values[name]:
            shown = name.removesuffix("_run")  # as the setting is called
            yield shown, f"`{values[name]}`", values[f"{name}_sha256"]


def labels_line(labels: Labels) -> str:
    """Return how many labels each field has; the file beside the card lists the labels."""
    counts = labels.counts
    if not counts:
        return "The task has no label sets."
    numbers = ", ".join(f"{field} {len(labels)}" for field, labels in counts.items())
    return f"Labels (`labels.json`): {numbers}."


def training_lines(record: RunRecord, summary: TrainingSummary) -> Iterator[str]:
    if summary.steps is not None:
        took = f"{summary.tokens:,} tokens, {duration(summary.seconds or 0)} on {summary.device}"
        yield f"{summary.finished}: {summary.steps} steps, {took}."
        yield ""
    if record.adopted:
        yield "Which prompts and cases the adapter was trained on is not known."
        yield ""
        yield lora_line(record)
        yield ""
        return
    libraries = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    yield f"Method {record.method}, seed {record.seed}; {libraries}."
    yield ""
    if summary.config:
        changed = scrubbed(summary.changed)
        differs = "; changed:" if changed else ", nothing changed."
        yield f"Settings: config `{summary.config}`{differs}"
        yield ""
        rows = [(f"`{name}`", f"`{dump(value)}`") for name, value in changed.items()]
        yield from table(("setting", "value"), rows)


def lora_line(record: RunRecord) -> str:
    """Return the settings of an adopted adapter, and which panjue adopted it."""
    settings = ", ".join(f"{name} {dump(value)}" for name, value in record.lora.items())
    return f"Settings: {settings}. Adopted by panjue {record.versions.get('panjue', '')}."


def held_out_lines(trained: Trained, summary: TrainingSummary, step: int | None) -> Iterator[str]:
    """Yield the held-out loss, and the scores of model and classifier on the held-out cases."""
    choice = trained.choices[-1] if trained.choices else None
    loss = held_out_losses(trained.run).get(step) if step else None
    if loss is None and choice is None:
        return
    yield "## Held-out cases"
    yield ""
    if loss is not None:
        yield f"Loss {loss:.4f} on {summary.held_out} examples, with these weights of step {step}."
        yield ""
    if choice:
        yield f"{choice.cases} cases, answered by the model and by the text classifier beside it:"
        yield ""
        head = ("field", "metric", "model", "classifier", "model − classifier (95%)", "answers")
        yield from table(head, choice_rows(choice))


def is_by(trained: Trained, record: AnswersRecord) -> bool:
    return record.is_of_adapter and record.trained_sha256 == trained.sha256


def choice_rows(choice: Choice) -> Iterator[tuple[str, ...]]:
    for name, best in choice.best.items():
        mean, low, high = model_less_classifier(best)
        interval = with_interval(mean, (low, high), "+.4f", " to ")
        scores = [f"{choice.score(name, who):.4f}" for who in ("model", "classifier")]
        yield (name, best.metric, *scores, interval, best.candidate)


def test_lines(trained: Trained) -> Iterator[str]:
    """Yield a table for each test file that was answered with this training and scored."""
    task = load_task(trained.record.task)
    for manifest in sorted((trained.run / ANSWERS).glob(f"*/{MANIFEST}")):
        try:
            answers = AnswersRecord.read(manifest.parent)
            scores = StoredScores.read(manifest.parent, task.data.submission.name)
        except UserError:  # `panjue runs` names what is broken
            continue
        if scores is None or is_held_out_folder(manifest.parent) or not is_by(trained, answers):
            continue
        yield f"## Scores on {scrubbed(answers.test)}"
        yield ""
        yield f"{scores.examples} examples, SHA-256 {answers.test_sha256}. {scores.answered_by}"
        if scores.in_sample:
            yield f"Not for comparison: {scores.in_sample}."
        yield ""
        rows = []
        for metric in task.score.names:
            interval = interval_text(scores.ends(metric), between=" to ")
            rows.append((metric, number(scores.mean(metric)), interval))
        yield from table(("metric", "score", "95% interval"), rows)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    """Yield the lines of a table, then an empty line; yield nothing if there are no rows."""
    lines = [f"| {' | '.join(map(cell, row))} |" for row in rows]
    if lines:
        yield f"| {' | '.join(head)} |"
        yield f"|{'---|' * len(head)}"
        yield from lines
        yield ""


def cell(value: Any) -> str:
    return str(value).replace("|", "\\|")
