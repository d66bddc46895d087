"""The model card of a training: README.md beside its weights, made from the records of the run.

card.jinja has its words. It contains no text of a case, only file names and hashes, settings,
numbers and label counts.
"""

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from panjue.finetune.trained import Trained
from panjue.prompts.model import is_demo, is_hub_name
from panjue.prompts.plumbing.config import DATA_FILES, scrubbed
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import atomic_write, dump
from panjue.prompts.plumbing.intervals import interval_text, with_interval
from panjue.prompts.plumbing.progress import duration
from panjue.prompts.plumbing.records import (
    AnswersRecord,
    Choice,
    RunRecord,
    StoredScores,
    TrainingSummary,
    model_less_classifier,
)
from panjue.prompts.plumbing.run import answer_folders, held_out_losses
from panjue.prompts.task import load_task

CARD = "README.md"

SEAL = "<!-- made by panjue, which leaves the card alone once its text is changed: "
"""Beginning of the last line, which contains the hash of the text above."""


def write_card(trained: Trained, step: int | None) -> None:
    """Write the card of a training into the folder of its weights, which come from `step`."""
    # By the hash in the last line, `is_as_written` notices if a user changes the card.
    text = card_text(trained, step)
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


def card_text(trained: Trained, step: int | None) -> str:
    """Return the text of a card; `write_card` adds a hash of it, to notice later changes."""
    record = trained.record
    summary = TrainingSummary.read(trained.run) or TrainingSummary()
    choices = trained.choices
    choice = choices[-1] if choices else None
    changed = scrubbed(summary.changed).items()
    return _template().render(
        name=trained.run.resolve().name,
        record=record,
        summary=summary,
        step=step,
        is_of_demo=is_demo(trained.folder),
        labels=trained.labels.counts,
        files=files(record),
        changed=[(f"`{name}`", f"`{dump(value)}`") for name, value in changed],
        loss=held_out_losses(trained.run).get(step) if step else None,
        choice=choice,
        choice_rows=choice_rows(choice) if choice else [],
        score_tables=list(score_tables(trained)),
        dump=dump,
        duration=duration,
        is_hub_name=is_hub_name,
        scrubbed=scrubbed,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("card.jinja")


def files(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return setting, name and hash of the base, the adapter at the start and each data file."""
    values = scrubbed(record.model_dump())
    rows = []
    for name in ("base", "from_run", *DATA_FILES):
        if values[name]:
            shown = name.removesuffix("_run")  # as the setting is called
            rows.append((shown, f"`{values[name]}`", values[f"{name}_sha256"]))
    return rows


def choice_rows(choice: Choice) -> list[tuple[str, ...]]:
    """Return a row for each field: metric, scores of model and classifier, and who answers."""
    rows = []
    for name, best in choice.best.items():
        mean, low, high = model_less_classifier(best)  # their difference
        interval = with_interval(mean, (low, high), "+.4f", " to ")
        scores = [f"{choice.score(name, who):.4f}" for who in ("model", "classifier")]
        rows.append((name, best.metric, *scores, interval, best.candidate))
    return rows


def score_tables(
    trained: Trained,
) -> Iterator[tuple[AnswersRecord, StoredScores, list[tuple[str, str, str]]]]:
    """Yield each scored test file of this training, with the rows of its table of scores."""
    task = load_task(trained.record.task)
    for folder in answer_folders(trained.run):
        try:
            answers = AnswersRecord.read(folder)
            scores = StoredScores.read(folder, task.data.submission.name)
        except UserError:  # `panjue runs` names what is broken
            continue
        is_by_other = not answers.is_of_adapter or answers.trained_sha256 != trained.sha256
        if scores is None or is_by_other:
            continue
        rows = []
        for metric in task.score.names:
            mean = scores.mean(metric)
            shown = "-" if mean is None else f"{mean:.4f}"
            rows.append((metric, shown, interval_text(scores.ends(metric), between=" to ")))
        yield answers, scores, rows
