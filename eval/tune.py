"""Fit the settings of the decider on held-out completions, by the task's headline metric."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from panjue.eval.answers import Run, open_run
from panjue.eval.classifier import Classifier, load_classifier
from panjue.eval.decide import Decider, cases_of
from panjue.eval.fit_pool import FitCase, fit_cases, trials
from panjue.eval.pool import Exponents, Pool
from panjue.eval.values import score_answers
from panjue.prompts.example import Answer, Example
from panjue.prompts.model import DECISION, has_classifier
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, write_json

PAIR_PRICES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
CLASS_PRIORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)

Setting = tuple[float, float]
"""`pair_price` and `class_prior` of the `Decider`."""

Ratios = dict[str, dict[str, float]]
"""`class_ratios` of the `Decider`."""


def main(folder: Path) -> None:
    """Print the scores of every setting; write the best one into the adapter's folder."""
    run = open_run(folder)
    check(run)
    console = Console(soft_wrap=True)
    table = Table("price, prior", *run.task.score.summary_names)
    classifier = load_classifier(run.trained, run.task)
    cases = list(fit_cases(run, classifier))
    greedy = score_answers(run.task, ((case.example, case.first) for case in cases))
    table.add_row("greedy", *(f"{greedy[name]:.4f}" for name in run.task.score.summary_names))
    pool = fitted_pool(run, cases, classifier, console) if classifier else None
    if pool is None and not run.provenance["samples"]:
        (run.trained / DECISION).unlink(missing_ok=True)
        console.print(
            "nothing is decided: the text classifier gains in no field, and there is one reply to "
            "each case; `panjue decode` keeps the first replies",
            highlight=False,
        )
        return
    ratios = class_ratios(run, cases, pool)
    # The price acts on label sets only and the prior on classes only: each is fitted alone.
    prices = [(price, 0.0) for price in PAIR_PRICES]
    pair_price, _ = _best(run, metrics(run, cases, prices, ratios, pool), table)
    priors = [(pair_price, prior) for prior in CLASS_PRIORS]
    best = _best(run, metrics(run, cases, priors, ratios, pool), table)
    console.print(table)
    console.print(
        "in-sample: the rule was fitted on these very cases; expect lower scores on other cases",
        highlight=False,
    )
    fitted = {"pair_price": best[0], "class_prior": best[1], "class_ratios": ratios}
    used = {"exponents": pool.exponents} if pool else {}
    write_json(run.trained / DECISION, {**fitted, **used, "fitted_on": cases_of(run.provenance)})
    console.print(
        f"written: {run.trained / DECISION}; `panjue decode` uses it", highlight=False, markup=False
    )


def fitted_pool(
    run: Run, cases: Sequence[FitCase], classifier: Classifier, console: Console
) -> Pool | None:
    """Return the pool with the text classifier, for the fields in which it gains; else None."""
    exponents: dict[str, Exponents] = {}
    for trial in trials(run, cases, classifier):
        if trial.gains:
            exponents[trial.field] = trial.exponents
        used = "exponents {:g}, {:g}".format(*trial.exponents) if trial.gains else "not used"
        console.print(
            f"text classifier, {trial.field}: {used}; in cross-validation "
            f"{run.task.score.names[-1]} {trial.without:.4f} -> {trial.with_classifier:.4f}",
            highlight=False,
        )
    return Pool(classifier, exponents) if exponents else None


def class_ratios(run: Run, cases: Sequence[FitCase], pool: Pool | None = None) -> Ratios:
    """Return, for each class, its frequency in gold divided by its mean belief.

    Gold is the whole file that the run answered, training cases included: these cases are like
    the test cases, but those that training mixed in may not be.
    """
    fields = run.task.answer.classes
    believed: dict[str, Counter[str]] = {field: Counter() for field in fields}
    for case in cases:
        for item in case.pooled(pool) if case.beliefs is not None else ():
            for field in fields:
                believed[field].update(item[field])
    whole_file = replace(run.reader, held_out=False)
    gold = run.task.ask.labels(whole_file.read(run.test)).counts
    return {field: _ratios(gold.get(field, {}), believed[field]) for field in fields}


def _ratios(gold: Mapping[str, int], believed: Mapping[str, float]) -> dict[str, float]:
    """Return ratios of frequencies, both add-one smoothed."""
    classes = sorted({*gold, *believed})
    gold_counts = [gold.get(label, 0) + 1 for label in classes]
    masses = [believed.get(label, 0.0) + 1 for label in classes]
    scale = sum(masses) / sum(gold_counts)
    return {c: scale * n / m for c, n, m in zip(classes, gold_counts, masses, strict=True)}


def _best(run: Run, scores: Mapping[Setting, Mapping[str, float]], table: Table) -> Setting:
    """Return the setting with the best headline metric, of equal ones the smallest; add rows."""
    headline = run.task.score.names[-1]
    best = max(scores, key=lambda setting: (scores[setting][headline], -sum(setting)))
    for setting, values in scores.items():
        cells = (f"{values[name]:.4f}" for name in run.task.score.summary_names)
        style = "bold" if setting == best else None
        table.add_row("{:g}, {:g}".format(*setting), *cells, style=style)
    return best


def metrics(
    run: Run,
    cases: Sequence[FitCase],
    settings: Iterable[Setting],
    ratios: Ratios | None = None,
    pool: Pool | None = None,
) -> dict[Setting, dict[str, float]]:
    """Return the metrics of the answers that are decided under each setting."""
    beliefs = [case.pooled(pool) for case in cases]

    def answers(decider: Decider) -> Iterator[tuple[Example, Answer]]:
        for case, items in zip(cases, beliefs, strict=True):
            answer = decider.decide_from(case.first, items).answer if items else case.first
            yield case.example, answer

    return {
        setting: score_answers(
            run.task, answers(Decider(run.task, run.labels, *setting, class_ratios=ratios))
        )
        for setting in settings
    }


def check(run: Run) -> None:
    """Refuse runs that cannot be used for fitting.

    Raises:
        UserError: The answers are not decided or not from the fine-tuned model, there are neither
            samples nor a classifier, or the cases are not those that training held out.
    """
    if not run.task.answer.fields:
        raise UserError(f"{run.folder}: its task {run.provenance['task']!r} has nothing to fit")
    if not run.is_of_adapter:
        raise UserError(f"{run.folder}: only answers of a fine-tuned model can be fitted")
    if not run.provenance["samples"] and not has_classifier(run.trained):
        raise UserError(f"{run.folder}: has no samples to decide from; generate with samples=8")
    dev = read_json(run.trained / "manifest.json").get("dev_sha256")
    if not run.held_out and (dev is None or run.provenance["test_sha256"] != dev):
        raise UserError(
            f"{run.folder}: its cases are not those that training held out; generate with "
            "held_out=true on the training file, or on the dev file if training had one"
        )
