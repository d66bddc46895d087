"""The records of a training and its answers: the content of the files in a run folder.

- `RUN/manifest.json`: the RunRecord of the training that the folder belongs to.
- `RUN/training.json`: the TrainingSummary: where the settings came from, and how the training went.
- `RUN/adapter/manifest.json`: the RunRecord of the finished training; `RUN/model/` if full.
- `RUN/chosen.json`: the Choice among the adapters of a training, if there was one.
- `RUN/adapter/choice.json`: the Choices between the model and the text classifier.
- `RUN/answers/NAME/manifest.json`: the AnswersRecord of the answers to one test file.
- `RUN/answers/NAME/scores.json`: the StoredScores of these answers.

`run.py` says where these files lie.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from panjue.prompts.plumbing.config import first_complaint
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import difference, read_object, read_record, sha256, write_json
from panjue.prompts.plumbing.intervals import Ends

MANIFEST = "manifest.json"
CHOICE = "choice.json"
SCORES = "scores.json"
DECODING = "decode.json"
SUMMARY = "training.json"
CHOSEN = "chosen.json"

AnsweredBy = Literal["model", "classifier"]

Kind = TypeVar("Kind", bound=BaseModel)

SplitBy = Literal["text", "normal text"]
"""What of a case decides whether it is held out or chosen; in version 0.4, white space counted,
too."""

Half = Literal["", "choosing", "other"]
"""The half of held-out cases that chooses the adapter, the other half, or "" for all."""

# What an entry of a record affects, by its annotation. A test fails for an entry without one.
NAMES = "a name or path; the hash beside it counts"
DATA = "the choice of the examples"
ROWS = "the token rows"
WEIGHTS = "the trained weights alone"
RESULT = "nothing: it is known when all is done"
CASES = "the cases, and all answers to them"
REPLIES = "the model's replies alone"


class Record(BaseModel):
    """Base of the records. A `manifest.json` has exactly the keys of its record."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    versions: Annotated[Mapping[str, str], RESULT] = Field(default_factory=dict)
    """Library -> version; for panjue with the commit. A run may resume with other versions."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        path = folder / MANIFEST
        try:
            return cls.model_validate(read_record(path))
        except ValidationError as error:
            problem = first_complaint(error)
            raise UserError(
                f"{path}: {problem}; another version of panjue made it: make it again"
            ) from None

    def write(self, folder: Path) -> None:
        """Write the record into a folder, without entries that are not set."""
        write_json(folder / MANIFEST, self.model_dump(mode="json", exclude_unset=True))

    def part(self, *affected: str) -> dict[str, Any]:
        """Return the entries that affect one of these: `part(DATA, ROWS)` is of training rows.

        What an entry affects is in its annotation: `train_sha256: Annotated[str, DATA]`.
        """
        fields = type(self).model_fields.items()
        names = {name for name, info in fields if not set(affected).isdisjoint(info.metadata)}
        return self.model_dump(include=names, mode="json")

    def difference(self, new: Self, *affected: str) -> str:
        """Return, in one line, how the entries of `part(*affected)` differ in `new`.

        `old.difference(new, WEIGHTS)` -> `seed: 1 -> 2`, because `seed` affects the WEIGHTS.
        """
        return difference(self.part(*affected), new.part(*affected))


class RunRecord(Record):
    """What a training was made from. Trainings with equal records give equal adapters."""

    task: Annotated[str, DATA]
    base: Annotated[str, NAMES]
    base_sha256: Annotated[str, ROWS]
    base_files: Annotated[dict[str, str], NAMES] = Field(default_factory=dict)
    """File of the base -> its hash; `base_sha256` is of them all. Versions before 0.5 had none."""
    from_run: Annotated[str | None, NAMES] = None
    """The training that this one started from, as the setting `from` named it; None: from none."""
    from_run_sha256: Annotated[str | None, WEIGHTS] = None
    """Of its adapter."""
    from_labels_sha256: Annotated[str | None, DATA] = None
    """Of its labels, which are labels of this training too."""
    from_record: Annotated["RunRecord | None", NAMES] = None
    """What that adapter was made from."""
    train: Annotated[str, NAMES]
    train_sha256: Annotated[str, DATA]
    dev: Annotated[str | None, NAMES] = None
    dev_sha256: Annotated[str | None, DATA] = None
    mix: Annotated[str | None, NAMES] = None
    mix_sha256: Annotated[str | None, DATA] = None
    mix_ratio: Annotated[float | None, DATA] = None
    columns: Annotated[dict[str, str], DATA] = Field(default_factory=dict)
    """The task's name of a column -> its name in these files."""
    limit: Annotated[int | None, DATA] = None
    """Largest number of cases of each file that were used; None for all."""
    on_bad_row: Annotated[Literal["stop", "skip"], DATA] = "stop"
    split_by: Annotated[SplitBy, DATA] = "text"
    solve: Annotated[dict[str, Any], ROWS] = Field(default_factory=dict)
    opinions: Annotated[bool, WEIGHTS] = False
    """Whether prompts show the text classifier's opinions."""
    adopted: Annotated[tuple[str, ...], NAMES] = ()
    """The folders of another trainer from which the adapters come. It is unknown what they were
    trained on; labels, text classifier and held-out cases come from `train`."""
    adopted_sha256: Annotated[str | None, WEIGHTS] = None
    """Hash of the adapters in these folders."""
    prompt_sha256: Annotated[str, ROWS]
    task_sha256: Annotated[str | None, DATA] = None
    """Hash of the code and prompt in the task's folder, which make the token rows."""
    batch: Annotated[int, WEIGHTS] = 16
    processes: Annotated[int, WEIGHTS] = 1
    """Number of processes. Each has its own random state and its share of every step."""
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
    """Name of the attention in transformers; `panjue_packed` is `finetune.packed_attention`."""
    examples: Annotated[int | None, RESULT] = None
    """Number of training examples. Like the hashes below, unknown when the training is set up."""
    labels_sha256: Annotated[str | None, RESULT] = None
    classifier_sha256: Annotated[str | None, RESULT] = None
    adapter_sha256: Annotated[str | None, RESULT] = None
    """Only in the folder of a merged model: hash of the adapter that was merged into the base."""
    merged_files: Annotated[dict[str, str], RESULT] = Field(default_factory=dict)
    """Only in this folder, too: file of weights -> its hash. Absent before version 0.5."""

    @property
    def history(self) -> Iterator["RunRecord"]:
        """Yield this record, then that of the training that it started from, and so on."""
        yield self
        if self.from_record:
            yield from self.from_record.history

    @property
    def is_before_0_5(self) -> bool:
        """Say whether a version before 0.5 wrote it, which hashed base and code differently."""
        return not self.base_files


