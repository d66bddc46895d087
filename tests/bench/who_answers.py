"""Who answers best: model, text classifier, the better of both by field, or by person.

    python -m tests.bench.who_answers HELD_OUT [--test ANSWERS]

HELD_OUT is a folder of answers with gold, such as RUN/answers/held-out, whose replies have the
model's log-probabilities. What has to be fitted is fitted on four fifths of its cases and judged on
the other fifth, in turns. With --test, all of it is fitted on HELD_OUT and judged on ANSWERS.

By person, an item's field is answered by whoever has the higher calibrated chance that the whole
field is right. With hindsight, it is answered by whoever is closer to gold.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from panjue.eval.choice import best_of, row_of_reply
from panjue.eval.compare import paired_differences
from panjue.eval.metric_values import (
    MetricValues,
    Summary,
    metric_values,
    summaries_by_group,
    summarize,
)
from panjue.eval.reliability import reliability
from panjue.finetune.classifier.calibration import (
    MIN_SCALED,
    Calibration,
    FieldAnswer,
    calibration_of,
    confidence_in,
    fit_weights,
    log_odds,
    platt,
)
from panjue.finetune.classifier.opinions import model_logprobs
from panjue.prompts.example import Example, first_reply, is_same
from panjue.prompts.plumbing.intervals import with_interval
from panjue.prompts.plumbing.records import ConfidenceWeights
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row
from panjue.serve.answers import Answered, open_answers
from tests.bench.common import parser

FOLDS = 5
WAYS = ("model", "classifier", "by field", "by person", "hindsight")


@dataclass(frozen=True)
class Pair:
    """The two answers to a field of an item, and the gold one."""

    model: FieldAnswer
    classifier: FieldAnswer
    gold: Any
    is_of_model: bool  # the reply has the field

    @property
    def differ(self) -> bool:
        return self.model.agreement == "differ"


@dataclass(frozen=True)
class Case:
    """A case with its gold row, the rows of both, and the pairs of answers."""

    example: Example
    gold: Row
    rows: Mapping[str, Row | None]
    answer: Mapping[str, Any]  # the model's, complete
    pairs: Sequence[Pair]
    rarest: str  # how often training had the rarest label of gold


def cases_of(answered: Answered) -> list[Case]:
    """Read the cases of a folder of answers."""
    task = answered.task
    fields = task.answer
    advisor = answered.advisor
    assert advisor, "the training has a classifier"
    replies = answered.rows()
    found = []
    for example in answered.examples():
        row = answered.row(replies, {"id": example.id})
        decoded = task.ask.decode(first_reply(row), example, answered.labels)
        opinions = advisor.opinions(example, row)
        answer = advisor.complete(decoded, opinions)
        alone = advisor.alone(example, opinions)
        nothing = task.ask.decode("", example, answered.labels)
        logprobs = model_logprobs(row, decoded, fields)
        of_model = advisor.judgments(decoded, answer, opinions, logprobs)
        of_classifier = advisor.judgments(nothing, alone, opinions, {})
        assert example.answer
        gold = fields.items_of(example.answer)
        pairs = []
        for model, classifier in zip(of_model, of_classifier, strict=True):
            doubt = None
            if model.logprob is not None:
                with np.errstate(divide="ignore"):
                    doubt = float(np.log(-np.expm1(min(model.logprob, 0.0))))
            other = classifier._replace(agreement="differ", logprob=doubt)
            value = gold[model.item][model.field]
            pairs.append(Pair(model, other, value, bool(model.agreement)))
        rows = {
            "model": row_of_reply(task, example, decoded),
            "classifier": task.data.write(example, alone),
        }
        rarest = rarest_label(answered, gold)
        found.append(Case(example, task.gold(example), rows, answer, pairs, rarest))
    return found


def rarest_label(answered: Answered, gold: Sequence[Mapping[str, Any]]) -> str:
    """Return in which range lies the training's count of the rarest label of gold."""
    fields = answered.task.answer
    if not fields.sets:
        return "no label sets"
    name = fields.sets[0]
    counts = answered.labels.counts[fields.kind(name)]
    rarest = min((counts.get(label, 0) for item in gold for label in item[name]), default=0)
    if rarest < 10:
        return "0 to 9"
    return "10 to 99" if rarest < 100 else "100 and more"


Decide = Callable[[Pair], str]
"""Says who answers a pair: `model` or `classifier`."""


def by_person(cases: Iterable[Case]) -> Decide:
    """Return the rule by person, fitted on these cases."""
    calibration = fitted(cases, calibration_of)
    of_classifier: dict[str, list[tuple[FieldAnswer, bool]]] = defaultdict(list)
    for pair in pairs_of(cases):
        if pair.differ:
            is_right = is_same(pair.gold, pair.classifier.value)
            of_classifier[pair.classifier.field].append((pair.classifier, is_right))
    weights = {name: fit_weights(answers) for name, answers in of_classifier.items()}

    def decide(pair: Pair) -> str:
        sure = confidence_in(calibration, pair.model)
        other = confidence_in(weights, pair.classifier)
        return "model" if sure > other else "classifier"

    return decide


