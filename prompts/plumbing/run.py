"""A run folder and its records: what a training and its answers were made from.

- `RUN/config.yaml`: the resolved settings, in the sections `sft`, `generate` and `serve`.
- `RUN/manifest.json`: the RunRecord of the training that the folder belongs to.
- `RUN/training.json`: the TrainingSummary: where the settings came from, and how the training went.
- `RUN/adapter/manifest.json`: the RunRecord of the finished training; `RUN/model/` if full.
- `RUN/kept/step-N/`: the adapter of another step, with its record; `RUN/chosen.json`: the Chosen.
- `RUN/answers/NAME/manifest.json`: the AnswersRecord of the answers to one test file.
- `RUN/answers/NAME/scores.json`: the StoredScores of these answers.
- `RUN/answers/held-out/choice.json`: the Choice that the answers to the held-out cases led to.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from panjue.prompts.plumbing.config import first_complaint
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import difference, read_lines, read_object, sha256, write_json

MANIFEST = "manifest.json"
CONFIG = "config.yaml"
ANSWERS = "answers"
HELD_OUT = "held-out"
"""Name of the folder of the answers to held-out cases, which say who answers each field. For the
answers in the folder X, made with answers=X, it is `held-out-X` if that exists."""

CHOICE = "choice.json"
SCORES = "scores.json"
SUMMARY = "training.json"

CHOSEN = "chosen.json"
KEPT = "kept"
"""Folder in a run folder with the adapters of other steps than that of the lowest loss."""

RESULTS = ("adapter", "model")
"""Folders in a run folder that hold the result of a training: LoRA weights, or all weights."""
REPLACED = (
    *(CONFIG, MANIFEST, *RESULTS, "merged", "unmerged"),
    *(KEPT, CHOSEN, "checkpoints", "log.jsonl", "skipped-train.jsonl", SUMMARY),
)
"""What commands replace in a run folder; a folder of answers has a record of its own."""
REPLACED_ANSWERS = (
    *(MANIFEST, CHOICE, "labels.json", "completions.jsonl", "skipped-test.jsonl", "cases.jsonl"),
    *("decode.json", "confidence.jsonl", SCORES, "report.html"),
)
"""What commands replace in a folder of answers, besides the submission of the task."""


AnsweredBy = Literal["model", "classifier"]

Kind = TypeVar("Kind", bound=BaseModel)

SplitBy = Literal["text", "normal text"]
"""What of a case decides whether it is held out or chosen; in version 0.4 white space did too."""

Half = Literal["", "choosing", "other"]
"""The half of held-out cases that chooses the adapter, the other one, or "": all of them."""

# What an entry of a record shapes, as its annotation says. A test fails for an entry without.
NAMES = "a name or path; the hash beside it counts"
DATA = "the choice of the examples"
ROWS = "the token rows"
WEIGHTS = "the trained weights alone"
RESULT = "nothing: it is known when all is done"
CASES = "the cases, and all answers to them"
REPLIES = "the model's replies alone"


class Record(BaseModel):
    """Base of the records; a `manifest.json` has exactly these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    versions: Annotated[Mapping[str, str], RESULT] = Field(default_factory=dict)
    """Library -> version, of panjue with the commit. A run may resume with others."""

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

    def part(self, *shaped: str) -> dict[str, Any]:
        """Return the entries that shape one of these."""
        names = set()
        for name, info in type(self).model_fields.items():
            if not set(shaped).isdisjoint(info.metadata):
                names.add(name)
        return self.model_dump(include=names, mode="json")

    def difference(self, new: Self, *shaped: str) -> str:
        """Return what of the entries that shape these `new` has otherwise, in one line."""
        return difference(self.part(*shaped), new.part(*shaped))


