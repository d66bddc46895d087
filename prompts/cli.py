"""The `panjue` command. Each command imports only its own stage, so that scoring starts fast.

Settings are checked before the stage is imported: importing torch or vLLM takes seconds.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from panjue.prompts.labels import load_labels
from panjue.prompts.plumbing.errors import UserError, in_one_line
from panjue.prompts.plumbing.files import atomic_write, sha256, write_json
from panjue.prompts.plumbing.options import (
    URL,
    Embeddings,
    JudgeName,
    OnBad,
    OptionalTask,
    Overrides,
    Size,
    SubmissionPath,
    TaskName,
    guarded,
    task_of,
)
from panjue.prompts.plumbing.orphans import watch_parent
from panjue.prompts.reader import Reader, side_groups
from panjue.prompts.task import comparing, load_task

watch_parent()  # acts only in the processes of an engine

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:  # typer passes it so
    if wanted:
        print(f"panjue {version('panjue')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """Fine-tune a language model to write structured judgments; decode, submit, score."""


def _load(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"panjue.{module}"), name)
    return function


@app.command()
def demo(folder: Path, train: Size = 1600, test: Size = 200, base: Size = 4000) -> None:
    """Write invented cases to FOLDER: train.jsonl, test.jsonl, and base.jsonl for `make base`."""
    from panjue.prompts.tasks.judgment.demo import write_demo

    write_demo(folder, {"train": train, "test": test, "base": base})


@app.command()
def base(config: Path, overrides: Overrides = None) -> None:
    """Train a tiny base model and its tokenizer from scratch, on invented cases."""
    settings = _load("finetune.settings", "base_settings")(config, overrides or [])
    _load("finetune.base", "make_base")(settings)


@app.command()
def sft(config: Path, overrides: Overrides = None) -> None:
    """Fine-tune: cases in, adapter out."""
    settings = _load("finetune.settings", "sft_settings")(config, overrides or [])
    _load("finetune.sft", "train")(settings)


@app.command()
def merge(
    run: Path,
    base: Annotated[str | None, typer.Option(help="the base model, if it was moved")] = None,
) -> None:
    """Merge the adapter of RUN into its base model: RUN/merged."""
    _load("serve.merge", "main")(run, base)


@app.command()
def generate(config: Path, overrides: Overrides = None) -> None:
    """Answer every case of the test file, then decode: completions.jsonl and the submission."""
    settings = _load("serve.settings", "generate_settings")(config, overrides or [])
    _decode(_load("serve.generate", "generate")(settings))


@app.command()
def decode(
    run: Path,
    greedy: Annotated[bool, typer.Option(help="use only the first reply of each case")] = False,
) -> None:
    """Make RUN's submission from RUN/completions.jsonl again, without a model."""
    _decode(run, greedy=greedy)


def _decode(run: Path, *, greedy: bool = False) -> None:
    tally = _load("eval.answers", "decode_run")(run, greedy=greedy)
    for line in tally.lines():
        print(line)
    print(f"written: {run / tally.submission}")


@app.command()
def serve(config: Path, overrides: Overrides = None) -> None:
    """Answer over HTTP: POST /v1/judgments, OpenAI's chat completions, and a web page."""
    settings = _load("serve.settings", "serve_settings")(config, overrides or [])
    _load("serve.server", "serve")(settings)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="a panjue server, or any OpenAI-compatible one")] = URL,
    file: Annotated[Path | None, typer.Option(help="the facts; default: paste them")] = None,
    defendant: Annotated[
        list[str] | None, typer.Option(help="repeatable; default: all found")
    ] = None,
    samples: Annotated[int, typer.Option(help="sampled replies, besides the first one")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
    law: Annotated[Path | None, typer.Option(help="JSON with the articles' texts")] = None,
    labels: Annotated[Path | None, typer.Option(help="if the server is not panjue's")] = None,
    model: Annotated[str | None, typer.Option(help="default: the server's first")] = None,
    task: TaskName = "judgment",
) -> None:
    """Ask a running server about a case and show the judgments as tables."""
    from panjue.serve.chat import ChatOptions
    from panjue.serve.chat import main as talk

    options = ChatOptions(url, task, defendant or (), samples, labels, model)
    talk(options, file, law, as_json=json)


