"""A run folder and its records: what a training and its answers were made from.

- `RUN/config.yaml`: the resolved settings, in the sections `sft`, `generate` and `serve`.
- `RUN/manifest.json`: the RunRecord of the training that the folder belongs to.
- `RUN/adapter/manifest.json`: the RunRecord of the finished training; `RUN/model/` if full.
- `RUN/answers/NAME/manifest.json`: the AnswersRecord of the answers to one test file.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from panjue.prompts.plumbing.config import first_complaint
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import difference, read_object, sha256, write_json

MANIFEST = "manifest.json"
CONFIG = "config.yaml"
ANSWERS = "answers"
HELD_OUT = "held-out"
"""The names of answers that are asked to compare model and text classifier begin so."""
RESULTS = ("adapter", "model")
"""Folders in a run folder that hold the result of a training: LoRA weights, or all weights."""


AnsweredBy = Literal["model", "classifier"]


class Record(BaseModel):
    """Base of the records; a `manifest.json` has exactly these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    may_differ: ClassVar = {"versions"}
    """Keys with which a run may resume that began with other values."""

    versions: Mapping[str, str] = Field(default_factory=dict)  # library -> version

    @classmethod
    def read(cls, folder: Path) -> Self:
        path = folder / MANIFEST
        try:
            return cls.model_validate(read_object(path))
        except ValidationError as error:
            problem = first_complaint(error)
            raise UserError(
                f"{path}: {problem}; another version of panjue made it: make it again"
            ) from None

    def write(self, folder: Path) -> None:
        """Write the record into a folder, without the entries that are not set."""
        write_json(folder / MANIFEST, self.model_dump(mode="json", exclude_unset=True))

    def difference(self, new: Self) -> str:
        """Return what `new` has otherwise, in one line, but for `may_differ`."""
        old_values = self.model_dump(exclude=self.may_differ)
        return difference(old_values, new.model_dump(exclude=self.may_differ))


class RunRecord(Record):
    """What a training was made from; trainings with equal records give equal adapters."""

    task: str
    base: str
    base_sha256: str
    train: str
    train_sha256: str
    dev: str | None = None
    dev_sha256: str | None = None
    mix: str | None = None
    mix_sha256: str | None = None
    mix_ratio: float | None = None
    on_bad_row: Literal["stop", "skip"] = "stop"
    solve: dict[str, Any] = Field(default_factory=dict)
    opinions: bool = False
    """Whether the prompts show what the text classifier thinks."""
    prompt_sha256: str
    task_sha256: str | None = None
    """Of the code and prompt in the task's folder, which make the token rows."""
    batch: int = 16
    processes: int = 1
    """Each has its own random state and its share of every step."""
    max_tokens: int
    method: str
    dtype: str
    seed: int
    patience: int
    attn_implementation: str = "sdpa"
    trainer: dict[str, Any]
    lora: dict[str, Any]
    quantization: dict[str, Any]

    examples: int | None = None
    """Training examples; like the hashes below, not known when the training is set up."""
    labels_sha256: str | None = None
    classifier_sha256: str | None = None
    adapter_sha256: str | None = None
    """In the folder of a merged model: the adapter that was merged into the base."""


class AnswersRecord(Record):
    """What answers were made from; a generation resumes only with an equal record."""

    may_differ: ClassVar = {"versions", "answered_by", "because", "scaling"}  # not of the replies

    task: str
    test: str
    test_sha256: str
    trained: str | None = None
    """Adapter or model folder; None for an endpoint without a training."""
    trained_sha256: str | None = None
    labels_sha256: str | None = None
    prompt_sha256: str
    adapter: str
    constrained: bool
    max_tokens: int
    seed: int
    engine: dict[str, Any]
    sampling: dict[str, Any]
    samples: int
    answered_by: AnsweredBy = "model"
    because: str = ""
    """Why it was the one or the other, in words."""
    scaling: dict[str, dict[str, tuple[float, float]]] = Field(default_factory=dict)
    """Of the confidences in the model's answers, from held-out cases; see `eval.scaling`."""
    held_out: bool = False
    for_choice: bool = False
    """Asked only to compare the model with the text classifier: meant where it is named."""
    endpoint: str | None = None
    solve: dict[str, Any] = Field(default_factory=dict)
    on_bad_row: Literal["stop", "skip"] = "stop"

    @property
    def is_of_adapter(self) -> bool:
        """Say whether the fine-tuned model answered, not its base or an endpoint."""
        return bool(self.trained) and not self.endpoint and self.adapter != "none"