class RunRecord(Record):
    """What a training was made from; trainings with equal records give equal adapters."""

    task: Annotated[str, DATA]
    base: Annotated[str, NAMES]
    base_sha256: Annotated[str, ROWS]
    base_files: Annotated[dict[str, str], NAMES] = Field(default_factory=dict)
    """File of the base -> its hash; `base_sha256` is of them all. Versions before 0.5 had none."""
    train: Annotated[str, NAMES]
    train_sha256: Annotated[str, DATA]
    dev: Annotated[str | None, NAMES] = None
    dev_sha256: Annotated[str | None, DATA] = None
    mix: Annotated[str | None, NAMES] = None
    mix_sha256: Annotated[str | None, DATA] = None
    mix_ratio: Annotated[float | None, DATA] = None
    on_bad_row: Annotated[Literal["stop", "skip"], DATA] = "stop"
    split_by: Annotated[SplitBy, DATA] = "text"
    solve: Annotated[dict[str, Any], ROWS] = Field(default_factory=dict)
    opinions: Annotated[bool, WEIGHTS] = False
    """Whether the prompts show what the text classifier thinks."""
    prompt_sha256: Annotated[str, ROWS]
    task_sha256: Annotated[str | None, DATA] = None
    """Of the code and prompt in the task's folder, which make the token rows."""
    batch: Annotated[int, WEIGHTS] = 16
    processes: Annotated[int, WEIGHTS] = 1
    """Each has its own random state and its share of every step."""
    max_tokens: Annotated[int, ROWS]
    method: Annotated[str, WEIGHTS]
    dtype: Annotated[str, WEIGHTS]
    seed: Annotated[int, WEIGHTS]
    patience: Annotated[int, WEIGHTS]
    attn_implementation: Annotated[str, WEIGHTS] = "sdpa"
    trainer: Annotated[dict[str, Any], WEIGHTS]
    lora: Annotated[dict[str, Any], WEIGHTS]
    quantization: Annotated[dict[str, Any], WEIGHTS]

    attention: Annotated[str | None, RESULT] = None
    """As transformers calls it; `panjue_packed` is that of `finetune.packed_attention`."""
    examples: Annotated[int | None, RESULT] = None
    """Training examples; like the hashes below, not known when the training is set up."""
    labels_sha256: Annotated[str | None, RESULT] = None
    classifier_sha256: Annotated[str | None, RESULT] = None
    adapter_sha256: Annotated[str | None, RESULT] = None
    """In the folder of a merged model: the adapter that was merged into the base."""

    @property
    def is_before_0_5(self) -> bool:
        """Say whether a version before 0.5 made it, which hashed base and code in another way."""
        return not self.base_files


class AnswersRecord(Record):
    """What answers were made from; a generation resumes only with an equal record."""

    task: Annotated[str, CASES]
    test: Annotated[str, NAMES]
    test_sha256: Annotated[str, CASES]
    trained: Annotated[str | None, NAMES] = None
    """Adapter or model folder; None for an endpoint without a training."""
    trained_sha256: Annotated[str | None, CASES] = None
    labels_sha256: Annotated[str | None, CASES] = None
    prompt_sha256: Annotated[str, REPLIES]
    adapter: Annotated[str, REPLIES]
    constrained: Annotated[bool, REPLIES]
    max_tokens: Annotated[int, REPLIES]
    seed: Annotated[int, REPLIES]
    engine: Annotated[dict[str, Any], REPLIES]
    sampling: Annotated[dict[str, Any], REPLIES]
    samples: Annotated[int, REPLIES]
    asked: Annotated[bool, RESULT] = True
    """Whether the model was asked, or the text classifier answers everything."""
    held_out: Annotated[bool, CASES] = False
    split_by: Annotated[SplitBy, CASES] = "text"
    """As in the record of the training."""
    highest_hash: Annotated[str, CASES] = ""
    """Of the texts of held-out cases that are asked, if not all are; see `reader.hash_by`."""
    half: Annotated[Half, CASES] = ""
    endpoint: Annotated[str | None, REPLIES] = None
    solve: Annotated[dict[str, Any], CASES] = Field(default_factory=dict)
    on_bad_row: Annotated[Literal["stop", "skip"], CASES] = "stop"
    voted: Annotated[Mapping[str, str], RESULT] = Field(default_factory=dict)
    """Folder of answers -> SHA-256 of its submission, if these answers are the vote of several."""

    @model_validator(mode="before")
    @classmethod
    def _without_entries_of_0_4(cls, found: dict[str, Any]) -> dict[str, Any]:
        if "answered_by" in found:
            found = {"asked": found["answered_by"] == "model", **found}
        gone = ("answered_by", "because", "scaling", "for_choice")
        return {name: value for name, value in found.items() if name not in gone}

    @property
    def is_of_adapter(self) -> bool:
        """Say whether the fine-tuned model answered, not its base or an endpoint."""
        return bool(self.trained) and not self.endpoint and self.adapter != "none"