def by_field(task: Task, cases: Sequence[Case]) -> Decide:
    """Return the rule by field, as the product decides it, on these cases."""
    values = {name: MetricValues(task) for name in ("model", "classifier")}
    for case in cases:
        for name, row in case.rows.items():
            values[name].add(case.example, metric_values(task, case.gold, row, ""))
    choice = best_of(values, {name: task.score.metric_of(name) for name in task.answer.fields})
    answered_by = choice.answered_by
    return lambda pair: answered_by[pair.model.field]


def hindsight(pair: Pair) -> str:
    """Return who is closer to gold."""

    def closeness(value: Any) -> float:
        if not isinstance(pair.gold, list):
            return float(value == pair.gold)
        common = len(set(pair.gold) & set(value))
        return 2 * common / max(1, len(pair.gold) + len(value))

    better = closeness(pair.model.value) > closeness(pair.classifier.value)
    return "model" if better else "classifier"


def row_by(task: Task, case: Case, decide: Decide) -> Row:
    """Return the submission row in which each field is answered as decided."""
    items = [dict(item) for item in task.answer.items_of(case.answer)]
    for pair in case.pairs:
        if pair.is_of_model and pair.differ and decide(pair) == "classifier":
            items[pair.model.item][pair.model.field] = pair.classifier.value
    return task.data.write(case.example, task.answer.with_items(case.answer, items))


def pairs_of(cases: Iterable[Case]) -> Iterable[Pair]:
    return (pair for case in cases for pair in case.pairs if pair.is_of_model)


def fitted(cases: Iterable[Case], fit: Any, *, with_logprob: bool = True) -> Calibration:
    """Return a calibration of the model's answers to these cases."""
    answers = []
    for pair in pairs_of(cases):
        answer = pair.model if with_logprob else pair.model._replace(logprob=None)
        answers.append((answer, is_same(pair.gold, answer.value)))
    calibration: Calibration = fit(answers)
    return calibration


def platt_alone(answers: Sequence[tuple[FieldAnswer, bool]]) -> Calibration:
    """Return the calibration of commit e65a9cdd, without the bound that it had on the scale."""
    groups: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
    for answer, is_right in answers:
        groups[answer.field, answer.agreement].append((answer.chance, is_right))
    calibration: dict[str, dict[str, ConfidenceWeights]] = defaultdict(dict)
    for (name, agreement), group in groups.items():
        if len(group) >= MIN_SCALED:
            odds = log_odds([chance for chance, _ in group])
            were_right = np.array([is_right for _, is_right in group])
            scale, shift = platt(odds, were_right)
            calibration[name][agreement] = ConfidenceWeights(classifier=scale, model=0, shift=shift)
    return calibration


@dataclass
class Results:
    """What is collected over all judged cases."""

    task: Task
    values: dict[str, MetricValues]
    overlap: dict[str, Counter[str]]  # field -> who is right as a whole -> persons
    by_person: Counter[str]  # field and who answers it, where the two differ
    rarest: dict[str, list[int]]  # range of `rarest_label` -> numbers of its cases
    confidences: dict[tuple[str, str], list[tuple[float, bool]]]
    """Field and calibration -> confidence of each of the model's answers, and if it is right."""

    def judge(self, fitting: Sequence[Case], cases: Sequence[Case]) -> None:
        """Add cases; what has to be fitted is fitted on `fitting`."""
        deciding = {
            "by field": by_field(self.task, fitting),
            "by person": by_person(fitting),
            "hindsight": hindsight,
        }
        calibrations = {
            "uncalibrated": {},
            "Platt, as before": fitted(fitting, platt_alone, with_logprob=False),
            "without logprob": fitted(fitting, calibration_of, with_logprob=False),
            "with logprob": fitted(fitting, calibration_of),
        }
        for case in cases:
            self.rarest[case.rarest].append(len(self.values["model"]))
            rows = dict(case.rows)
            for way, decide in deciding.items():
                rows[way] = row_by(self.task, case, decide)
            for way, row in rows.items():
                self.values[way].add(case.example, metric_values(self.task, case.gold, row, ""))
            for pair in case.pairs:
                self._count(pair, deciding["by person"])
            for kind, calibration in calibrations.items():
                self._add_confidences(case, kind, calibration)

    def _count(self, pair: Pair, by_person: Decide) -> None:
        name = pair.model.field
        of_model = pair.is_of_model and is_same(pair.gold, pair.model.value)
        if is_same(pair.gold, pair.classifier.value):
            self.overlap[name]["both" if of_model else "classifier alone"] += 1
        else:
            self.overlap[name]["model alone" if of_model else "neither"] += 1
        if pair.is_of_model and pair.differ:
            self.by_person[f"{name}: {by_person(pair)}"] += 1

    def _add_confidences(self, case: Case, kind: str, calibration: Calibration) -> None:
        for pair in pairs_of([case]):
            answer = pair.model if kind == "with logprob" else pair.model._replace(logprob=None)
            confidence = confidence_in(calibration, answer)
            is_right = is_same(pair.gold, answer.value)
            self.confidences[answer.field, kind].append((confidence, is_right))


