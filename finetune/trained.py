"""A finished training, which a command opens once and passes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from panjue.finetune.classifier.classifier import load_classifier
from panjue.finetune.classifier.opinions import Advisor
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    exclusive_lock,
    read_lines,
    sha256,
    shared_lock,
    write_json,
)
from panjue.prompts.plumbing.records import (
    CHOICE,
    CHOSEN,
    REPLIES,
    AnswersRecord,
    Choice,
    Choices,
    RunRecord,
    TrainingSummary,
    if_any,
)
from panjue.prompts.plumbing.run import (
    ADAPTER_CONFIG,
    ANSWERS,
    CASES_FILE,
    HELD_OUT,
    refuse_answers,
    refuse_unadopted,
    run_around,
    step_of_kept,
    weights_folder,
)
from panjue.prompts.task import Task


@dataclass(frozen=True)
class Trained:
    """The weights of a training, with what lies beside them."""

    run: Path  # the run folder; an adapter outside a run is its own run folder
    folder: Path  # folder of the weights: an adapter, or a whole model
    record: RunRecord  # what the weights were made from
    sha256: str  # fingerprint of the weights (`model_sha256`)
    labels: Labels  # the label sets of the training
    labels_sha256: str  # hash of the file with the label sets
    chosen: Choice | None = None
    """Why `panjue choose` chose this adapter; None if it has the lowest loss."""

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).exists()

    @property
    def has_classifier(self) -> bool:
        """Say whether the training fitted a text classifier."""
        return self.record.classifier_sha256 is not None

    def advisor(self, task: Task) -> Advisor | None:
        """Return the training's text classifier; None if it fitted none."""
        digest = self.record.classifier_sha256
        if digest is None:
            return None
        return Advisor(task, self.labels, load_classifier(self.folder, digest, task))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the choices by held-out cases of who answers each field, model or text classifier.

        There is one choice for each way in which the model was asked; the newest comes last.
        """
        if found := if_any(Choices, self.folder / CHOICE):
            # A choice for other weights, which lay there before, does not count.
            return tuple(
                one for one in found.choices if one.candidates["model"].sha256 == self.sha256
            )
        return tuple(choices_before_0_5(self))

    def step(self, summary: TrainingSummary) -> int | None:
        """Return the step of these weights; None if it was not recorded."""
        return step_of_kept(self.folder) or summary.kept_step


def open_trained(run: Path) -> Trained:
    """Open the training of a run folder; UserError: there is none."""
    refuse_answers(run)
    trained = find_trained(run)
    return trained or refuse_untrained(run)


@contextmanager
def held_training(run: Path) -> Iterator[Trained | None]:
    """Open the training of a run folder. No training or choice can change it within the block.

    Yield None if the folder has no weights, as the run folder of an endpoint's answers. UserError:
    there are only those of another trainer.
    """
    if weights_folder(run, if_any(Choice, run / CHOSEN)) is None:
        refuse_unadopted(run)
        yield None
        return
    with shared_lock(run):
        yield find_trained(run)


def refuse_untrained(run: Path, other_way: str = "") -> NoReturn:
    """Refuse a folder without a training; `other_way` is what may be done instead of training."""
    refuse_unadopted(run)
    if (run / "config.json").is_file():
        way_out = f"train on it first: panjue sft model={run} train=FILE"
        raise UserError(f"{run}: is a base model, without a training; {way_out}")
    missing = "" if run.is_dir() else "there is no such folder; "
    raise UserError(f"{run}: {missing}nothing trained is there; run `panjue sft` first{other_way}")


def find_trained(run: Path) -> Trained | None:
    """Open the training of a run folder; None if there is none."""
    chosen = if_any(Choice, run / CHOSEN)
    folder = weights_folder(run, chosen)
    return None if folder is None else read_trained(folder, run, chosen)


def read_trained(folder: Path, run: Path | None = None, chosen: Choice | None = None) -> Trained:
    """Open the training whose weights are in `folder`; `run` is by default the folder around it."""
    label_file = folder / "labels.json"
    has_labels = label_file.exists()  # else a caller that needs them refuses the training
    return Trained(
        run=run_around(folder) if run is None else run,
        folder=folder,
        record=RunRecord.read(folder),
        sha256=model_sha256(folder),
        labels=load_labels(label_file) if has_labels else Labels(),
        labels_sha256=sha256(label_file) if has_labels else "",
        chosen=chosen,
    )


def choices_before_0_5(trained: Trained) -> Iterator[Choice]:
    """Yield the choices that versions before 0.5 wrote beside the answers to held-out cases."""
    for folder in sorted((trained.run / ANSWERS).glob(f"{HELD_OUT}*")):
        try:
            choice = if_any(Choice, folder / CHOICE)
            record = AnswersRecord.read(folder)
        except UserError:  # it is broken: held-out cases are asked again
            continue
        if choice and record.is_of_adapter and record.trained_sha256 == trained.sha256:
            cases = folder / CASES_FILE
            rows = read_lines(cases) if cases.exists() else ()
            texts = tuple(row["text_sha256"] for _, row in rows)
            # It lacks what choices say today: of which weights and of which answers they are.
            choice = choice.of_model(trained.sha256)
            yield choice.model_copy(update={**made_from(record), "texts": texts})


def made_from(record: AnswersRecord) -> dict[str, Any]:
    """Return the entries of a choice that identify the held-out answers from which it is made."""
    return {
        "file_sha256": record.test_sha256,
        "half": record.half,  # which half of the held-out cases; empty for all
        # The model is asked about the cases whose texts have the lowest hashes, up to this one.
        # Empty if it was asked about all.
        "highest_hash": record.highest_hash,
        "asked": record.part(REPLIES),  # how: the settings that affect replies
    }


def keep_choice(trained: Trained, choice: Choice) -> None:
    """Write a choice beside the weights; replace an earlier one for the same way of asking."""
    with exclusive_lock(trained.folder, f".{CHOICE}.lock", wait=True):
        others = [one for one in trained.choices if one.asked != choice.asked]
        choices = Choices(choices=(*others, choice))
        write_json(trained.folder / CHOICE, choices.model_dump(mode="json"))


def refuse_other_choice(trained: Trained) -> None:
    """Refuse weights if `panjue choose` has chosen others."""
    if trained.chosen and trained.sha256 != trained.chosen.adapter_sha256:
        way_out = f"`panjue choose {trained.run}` again, or delete {CHOSEN}"
        raise UserError(f"{trained.folder}: is not the adapter that was chosen; {way_out}")


def check_classes(task: Task, labels: Labels, folder: Path) -> None:
    """Refuse a training with a class that the code of its task no longer has.

    Only fields whose classes are listed in the code are in `order`. `nothing` is the label of an
    empty set.
    """
    for field, classes in task.answer.order.items():
        for name in labels.names(task.answer.kind(field)):
            if name not in classes and name != task.answer.nothing:
                raise UserError(f"{folder}: the task has no {field} {name!r} any more; train again")