class AnswersRecord(Record):
    """What answers were made from. A generation resumes only with an equal record."""

    task: Annotated[str, CASES]
    test: Annotated[str, NAMES]
    test_sha256: Annotated[str, CASES]
    trained: Annotated[str | None, NAMES] = None
    """Folder of the adapter or model; None for an endpoint without a training."""
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
    cases: Annotated[int | None, RESULT] = None
    """Number of cases; not recorded before version 0.5."""
    asked: Annotated[bool, RESULT] = True
    """Whether the model was asked; otherwise the text classifier answers everything."""
    held_out: Annotated[bool, CASES] = False
    split_by: Annotated[SplitBy, CASES] = "text"
    """As in the record of the training."""
    highest_hash: Annotated[str, CASES] = ""
    """Highest hash of the held-out texts that are asked, if not all are; see `reader.hash_by`."""
    half: Annotated[Half, CASES] = ""
    columns: Annotated[dict[str, str], CASES] = Field(default_factory=dict)
    """The task's name of a column -> its name in the test file."""
    limit: Annotated[int | None, CASES] = None
    """Number of first cases that are answered; None for all."""
    endpoint: Annotated[str | None, REPLIES] = None
    solve: Annotated[dict[str, Any], CASES] = Field(default_factory=dict)
    on_bad_row: Annotated[Literal["stop", "skip"], CASES] = "stop"
    voted: Annotated[Mapping[str, str], RESULT] = Field(default_factory=dict)
    """If these answers are a vote: folder of answers that voted -> SHA-256 of its submission."""

    @model_validator(mode="before")
    @classmethod
    def _of_0_4(cls, found: dict[str, Any]) -> dict[str, Any]:
        """Read what versions before 0.5 wrote: `answered_by` in place of `asked`, and others."""
        if "answered_by" in found:
            found = {"asked": found["answered_by"] == "model", **found}
        gone = ("answered_by", "because", "scaling", "for_choice")
        return {name: value for name, value in found.items() if name not in gone}

    @property
    def is_of_adapter(self) -> bool:
        """Say whether the fine-tuned model answered, and not its base or an endpoint."""
        return bool(self.trained) and not self.endpoint and self.adapter != "none"


