"""The rule by which answers are decided: what is fitted on held-out answers, and on which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import TypeAdapter, ValidationError

from panjue.eval.answers import AnsweredFile
from panjue.eval.pool import Exponents
from panjue.prompts.model import DECISION, has_classifier
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, sha256
from panjue.prompts.plumbing.run import AnswersRecord

OTHER_LENGTHS = 2.0
"""Cases whose median length differs by more than this factor have other lengths."""


@dataclass(frozen=True)
class Rule:
    """What answers are decided from.

    Attributes:
        exponents: Field -> the exponents of its pool with the text classifier; the other fields
            keep the model's belief.
        classifier_alone: The classifier's answer is the answer, whatever the replies.
    """

    exponents: Mapping[str, Exponents] = field(default_factory=dict)
    classifier_alone: bool = False

    @property
    def uses_classifier(self) -> bool:
        """Say whether the text classifier has a part in the answers."""
        return self.classifier_alone or bool(self.exponents)

    def __str__(self) -> str:
        """Return the sources of the answers."""
        if self.classifier_alone:
            return "the text classifier's answers"
        if not self.exponents:
            return "the model's replies"
        return f"the model's replies, with the text classifier for {', '.join(self.exponents)}"


@dataclass(frozen=True)
class Fitted:
    """The file of the rules, beside an adapter.

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

    def is_for(self, samples: int, sampling: Mapping[str, Any], constrained: bool) -> bool:
        """Say whether there is a rule for replies that come about like this."""
        return samples in self.rules and self.replies == replies_of(sampling, constrained)


def cases_of(record: AnswersRecord) -> dict[str, Any]:
    """Return which cases were answered."""
    return {"test_sha256": record.test_sha256, "held_out": record.held_out}


def replies_of(sampling: Mapping[str, Any], constrained: bool) -> dict[str, Any]:
    """Return what shaped replies, but for their number."""
    return {"sampling": sampling, "constrained": constrained}


def read_fitted(trained: Path | None) -> Fitted | None:
    """Return the rules beside an adapter or model, if there are some."""
    path = trained / DECISION if trained else None
    if path is None or not path.exists():
        return None
    try:
        return TypeAdapter(Fitted).validate_python(read_json(path))
    except ValidationError:
        raise UserError(f"{path}: is of another version; delete it") from None


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
    if not fitted.is_for(record.samples, record.sampling, record.constrained):
        samples = " or ".join(map(str, fitted.rules))
        replies = replies_of(record.sampling, record.constrained)
        raise UserError(
            f"{trained / DECISION}: was fitted on answers with samples={samples} {fitted.replies}, "
            f"not samples={record.samples} {replies}; `panjue generate` again fits a rule for "
            "these, `panjue decode --greedy` takes the first replies"
        )
    rule = fitted.rules[record.samples]
    if rule.uses_classifier and not has_classifier(trained):
        raise UserError(f"{trained / DECISION}: needs a classifier, which training did not fit")
    return rule


def other_lengths(lengths: Sequence[int], trained: Path) -> str:
    """Return a warning if cases of these lengths are much unlike those of the fit."""
    fitted = read_fitted(trained)
    if fitted is None or not lengths:
        return ""
    characters = median(lengths)
    low, high = sorted((max(characters, 1), max(fitted.characters, 1)))
    if high <= OTHER_LENGTHS * low:
        return ""
    return (
        f"the rule was fitted on cases of {fitted.characters:.0f} characters (median), these have "
        f"{characters:.0f}: it may not hold for them"
    )