def main() -> None:
    """Print the tables."""
    options = parser(__doc__, "held_out")
    options.add_argument("--test", type=Path)
    given = options.parse_args()
    held_out = open_answers(given.held_out)
    task = held_out.task
    fitting = cases_of(held_out)
    results = Results(
        task,
        values={way: MetricValues(task) for way in WAYS},
        overlap=defaultdict(Counter),
        by_person=Counter(),
        rarest=defaultdict(list),
        confidences=defaultdict(list),
    )
    if given.test:
        results.judge(fitting, cases_of(open_answers(given.test)))
    else:
        folds = np.random.default_rng(0).permutation(len(fitting)) % FOLDS
        for fold in range(FOLDS):
            others = [case for case, of in zip(fitting, folds, strict=True) if of != fold]
            own = [case for case, of in zip(fitting, folds, strict=True) if of == fold]
            results.judge(others, own)
    console = Console(width=160)
    show_scores(results, console)
    show_overlap(results, console)
    show_confidences(results, console)
    show_groups(results, console)
    console.print("weights, fitted on all of HELD_OUT:", fitted(fitting, calibration_of))


def show_overlap(results: Results, console: Console) -> None:
    """Print for how many persons each is right as a whole, and who answers by person."""
    kinds = ("both", "model alone", "classifier alone", "neither")
    table = Table("right as a whole", *kinds, box=None)
    for name, counts in results.overlap.items():
        table.add_row(name, *(str(counts[kind]) for kind in kinds))
    console.print(table)
    console.print("where the two differ, by person:", dict(sorted(results.by_person.items())))


def show_confidences(results: Results, console: Console) -> None:
    """Print calibration error, log loss and reliability of each field and calibration."""
    table = Table("field", "confidence of the model's answers", "ECE", "log loss", "n", box=None)
    pictures = Table("field", "confidence: share of right answers (answers)", box=None)
    for (name, kind), found in results.confidences.items():
        confidences, is_right = map(np.array, zip(*found, strict=True))
        of = reliability(confidences, is_right)
        chances = np.where(is_right, confidences, 1 - confidences)
        loss = -np.log(chances).mean()
        table.add_row(name, kind, f"{of.ece:.4f}", f"{loss:.4f}", str(len(found)))
        bins = [f"{one.confidence:.2f}: {one.accuracy:.2f} ({one.count})" for one in of.bins]
        pictures.add_row(f"{name}, {kind}", "  ".join(bins))
    console.print(table)
    console.print(pictures)


def show_groups(results: Results, console: Console) -> None:
    """Print the headline metric by group and by the count of the rarest label."""
    by_way: dict[str, dict[str, dict[str, Summary]]] = defaultdict(dict)
    for way, values in results.values.items():
        for attribute in sorted(values.groups):
            by_way[attribute][way] = summaries_by_group(values, attribute)
        by_way["rarest label in training"][way] = {
            name: summarize(values, np.array(rows)) for name, rows in sorted(results.rarest.items())
        }
    for title, summaries in by_way.items():
        table = Table(title, "cases", *summaries, box=None)
        for name, first in summaries["model"].items():
            cells = []
            for of_way in summaries.values():
                cells.append(f"{of_way[name].mean[results.task.score.headline]:.4f}")
            table.add_row(name, str(first.counted), *cells)
        console.print(table)


def show_scores(results: Results, console: Console) -> None:
    """Print each way's headline metric, and its differences to the better whole and by field."""
    values = results.values
    summaries = {way: summarize(of) for way, of in values.items()}
    headline = results.task.score.headline
    whole = max(("model", "classifier"), key=lambda way: summaries[way].mean[headline])
    console.print(f"{len(values[whole])} cases")
    table = Table("way", headline, f"less {whole}", "less by field", box=None)
    for way, summary in summaries.items():
        cells = [with_interval(summary.mean[headline], summary.interval[headline])]
        for other in (whole, "by field"):
            of = paired_differences(values[other], values[way])[headline]
            cells.append(with_interval(of.mean, (of.low, of.high), "+.4f", " to "))
        table.add_row(way, *cells)
    console.print(table)
    others = results.task.score.names
    table = Table("way", *others, box=None)
    for way, summary in summaries.items():
        table.add_row(way, *(f"{summary.mean[name]:.4f}" for name in others))
    console.print(table)


if __name__ == "__main__":
    main()