@app.command()
def tune(run: Path) -> None:
    """Fit the decision rule on RUN's replies to held-out cases; saved next to its adapter."""
    _load("eval.tune", "main")(run)


@app.command()
def score(
    gold: Path,
    submission: SubmissionPath,
    task: OptionalTask = None,
    json: Annotated[Path | None, typer.Option(help="also write the numbers here")] = None,
    against: Annotated[
        Path | None, typer.Option(help="another submission: print differences and their certainty")
    ] = None,
    out_of_domain: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="GOLD SUBMISSION", help="of another domain: its scores and the mean"),
    ] = None,
    embeddings: Embeddings = "ngrams",
    judge: JudgeName = "agree",
    on_bad_row: OnBad = "stop",
) -> None:
    """Score SUBMISSION against GOLD by the task's official metric."""
    from panjue.eval import compare
    from panjue.eval.score import domain_means, show
    from panjue.eval.score import score as compute

    name, note = task_of(task, submission)
    task_used = comparing(load_task(name), embeddings, judge)
    reader = Reader(task_used, on_bad_row=on_bad_row)
    console = Console()
    files = (gold, submission, against, *(out_of_domain or ()))
    with guarded(reader.skipped, json, inputs=files, note=note):
        scores = compute(reader, gold, submission)
        other_scores = compute(reader, *out_of_domain) if out_of_domain else None
        differences = compare.compare(reader, gold, submission, against) if against else {}
    show(scores, console)
    numbers = scores.to_json()
    if against:
        compare.show(differences, against, console, scores.compared_by)
        numbers["against"] = {name: vars(d) for name, d in differences.items()}
    if other_scores:
        console.print("\nout of domain:")
        show(other_scores, console)
        numbers["out_of_domain"] = other_scores.to_json()
        numbers["domain_means"] = domain_means(scores, other_scores)
        for name, mean in numbers["domain_means"].items():
            console.print(f"{name}, mean of both domains: {mean:.4f}")
    numbers["skipped_rows"] = len(reader.skipped.rows)
    if reader.skipped.rows:
        print(reader.skipped)
    if json:
        numbers["submission_sha256"] = sha256(task_used.data.submission.find(submission))
        write_json(json, numbers)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="a run folder")],
    second: Annotated[Path, typer.Argument(help="another run of the same cases")],
    gold: Annotated[Path | None, typer.Option(help="default: the test file of both runs")] = None,
    json: Annotated[Path | None, typer.Option(help="also write the numbers here")] = None,
    fail_if_worse: Annotated[
        bool, typer.Option(help="exit code 1 if SECOND has the lower headline metric")
    ] = False,
    embeddings: Embeddings = "ngrams",
    judge: JudgeName = "agree",
) -> None:
    """Compare two runs: metrics, SECOND minus FIRST, and the cases won and lost."""
    from panjue.eval.answers import open_run
    from panjue.eval.compare import check_runs, compare_runs, show_runs

    first_run, run = open_run(first, gold), open_run(second, gold)
    check_runs(first_run, run, same_file=gold is None)
    reader = replace(run.reader, task=comparing(run.task, embeddings, judge))
    with guarded(reader.skipped, json, inputs=(first, second, run.test)):
        comparison = compare_runs(reader, run.test, first, second)
    show_runs(comparison, (first, second), Console())
    if reader.skipped.rows:
        print(reader.skipped)
    if json:
        write_json(json, comparison.to_json())
    raise typer.Exit(1 if fail_if_worse and comparison.is_worse else 0)


