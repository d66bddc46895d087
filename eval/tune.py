"""Fit the settings of the decider on held-out completions, by the task's headline metric."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from panjue.eval.answers import AnsweredFile, open_answers
from panjue.eval.classifier import Classifier, load_classifier
from panjue.eval.decide import Decider, cases_of
from panjue.eval.fit_pool import FitCase, fit_cases, trials
from panjue.eval.pool import Exponents, Pool
from panjue.eval.values import score_answers
from panjue.prompts.example import Answer, Example
from panjue.prompts.model import DECISION, has_classifier
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import write_json
from panjue.prompts.plumbing.run import ANSWERS, TUNE
from panjue.prompts.task import Task

PAIR_PRICES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
CLASS_PRIORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)

Setting = tuple[float, float]
"""`pair_price` and `class_prior` of the `Decider`."""

Ratios = dict[str, dict[str, float]]
"""`class_ratios` of the `Decider`."""


def main(folder: Path) -> None:
    """Print the scores of every setting; write the best one into the adapter's folder."""
    tuning = folder / ANSWERS / TUNE
    answered = open_answers(tuning if tuning.is_dir() else folder)
    check(answered)
    console = Console(soft_wrap=True)
    table = Table("price, prior", *answered.task.score.summary_names)
    classifier = load_classifier(answered.trained, answered.task)
    cases = list(fit_cases(answered, classifier))
    greedy = score_answers(answered.task, ((case.example, case.first) for case in cases))
    table.add_row("greedy", *(f"{greedy[name]:.4f}" for name in answered.task.score.summary_names))
    pool = fitted_pool(answered, cases, classifier, console) if classifier else None
    if pool is None and not answered.record.samples:
        (answered.trained / DECISION).unlink(missing_ok=True)
        console.print(
            "nothing is decided: the text classifier gains in no field, and there is one reply to "
            "each case; `panjue decode` keeps the first replies",
            highlight=False,
        )
        return
    ratios = class_ratios(answered, cases, pool)
    # The price acts on label sets only and the prior on classes only: each is fitted alone.
    prices = [(price, 0.0) for price in PAIR_PRICES]
    pair_price, _ = _best(answered.task, metrics(answered, cases, prices, ratios, pool), table)
    priors = [(pair_price, prior) for prior in CLASS_PRIORS]
    best = _best(answered.task, metrics(answered, cases, priors, ratios, pool), table)
    console.print(table)
    console.print(
        "in-sample: the rule was fitted on these very cases; expect lower scores on other cases",
        highlight=False,
    )
    fitted = {"pair_price": best[0], "class_prior": best[1], "class_ratios": ratios}
    used = {"exponents": pool.exponents} if pool else {}
    write_json(
        answered.trained / DECISION, {**fitted, **used, "fitted_on": cases_of(answered.record)}
    )
    console.print(
        f"written: {answered.trained / DECISION}; `panjue decode` uses it",
        highlight=False,
        markup=False,
    )


def fitted_pool(
    answered: AnsweredFile, cases: Sequence[FitCase], classifier: Classifier, console: Console
) -> Pool | None:
    """Return the pool with the text classifier, for the fields in which it gains; else None."""
    exponents: dict[str, Exponents] = {}
    for trial in trials(answered, cases, classifier):
        if trial.gains:
            exponents[trial.field] = trial.exponents
        used = "exponents {:g}, {:g}".format(*trial.exponents) if trial.gains else "not used"
        console.print(
            f"text classifier, {trial.field}: {used}; in cross-validation "
            f"{answered.task.score.names[-1]} {trial.without:.4f} -> {trial.with_classifier:.4f}",
            highlight=False,
        )
    return Pool(classifier, exponents) if exponents else None


def class_ratios(
    answered: AnsweredFile, cases: Sequence[FitCase], pool: Pool | None = None
) -> Ratios:
    """Return, for each class, its frequency in gold divided by its mean belief.

    Gold is the whole file that the run answered, training cases included: these cases are like
    the test cases, but those that training mixed in may not be.
    """
    fields = answered.task.answer.classes
    believed: dict[str, Counter[str]] = {field: Counter() for field in fields}
    for case in cases:
        for item in case.pooled(pool) if case.beliefs is not None else ():
            for field in fields:
                believed[field].update(item[field])
    whole_file = replace(answered.reader, held_out=False)
    gold = answered.task.ask.labels(whole_file.read(answered.test)).counts
    return {field: _ratios(gold.get(field, {}), believed[field]) for field in fields}


def _ratios(gold: Mapping[str, int], believed: Mapping[str, float]) -> dict[str, float]:
    """Return ratios of frequencies, both add-one smoothed."""
    classes = sorted({*gold, *believed})
    gold_counts = [gold.get(label, 0) + 1 for label in classes]
    masses = [believed.get(label, 0.0) + 1 for label in classes]
    scale = sum(masses) / sum(gold_counts)
    return {c: scale * n / m for c, n, m in zip(classes, gold_counts, masses, strict=True)}


def _best(task: Task, scores: Mapping[Setting, Mapping[str, float]], table: Table) -> Setting:
    """Return the setting with the best headline metric, of equal ones the smallest; add rows."""
    headline = task.score.names[-1]
    best = max(scores, key=lambda setting: (scores[setting][headline], -sum(setting)))
    for setting, values in scores.items():
        cells = (f"{values[name]:.4f}" for name in task.score.summary_names)
        style = "bold" if setting == best else None
        table.add_row("{:g}, {:g}".format(*setting), *cells, style=style)
    return best


def metrics(
    answered: AnsweredFile,
    cases: Sequence[FitCase],
    settings: Iterable[Setting],
    ratios: Ratios | None = None,
    pool: Pool | None = None,
) -> dict[Setting, dict[str, float]]:
    """Return the metrics of the answers that are decided under each setting."""
    beliefs, task = [case.pooled(pool) for case in cases], answered.task

    def answers(decider: Decider) -> Iterator[tuple[Example, Answer]]:
        for case, items in zip(cases, beliefs, strict=True):
            answer = decider.decide_from(case.first, items).answer if items else case.first
            yield case.example, answer

    deciders = {s: Decider(task, answered.labels, *s, class_ratios=ratios) for s in settings}
    return {setting: score_answers(task, answers(one)) for setting, one in deciders.items()}


def check(answered: AnsweredFile) -> None:
    """Refuse runs that cannot be used for fitting."""
    folder, record = answered.folder, answered.record
    if not answered.task.answer.fields:
        raise UserError(f"{folder}: its task {record.task!r} has nothing to fit")
    if not record.is_of_adapter:
        raise UserError(f"{folder}: only answers of a fine-tuned model can be fitted")
    if not record.samples and not has_classifier(answered.trained):
        raise UserError(f"{folder}: has no samples to decide from; generate with samples=8")
    training = answered.answers.training
    dev = training.dev_sha256 if training else None
    if not record.held_out and (dev is None or record.test_sha256 != dev):
        raise UserError(
            f"{folder}: its cases are not those that training held out; generate with "
            "held_out=true on the training file, or on the dev file if training had one"
        )