class TrainingSummary(BaseModel):
    """Where the settings of a training came from, and how it went; `training.json`.

    The record of the training has what shapes the result. This is beside it, since two equal
    trainings take different times. What is None is not known before the training is finished.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: str = ""
    """Name of the config file."""
    changed: dict[str, Any] = Field(default_factory=dict)
    """Setting -> its value, where the command line changed that of the config; None: emptied."""
    finished: str | None = None
    """The date, as in 2026-11-28."""
    steps: int | None = None
    kept_step: int | None = None
    held_out: int | None = None
    """Held-out examples, whose mean loss at the kept step is `held_out_loss`."""
    held_out_loss: float | None = None
    tokens: int | None = None
    """Tokens of prompts and replies that were trained on; those of two epochs count twice."""
    seconds: float | None = None
    """Of the steps and evaluations, without those that a crash lost."""
    memory: int | None = None
    """Peak bytes of the first process: of its GPU, or without one of its main memory."""
    device: str | None = None

    @classmethod
    def read(cls, folder: Path) -> "TrainingSummary | None":
        """Return the summary in a run folder, if there is one; version 0.4 wrote none."""
        return _if_any(cls, folder / SUMMARY)


class StoredScores(BaseModel):
    """What `scores.json` has for a table; the metrics are further keys, as `panjue score` has."""

    model_config = ConfigDict(extra="allow", frozen=True)

    examples: int
    interval: dict[str, tuple[float | None, float | None]]
    """Metric -> its 95% interval."""
    answered_by: str = ""
    in_sample: str = ""

    @classmethod
    def read(cls, folder: Path) -> "StoredScores | None":
        """Return the scores in a folder of answers, if there are any."""
        return _if_any(cls, folder / SCORES)

    def mean(self, metric: str) -> float | None:
        return (self.model_extra or {}).get(metric)


class FieldChoice(BaseModel):
    """How the model and the text classifier answered one field of the held-out cases."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    answered_by: AnsweredBy
    """Who is better there; the model if both are equal."""
    metric: str
    model: float
    classifier: float
    low: float
    """The ends of the 95% interval of model less classifier, by a paired bootstrap over cases."""
    high: float


class Choice(BaseModel):
    """Who answers each field, as the answers to the held-out cases say; `choice.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cases: int
    counted: int
    """The cases with a weight in the metric."""
    panjue: str = ""
    """Version and commit that compared them."""
    fields: dict[str, FieldChoice]
    calibration: dict[str, dict[str, tuple[float, float]]]
    """Of the confidences in the model's answers; see `classifier.calibration.Calibration`."""

    @classmethod
    def read(cls, folder: Path) -> "Choice | None":
        """Return the choice that lies beside answers to held-out cases, if there is one."""
        return _if_any(cls, folder / CHOICE)


def _if_any(kind: type[Kind], path: Path) -> Kind | None:
    """Return what a file has, if it exists."""
    if not path.exists():
        return None
    try:
        return kind.model_validate(read_object(path))
    except ValidationError as error:
        raise UserError(f"{path}: {first_complaint(error)}; delete it") from None


class Candidate(BaseModel):
    """An adapter of a training, and how it answered the half of the held-out cases that chooses."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    loss: float
    """On all held-out cases."""
    metrics: dict[str, float]
    interval: dict[str, tuple[float | None, float | None]]
    """Metric -> its 95% interval."""


class Chosen(BaseModel):
    """The adapter of a training that is best by the task's headline metric; `chosen.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    adapter: str
    """Its folder in the run folder."""
    adapter_sha256: str
    panjue: str = ""
    """Version and commit that chose."""
    metric: str
    cases: int
    counted: int
    """The cases with a weight in the metric."""
    candidates: dict[str, Candidate]
    """Folder -> what was found; that of the lowest loss is first."""
    gain: tuple[float, float, float]
    """Of the metric, over the adapter of the lowest loss: mean, and the ends of its 95% interval by
    a paired bootstrap over the same cases, which have chosen."""

    @classmethod
    def read(cls, run: Path) -> "Chosen | None":
        """Return what was chosen in a run folder, if anything."""
        return _if_any(cls, run / CHOSEN)

    def __str__(self) -> str:
        """Return which adapter this is and why, in one line."""
        of_it = self.candidates[self.adapter]
        score = f"{self.metric} {of_it.metrics[self.metric]:.4f} on {self.cases} held-out cases"
        return f"adapter of step {of_it.step}, chosen by {score}"


def kept_place(run: Path, step: int) -> Path:
    """Return where the adapter of a step lies that is not that of the lowest loss."""
    return run / KEPT / f"step-{step}"