@app.command()
def bundle(
    run: Annotated[Path | None, typer.Argument(help="a run folder with its submission")] = None,
    out: Annotated[Path | None, typer.Argument(help="the ZIP")] = None,
    weights: Annotated[str, typer.Option(help="also pack: none, base or merged")] = "none",
    verify: Annotated[Path | None, typer.Option(help="a ZIP to test in an empty folder")] = None,
    cases: Annotated[Path | None, typer.Option(help="with --verify: the run's test file")] = None,
    base: Annotated[
        Path | None, typer.Option(help="the base, if it was moved; with --verify, if not packed")
    ] = None,
) -> None:
    """Pack RUN with code, weights and a manual into OUT; or test such a ZIP with --verify."""
    if verify and cases and not run and weights == "none":
        _load("serve.verify", "main")(verify, cases, base)
    elif run and out and not (verify or cases):
        _load("serve.bundle", "main")(run, out, weights, base)
    elif verify and not cases:
        raise UserError(f"{verify}: add --cases TEST, the test file of its run")
    else:
        raise UserError(
            "use RUN OUT.zip [--weights none|base|merged] [--base FOLDER], "
            "or --verify ZIP --cases TEST [--base FOLDER]"
        )


@app.command()
def report(
    run: Path,
    gold: Annotated[Path | None, typer.Option(help="default: the test file of RUN")] = None,
    html: Annotated[Path | None, typer.Option(help="default: RUN/report.html")] = None,
    embeddings: Embeddings = "ngrams",
    judge: JudgeName = "agree",
) -> None:
    """Write a page on RUN: scores, errors and every case; and its model card."""
    _load("eval.report_page", "main")(run, gold, html, embeddings, judge)


@app.command()
def fairness(
    gold: Path,
    submission: SubmissionPath,
    by: Annotated[str, typer.Option(help="attributes, separated by commas")],
    task: OptionalTask = None,
    groups: Annotated[Path | None, typer.Option(help="JSONL: id and further groups")] = None,
    train: Annotated[
        Path | None, typer.Option(help="the training file; default: that of the run folder")
    ] = None,
    train_groups: Annotated[Path | None, typer.Option(help="--groups of the training file")] = None,
    metric: Annotated[str | None, typer.Option(help="default: the task's headline")] = None,
    min_n: Annotated[int, typer.Option(min=1, help="flag groups with fewer examples")] = 20,
    json: Annotated[Path | None, typer.Option(help="also write the numbers here")] = None,
    html: Annotated[Path | None, typer.Option(help="also write a page with plots here")] = None,
    on_bad_row: OnBad = "stop",
) -> None:
    """Report a metric by groups: mean, disparity, worst group, gap and possible causes."""
    from panjue.eval.fairness import report
    from panjue.eval.fairness_page import page, show

    name, note = task_of(task, submission)
    reader = Reader(load_task(name), side_groups(groups), on_bad_row=on_bad_row)
    attributes = [name.strip() for name in by.split(",") if name.strip()]
    files = (gold, submission, groups, train, train_groups)
    with guarded(reader.skipped, json, html, inputs=files, note=note):
        result = report(
            name,
            reader,
            gold,
            submission,
            attributes,
            train=train,
            train_groups=train_groups,
            metric=metric,
            min_n=min_n,
        )
    show(result, Console())
    if reader.skipped.rows:
        print(reader.skipped)
    if json:
        write_json(json, result.to_json())
    if html:
        with atomic_write(html) as out:
            out.write(page(result))
        print(f"written: {html}")


@app.command()
def check(
    submission: SubmissionPath,
    cases: Annotated[Path, typer.Option(help="the test file of the submission")],
    labels: Annotated[Path | None, typer.Option(help="a labels.json: reject other labels")] = None,
    task: OptionalTask = None,
    on_bad_row: OnBad = "stop",
) -> None:
    """Print every fault of a submission, with its place; exit code 1 if there is one."""
    from panjue.eval.check import check as find_faults

    label_sets = load_labels(labels) if labels else None
    faults = 0
    name, note = task_of(task, submission)
    reader = Reader(load_task(name), on_bad_row=on_bad_row)
    with guarded(reader.skipped, inputs=(), note=note):
        for fault in find_faults(reader, submission, cases, label_sets):
            print(fault)
            faults += 1
    if reader.skipped.rows:
        print(reader.skipped)
    print(f"{submission}: {faults} faults" if faults else f"{submission}: clean")
    raise typer.Exit(1 if faults else 0)


def main() -> None:
    """Run the command line; an error that the user can fix gives one line and exit code 2."""
    # On a CPU it warns about a package that panjue does not need there.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with in_one_line():
        app()