class TrainingSummary(BaseModel):
    """Where the settings of a training came from, and how it went; `training.json`.

    It is separate from the record, since two equal trainings take different times. An entry that is
    None becomes known when the training is finished.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: str = ""
    """Name of the config file."""
    changed: dict[str, Any] = Field(default_factory=dict)
    """Setting -> value, for settings that the command line changed; None if it emptied them."""
    finished: str | None = None
    """Date of the end, such as 2026-11-28."""
    steps: int | None = None
    kept_step: int | None = None
    held_out: int | None = None
    """Number of held-out examples; `held_out_loss` is their mean loss at the kept step."""
    held_out_loss: float | None = None
    tokens: int | None = None
    """Number of tokens of prompts and replies in all steps; two epochs count twice."""
    seconds: float | None = None
    """Time of steps and evaluations, without those that a crash lost."""
    memory: int | None = None
    """Peak memory of the first process in bytes: of its GPU, or without a GPU of its main
    memory."""
    device: str | None = None

    @classmethod
    def read(cls, folder: Path) -> "TrainingSummary | None":
        """Return the summary in a run folder; None without one, as version 0.4 wrote none."""
        return if_any(cls, folder / SUMMARY)


class StoredScores(BaseModel):
    """The part of `scores.json` that tables need; the metrics of `panjue score` are more keys."""

    model_config = ConfigDict(extra="allow", frozen=True)

    examples: int
    interval: dict[str, Ends]
    """Metric -> its 95% interval."""
    answered_by: str = ""
    in_sample: str = ""
    submission_sha256: str = ""

    @classmethod
    def read(cls, folder: Path, submission: str) -> "StoredScores | None":
        """Return the scores of the submission in a folder of answers; None without any.

        Scores of another submission, or of only some of its cases, do not count.
        """
        scores = if_any(cls, folder / SCORES)
        path = folder / submission
        if scores is None or not path.exists() or scores.submission_sha256 != sha256(path):
            return None
        decoding = folder / DECODING
        examples = read_object(decoding).get("examples") if decoding.exists() else None
        return scores if examples in (None, scores.examples) else None

    def mean(self, metric: str) -> float | None:
        return (self.model_extra or {}).get(metric)

    def ends(self, metric: str) -> Ends:
        """Return a metric's interval. Versions before 0.5 wrote one even for a single case."""
        counted = (self.model_extra or {}).get("counted", self.examples)
        return self.interval.get(metric, (None, None)) if counted > 1 else (None, None)


WHOLE = "answer"
"""Key in place of a field if candidates answer whole cases."""

MeanInterval = tuple[float, float | None, float | None]
"""A mean and the ends of its 95% interval, from a paired bootstrap over the same cases."""