@dataclass(frozen=True)
class Run:
    """A run folder; or the folder of an adapter or model alone, e.g. one that was downloaded."""

    folder: Path

    @property
    def result(self) -> Path | None:
        """Return the folder with the LoRA weights or the whole model; None if it is not trained."""
        for name in (*RESULTS, "."):
            place = self.folder / name
            if (place / "labels.json").is_file() and (place / MANIFEST).is_file():
                return place
        return None

    @property
    def trained(self) -> Path:
        """Return `result`; UserError if there is none."""
        path = self.folder / MANIFEST
        # First: a folder of answers has labels and a manifest too, and `result` would take it.
        if path.is_file() and "test_sha256" in read_object(path):
            raise UserError(f"{self.folder}: has answers; give the run folder, with its training")
        if result := self.result:
            return result
        missing = "" if self.folder.is_dir() else "there is no such folder; "
        raise UserError(f"{self.folder}: {missing}nothing trained is there; run `panjue sft` first")

    @property
    def record(self) -> RunRecord:
        return RunRecord.read(self.trained)

    @property
    def config(self) -> Path:
        """Return the file with the resolved settings; it may be missing."""
        return self.folder / CONFIG


@dataclass(frozen=True)
class Answers:
    """The folder of the answers to one test file."""

    folder: Path

    @property
    def record(self) -> AnswersRecord:
        if not (self.folder / MANIFEST).is_file():
            raise UserError(f"{self.folder}: has no answers; `panjue generate` makes them")
        return AnswersRecord.read(self.folder)

    @property
    def trained(self) -> Path | None:
        """Return the adapter or model that answered.

        The one in the run folder around the answers counts before the recorded path: there another
        one may have been trained since the run was moved.
        """
        recorded = self.record.trained
        if not recorded:
            return None
        folder = self.folder.resolve()
        if folder.parent.name == ANSWERS:
            run = folder.parent.parent
            for place in (run / Path(recorded).name, run):  # an adapter alone may be the run folder
                if (place / "labels.json").is_file():
                    return place
        return Path(recorded)

    @property
    def training(self) -> RunRecord | None:
        """Return the record of the training that answered, if it is there."""
        trained = self.trained
        return RunRecord.read(trained) if trained and (trained / MANIFEST).is_file() else None


def find_answers(path: Path, gold: Path | None = None) -> Answers | None:
    """Return the answers of a run folder, a folder of answers, or a submission in it; else None.

    Of several answers in a run those to the file `gold` are meant; without it, or if it is another
    file (with the gold answers, say), those named as it is.
    """
    start = path if path.is_dir() else path.parent
    for place in (start, start.parent):  # a submission may be a folder itself
        if _has_answers(place):
            return Answers(place)
    gold_sha256 = None
    if gold and (gold.is_file() or gold.is_dir()):  # a pipe can be read only once
        gold_sha256 = sha256(gold)
    ranks: dict[Path, tuple[bool, ...]] = {}
    for manifest in sorted(path.glob(f"{ANSWERS}/*/{MANIFEST}")):
        folder = manifest.parent
        record = AnswersRecord.read(folder)
        is_to_gold = record.test_sha256 == gold_sha256
        has_its_name = gold is not None and folder.name == gold.stem
        if is_to_gold or not record.for_choice:
            # The first of these counts most.
            ranks[folder] = (is_to_gold, not record.for_choice, has_its_name, _has_replies(folder))
    best_rank = max(ranks.values(), default=None)
    best = [folder for folder, rank in ranks.items() if rank == best_rank]
    if len(best) > 1:
        names = ", ".join(map(str, best))
        raise UserError(f"{path}: has answers to several test files; say which: {names}")
    return Answers(best[0]) if best else None


def _has_replies(folder: Path) -> bool:
    """Say whether a generation got beyond its start."""
    files = [*folder.glob("completions.jsonl"), *folder.glob("submission*")]
    return any(file.stat().st_size for file in files)


def _has_answers(folder: Path) -> bool:
    """Say whether a folder has the answers to one test file, in a run or copied out of it."""
    path = folder / MANIFEST
    if not path.is_file():
        return False
    if folder.parent.name == ANSWERS and not (folder / CONFIG).is_file():  # that of a run
        return True
    with suppress(UserError):  # a manifest.json of something else, say of a web page
        return "test_sha256" in read_object(path)
    return False