def kept_adapters(run: Path) -> dict[int, Path]:
    """Return step -> folder of the adapters in RUN/kept."""
    found = {}
    for path in (run / KEPT).glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def step_of_kept(trained: Path) -> int | None:
    """Return the step of an adapter in RUN/kept; None of the result of a training."""
    number = trained.name.removeprefix("step-")
    return int(number) if trained.parent.name == KEPT and number.isdecimal() else None


def held_out_losses(run: Path) -> dict[int, float]:
    """Return step -> held-out loss, as the log of a run folder has them."""
    log = run / "log.jsonl"
    entries = [entry for _, entry in read_lines(log)] if log.exists() else []
    return {entry["step"]: entry["eval_loss"] for entry in entries if "eval_loss" in entry}


def run_around(trained: Path) -> Path:
    """Return the run folder in which a result, or an adapter of another step, lies."""
    return trained.parent.parent if trained.parent.name == KEPT else trained.parent


@dataclass(frozen=True)
class Run:
    """A run folder; or the folder of an adapter or model alone, e.g. one that was downloaded."""

    folder: Path

    @property
    def result(self) -> Path | None:
        """Return the folder with the LoRA weights or the whole model; None if it is not trained.

        Of several adapters the one that `panjue choose` has chosen, else that of the lowest loss.
        """
        if chosen := self.chosen:
            place = self.folder / chosen.adapter
            if not (place / MANIFEST).is_file():
                missing = f"{place}, which is missing; restore it, or delete the file"
                raise UserError(f"{self.folder / CHOSEN}: names {missing}")
            return place
        return self.of_lowest_loss

    @property
    def of_lowest_loss(self) -> Path | None:
        """Return the result of the training itself, whatever was chosen."""
        for name in (*RESULTS, "."):
            place = self.folder / name
            if (place / "labels.json").is_file() and (place / MANIFEST).is_file():
                return place
        return None

    @property
    def chosen(self) -> Chosen | None:
        return Chosen.read(self.folder)

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
            name = Path(recorded).name
            # The last one: an adapter alone may be the run folder.
            for place in (run / name, run / KEPT / name, run):
                if (place / "labels.json").is_file():
                    return place
        return Path(recorded)

    @property
    def voters(self) -> list["Answers"]:
        """Return the answers that these are the vote of, if they are still there; else these."""
        voted = [Answers(Path(folder)) for folder in self.record.voted]
        return [one for one in voted if (one.folder / MANIFEST).is_file()] or [self]

    @property
    def training(self) -> RunRecord | None:
        """Return the record of the training that answered, if it is there."""
        trained = self.trained
        return RunRecord.read(trained) if trained and (trained / MANIFEST).is_file() else None


def find_answers(path: Path, gold: Path | None = None) -> Answers | None:
    """Return the answers of a run folder, a folder of answers, or a submission in it; else None.

    Of several answers in a run those to the file `gold` are meant; if there are none, `gold` may be
    that file with its gold answers, and those named as it is are meant. Answers to held-out cases
    are meant only where they are named.
    """
    start = path if path.is_dir() else path.parent
    for place in (start, start.parent):  # a submission may be a folder itself
        if _has_answers(place):
            return Answers(place)
    folders = []
    for manifest in sorted(path.glob(f"{ANSWERS}/*/{MANIFEST}")):
        if not is_held_out_folder(manifest.parent):
            folders.append(manifest.parent)
    if gold and (gold.is_file() or gold.is_dir()):  # a pipe can be read only once
        digest = sha256(gold)
        same_file = [one for one in folders if _answers_file(one, digest)]
        same_name = [one for one in folders if one.name == gold.stem]
        folders = same_file or same_name or folders
    folders = list(filter(_has_replies, folders)) or folders
    if len(folders) > 1:
        names = ", ".join(map(str, folders))
        raise UserError(f"{path}: has several answers; say which: {names}")
    return Answers(folders[0]) if folders else None


def _answers_file(folder: Path, digest: str) -> bool:
    """Say whether a folder answers the file with this hash; what cannot be read does not."""
    with suppress(UserError):
        return AnswersRecord.read(folder).test_sha256 == digest
    return False


def is_held_out_folder(folder: Path) -> bool:
    """Say whether a folder of answers has those to held-out cases, by its name."""
    return folder.name == HELD_OUT or folder.name.startswith(f"{HELD_OUT}-")


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