class Candidate(BaseModel):
    """One who may answer, with the scores of their answers to held-out cases."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metrics: dict[str, float]
    interval: dict[str, Ends] = Field(default_factory=dict)
    """Metric -> its 95% interval."""
    sha256: str = ""
    """Hash of the weights, if the candidate is the adapter of a step."""
    step: int | None = None
    loss: float | None = None
    """Loss of this adapter on all held-out cases."""


class Best(BaseModel):
    """Which candidate is best at a field, or at whole cases, by this metric."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    candidate: str
    metric: str
    less_first: dict[str, MeanInterval]
    """Candidate -> its metric minus that of the first candidate."""


def model_less_classifier(best: Best) -> MeanInterval:
    """Return the model's score at a field minus the text classifier's, with its 95% interval.

    `less_first` has the opposite: a score minus that of the first candidate, which is the model.
    """
    mean, low, high = best.less_first["classifier"]
    # `0 - x`, because `-x` of 0.0 is -0.0, which is shown with its sign.
    if low is None or high is None:
        return 0 - mean, None, None
    return 0 - mean, 0 - high, 0 - low


WITH_LOGPROB = ", with logprob"
"""End of the name of a group of answers whose log-probabilities are known."""


class ConfidenceWeights(BaseModel):
    """The weights of log-odds in the confidence in an answer of the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classifier: float
    """Weight of the text classifier's log-odds that the answer is right."""
    model: float
    """Weight of the log-odds that the model itself gives its answer."""
    shift: float

    @model_validator(mode="before")
    @classmethod
    def _of_0_4(cls, found: Any) -> Any:
        """Read the scale and shift that versions before 0.5 wrote."""
        if isinstance(found, list | tuple) and len(found) == 2:
            return {"classifier": found[0], "model": 0.0, "shift": found[1]}
        return found


def weighs_model(calibration: Iterable[Mapping[str, ConfidenceWeights]]) -> bool:
    """Say whether the model's own probability counts in a confidence in any of these fields.

    `calibration` has agreement group -> weights for each field. The answers of an agreement group
    such as `agree, with logprob` have the model's log-probability; those of `agree` have none.
    """
    all_groups: set[str] = set().union(*calibration)
    return any(group.endswith(WITH_LOGPROB) for group in all_groups)


class Choice(BaseModel):
    """Who answers: the best of several candidates on held-out cases; `choice.json`, `chosen.json`.

    In an adapter's folder, it is a choice between the model and the text classifier for each field.
    In the run folder, it is a choice between the adapters of several steps.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    candidates: dict[str, Candidate]
    """The candidates. Of equally good ones, the first one answers."""
    best: dict[str, Best]
    """Field, or `WHOLE` -> who answers it."""
    panjue: str = ""
    """Version and commit of panjue that compared them."""
    cases: int
    counted: int
    """Number of cases with a weight in the metric."""
    file_sha256: str = ""
    """Hash of the file of the cases. The next entries say which held-out cases they are."""
    half: Half = ""
    most: int = 0
    """The setting `held_out_cases`."""
    highest_hash: str = ""
    asked: dict[str, Any] = Field(default_factory=dict)
    """How the model was asked: the entries of the answers' record that affect replies."""
    calibration: dict[str, dict[str, ConfidenceWeights]] = Field(default_factory=dict)
    """Weights of confidences in the model's answers; see `classifier.calibration`."""
    texts: tuple[str, ...] = ()
    """Hashes of the texts of the cases. On these, calibrated confidences would look too good."""

    def score(self, name: str, candidate: str) -> float:
        """Return a candidate's score at a field, or at whole cases."""
        return self.candidates[candidate].metrics[self.best[name].metric]

    def of_model(self, sha256: str) -> "Choice":
        """Return the choice with the fingerprint of the model that answered."""
        model = self.candidates["model"].model_copy(update={"sha256": sha256})
        return self.model_copy(update={"candidates": {**self.candidates, "model": model}})

    @property
    def answered_by(self) -> dict[str, AnsweredBy]:
        """Return field -> who answers it, for a choice between model and text classifier."""
        return {name: cast(AnsweredBy, best.candidate) for name, best in self.best.items()}

    @property
    def adapter(self) -> str:
        """Return the path of the best adapter in its run folder: `kept/step-50`.

        Only for a choice among adapters, which has the single entry `WHOLE` for whole cases.
        """
        return self.best[WHOLE].candidate

    @property
    def adapter_sha256(self) -> str:
        return self.candidates[self.adapter].sha256

    def __str__(self) -> str:
        """Return which adapter is best and why, in one line.

        Only for a choice among the adapters of several steps, not between model and classifier.
        """
        best = self.best[WHOLE]
        score = f"{best.metric} {self.score(WHOLE, best.candidate):.4f}"
        step = self.candidates[best.candidate].step
        return f"adapter of step {step}, chosen by {score} on {self.cases} held-out cases"

    @model_validator(mode="before")
    @classmethod
    def _of_0_4(cls, found: Any) -> Any:
        """Read what versions before 0.5 wrote."""
        if not isinstance(found, dict) or "best" in found:
            return found
        try:
            return choice_among_adapters(found) if "adapter" in found else choice_by_field(found)
        except (LookupError, TypeError, AttributeError, ValueError):
            return found  # a broken file: the error names what it lacks


