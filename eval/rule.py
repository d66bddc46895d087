"""The rule by which answers are decided: what `panjue tune` fits, and on which answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from pydantic import TypeAdapter, ValidationError

from panjue.eval.answers import AnsweredFile
from panjue.eval.pool import Exponents
from panjue.prompts.model import DECISION, has_classifier
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, sha256
from panjue.prompts.plumbing.run import TUNE, AnswersRecord

OTHER_LENGTHS = 2.0
"""Cases whose median length differs by more than this factor have other lengths."""


@dataclass(frozen=True)
class Rule:
    """The settings of the decider.

    Attributes:
        pair_price: Price, in F1, of a label of the first set that training never saw together with
            any decided label of the second set, and vice versa. 0 turns it off.
        class_prior: Weight of the class frequencies: beliefs are multiplied by `class_ratios` to
            this power and scaled to sum to 1. 0 turns it off.
        class_ratios: Field -> class -> real frequency divided by the mean belief; 1 if not named.
            It corrects label shift, as training may have mixed in cases of another kind (Saerens
            et al., Neural Computation 2002).
        exponents: Field -> the exponents of its pool with the text classifier; the other fields
            keep the model's belief.
        classifier_alone: The classifier's answer is the answer, whatever the replies.
    """

    pair_price: float = 0.0
    class_prior: float = 0.0
    class_ratios: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    exponents: Mapping[str, Exponents] = field(default_factory=dict)
    classifier_alone: bool = False

    @property
    def uses_classifier(self) -> bool:
        """Say whether one reply is enough to decide from."""
        return self.classifier_alone or bool(self.exponents)


@dataclass(frozen=True)
class Fitted:
    """The file that `panjue tune` writes.

    Attributes:
        fitted_on: The cases, from `cases_of`.
        replies: How the replies came about, from `replies_of`.
        characters: The median length of the cases.
        rules: Number of samples beside the first reply -> the rule for such answers.
    """

    fitted_on: dict[str, Any]
    replies: dict[str, Any]
    characters: float
    rules: dict[int, Rule]


def cases_of(record: AnswersRecord) -> dict[str, Any]:
    """Return which cases were answered."""
    return {"test_sha256": record.test_sha256, "held_out": record.held_out}


def replies_of(record: AnswersRecord) -> dict[str, Any]:
    """Return what shaped replies, but for their number."""
    return {"sampling": record.sampling, "constrained": record.constrained}


def characters_of(answered: AnsweredFile) -> float:
    """Return the median length of the cases."""
    return median([len(example.text) for example in answered.examples()] or [0])


def read_fitted(trained: Path | None) -> Fitted | None:
    """Return what `panjue tune` wrote into the folder of an adapter or model, if it did."""
    path = trained / DECISION if trained else None
    if path is None or not path.exists():
        return None
    try:
        return TypeAdapter(Fitted).validate_python(read_json(path))
    except ValidationError:
        raise UserError(f"{path}: is of another version; run `panjue tune` again") from None


def decision_sha256(trained: Path | None) -> str | None:
    """Return the hash of that file, if there is one."""
    path = trained / DECISION if trained else None
    return sha256(path) if path and path.exists() else None


def is_fitted_on(trained: Path, record: AnswersRecord) -> bool:
    """Say whether the rules in `trained` were fitted on the cases of these answers."""
    fitted = read_fitted(trained)
    return fitted is not None and fitted.fitted_on == cases_of(record)


def rule_for(answered: AnsweredFile, trained: Path) -> Rule:
    """Return the rule for these answers; refuse one that was fitted on answers of another kind."""
    record, fitted = answered.record, read_fitted(trained)
    if fitted is None:
        return Rule()
    was, now = fitted.replies, replies_of(record)
    differing = [key for key in now if was.get(key) != now[key]]
    differences = [f"{key}={was.get(key)}, not {now[key]}" for key in differing]
    if record.samples not in fitted.rules:
        known = " or ".join(map(str, fitted.rules))
        differences.append(f"samples={known}, not {record.samples}")
    characters = characters_of(answered)
    low, high = sorted((max(characters, 1), max(fitted.characters, 1)))
    if high > OTHER_LENGTHS * low:
        differences.append(f"cases of {fitted.characters:.0f} characters, not {characters:.0f}")
    if differences:
        raise UserError(
            f"{trained / DECISION}: was fitted on other answers ({'; '.join(differences)}); "
            f"`{_fitting_command(answered, trained)}` fits a rule for these; "
            f"`panjue decode {answered.folder} --greedy` takes the first replies"
        )
    rule = fitted.rules[record.samples]
    if rule.uses_classifier and not has_classifier(trained):
        raise UserError(f"{trained / DECISION}: needs a classifier, which training did not fit")
    return rule


def _fitting_command(answered: AnsweredFile, trained: Path) -> str:
    """Return the command that fits a rule for such answers."""
    record, training = answered.record, answered.answers.training
    dev = training.dev if training else None
    cases = quote(dev) if dev else f"{quote(training.train if training else 'TRAIN')} held_out=true"
    sampling = "".join(f" sampling.{key}={value}" for key, value in record.sampling.items())
    free = "" if record.constrained else " constrained=false"
    run = quote(str(trained.parent))
    words = f"samples={record.samples} answers={TUNE}{sampling}{free}"
    return f"panjue generate {run} {cases} {words} && panjue tune {run}"