class Choices(BaseModel):
    """An adapter's choices between model and text classifier, one for each way of asking."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    choices: tuple[Choice, ...]


def choice_among_adapters(found: dict[str, Any]) -> dict[str, Any]:
    """Convert a `chosen.json` of a version before 0.5 to the entries of a Choice.

    Its `gain` is the metric of the best adapter minus that of the first, so it is `less_first`.
    """
    adapter = found["adapter"]
    candidates = {name: dict(one) for name, one in found["candidates"].items()}
    candidates[adapter]["sha256"] = found["adapter_sha256"]
    first = next(iter(candidates))
    less_first = {} if adapter == first else {adapter: found["gain"]}
    best = {"candidate": adapter, "metric": found["metric"], "less_first": less_first}
    # These versions always chose by this half of the held-out cases.
    sizes = {"cases": found["cases"], "counted": found["counted"], "half": "choosing"}
    sizes["panjue"] = found.get("panjue", "")
    return {"candidates": candidates, "best": {WHOLE: best}, **sizes}


def choice_by_field(found: dict[str, Any]) -> dict[str, Any]:
    """Convert a `choice.json` of a version before 0.5 to the entries of a Choice.

    Its interval is of the model's score minus the classifier's. Today's `less_first` is of the
    classifier's score minus that of the first candidate, the model.
    """
    scores: dict[str, dict[str, float]] = {"model": {}, "classifier": {}}
    best = {}
    for name, field in found["fields"].items():
        metric = field["metric"]
        for who, metrics in scores.items():
            metrics[metric] = field[who]
        difference = (field["classifier"] - field["model"], -field["high"], -field["low"])
        best[name] = {
            "candidate": field["answered_by"],
            "metric": metric,
            "less_first": {"classifier": difference},
        }
    candidates = {who: {"metrics": metrics} for who, metrics in scores.items()}
    others = {name: value for name, value in found.items() if name != "fields"}
    return {"candidates": candidates, "best": best, **others}


def if_any(kind: type[Kind], path: Path) -> Kind | None:
    """Return the record in a file; None if there is no file."""
    if not path.exists():
        return None
    try:
        return kind.model_validate(read_object(path))
    except ValidationError as error:
        raise UserError(f"{path}: {first_complaint(error)}; delete it") from None
    except UserError as error:
        raise UserError(f"{error}; delete it") from None
