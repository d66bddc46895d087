"""The `panjue` command. Each command imports its stage when it is called, so that scoring is light.

Settings are read and checked before the stage itself: importing torch or vLLM takes seconds.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
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
    HandedIn,
    JudgeName,
    OnBad,
    Overrides,
    Size,
    TaskName,
    TaskOf,
    guarded,
    task_of,
)
from panjue.prompts.plumbing.orphans import watch_parent
from panjue.prompts.reader import Reader, side_groups
from panjue.prompts.task import comparing, load_task

watch_parent()  # in the command itself this does nothing

app = typer.Typer(
    help="Fine-tune a language model to write structured judgments; decode, hand in, score.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


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
    """Train a tiny base model and its tokenizer from nothing, on invented cases."""
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
    base: Annotated[str | None, typer.Option(help="where its base is now, if it moved")] = None,
) -> None:
    """Fold the adapter of RUN into its base: RUN/merged."""
    _load("serve.merge", "main")(run, base)


@app.command()
def generate(config: Path, overrides: Overrides = None) -> None:
    """Answer every case of the test file, then decode: completions.jsonl and the submission."""
    settings = _load("serve.settings", "generate_settings")(config, overrides or [])
    _decode(_load("serve.generate", "generate")(settings))


@app.command()
def decode(
    run: Path,
    greedy: Annotated[bool, typer.Option(help="take the first replies, decide nothing")] = False,
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
    """Answer over HTTP: POST /v1/judgments, OpenAI's chat completions, and a page to look at."""
    settings = _load("serve.settings", "serve_settings")(config, overrides or [])
    _load("serve.server", "serve")(settings)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="a panjue server, or any OpenAI-compatible one")] = URL,
    file: Annotated[Path | None, typer.Option(help="the facts; else they are pasted")] = None,
    defendant: Annotated[list[str] | None, typer.Option(help="once per name; else found")] = None,
    samples: Annotated[int, typer.Option(help="replies to decide from, beside the first")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
    law: Annotated[Path | None, typer.Option(help="JSON with the articles' texts")] = None,
    labels: Annotated[Path | None, typer.Option(help="for a server that is not panjue's")] = None,
    model: Annotated[str | None, typer.Option(help="its name there; else the first")] = None,
    task: TaskName = "judgment",
) -> None:
    """Ask a running server about a case: its judgments as tables."""
    from panjue.serve.chat import ChatOptions
    from panjue.serve.chat import main as talk

    asked = ChatOptions(url, task, defendant or (), samples, labels, model)
    talk(asked, file, law, as_json=json)


@app.command()
def tune(run: Path) -> None:
    """Fit how answers are decided to RUN's answers of held-out cases; kept beside its adapter."""
    _load("eval.tune", "main")(run)


@app.command()
def score(
    gold: Path,
    submission: HandedIn,
    task: TaskOf = None,
    json: Annotated[Path | None, typer.Option(help="also write the numbers here")] = None,
    against: Annotated[
        Path | None, typer.Option(help="another submission: say what differs, and how surely")
    ] = None,
    out_of_domain: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="GOLD SUBMISSION", help="another domain's: their scores and the mean"),
    ] = None,
    embeddings: Embeddings = "ngrams",
    judge: JudgeName = "agree",
    on_bad_row: OnBad = "stop",
) -> None:
    """Score SUBMISSION against GOLD by the task's official metric."""
    from panjue.eval import compare
    from panjue.eval.score import domain_means, show
    from panjue.eval.score import score as compute

    name, told = task_of(task, submission)
    task_used = comparing(load_task(name), embeddings, judge)
    reader = Reader(task_used, on_bad_row=on_bad_row)
    console = Console()
    files = (gold, submission, against, *(out_of_domain or ()))
    with guarded(reader.skipped, json, inputs=files, told=told):
        scores = compute(reader, gold, submission)
        others = compute(reader, *out_of_domain) if out_of_domain else None
        differences = compare.compare(reader, gold, submission, against) if against else {}
    show(scores, console)
    numbers = scores.to_json()
    if against:
        compare.show(differences, against, console, scores.compared_by)
        numbers["against"] = {name: vars(d) for name, d in differences.items()}
    if others:
        console.print("\nout of domain:")
        show(others, console)
        numbers["out_of_domain"] = others.to_json()
        numbers["domain_means"] = domain_means(scores, others)
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
    second: Annotated[Path, typer.Argument(help="another that answered the same cases")],
    gold: Annotated[Path | None, typer.Option(help="else the file that both answered")] = None,
    json: Annotated[Path | None, typer.Option(help="also write the numbers here")] = None,
    fail_if_worse: Annotated[
        bool, typer.Option(help="exit code 1 where SECOND has the lower headline metric")
    ] = False,
    embeddings: Embeddings = "ngrams",
    judge: JudgeName = "agree",
) -> None:
    """Compare two runs: metrics side by side, SECOND less FIRST, cases won and lost, and where."""
    from panjue.eval.answers import open_run
    from panjue.eval.compare import check_runs, compare_runs, show_runs

    other, run = open_run(first, gold), open_run(second, gold)
    check_runs(other, run, same_file=gold is None)
    reader = replace(run.reader, task=comparing(run.task, embeddings, judge))
    with guarded(reader.skipped, json, inputs=(first, second, run.test)):
        found = compare_runs(reader, run.test, first, second)
    show_runs(found, (first, second), Console())
    if reader.skipped.rows:
        print(reader.skipped)
    if json:
        write_json(json, found.to_json())
    raise typer.Exit(1 if fail_if_worse and found.is_worse else 0)


@app.command()
def bundle(
    run: Annotated[Path | None, typer.Argument(help="a run folder with its submission")] = None,
    out: Annotated[Path | None, typer.Argument(help="the ZIP")] = None,
    weights: Annotated[str, typer.Option(help="also pack: none, base or merged")] = "none",
    verify: Annotated[Path | None, typer.Option(help="a ZIP to try in an empty folder")] = None,
    cases: Annotated[Path | None, typer.Option(help="with --verify: the run's test file")] = None,
    base: Annotated[
        Path | None, typer.Option(help="the base: if it moved; with --verify, if it is not packed")
    ] = None,
) -> None:
    """Pack RUN with code, weights and a manual into OUT; or --verify such a ZIP."""
    if verify and cases and not run and weights == "none":
        _load("serve.verify", "main")(verify, cases, base)
    elif run and out and not (verify or cases):
        _load("serve.bundle", "main")(run, out, weights, base)
    elif verify and not cases:
        raise UserError(f"{verify}: say also --cases TEST, the test file of the run in it")
    else:
        raise UserError(
            "say RUN OUT.zip [--weights none|base|merged] [--base FOLDER], "
            "or --verify ZIP --cases TEST [--base FOLDER]"
        )


@app.command()
def report(
    run: Path,
    gold: Annotated[Path | None, typer.Option(help="else the file that RUN answered")] = None,
    html: Annotated[Path | None, typer.Option(help="else RUN/report.html")] = None,
    embeddings: Embeddings = "ngrams",
    judge: JudgeName = "agree",
) -> None:
    """Write one page on RUN: scores, where it errs, and every case to look at; and its card."""
    from panjue.eval.answers import open_run
    from panjue.eval.card import write_scores
    from panjue.eval.report import report as gather
    from panjue.eval.report_page import page

    opened, place = open_run(run, gold), html or run / "report.html"
    compared = replace(opened.reader, task=comparing(opened.task, embeddings, judge))
    opened = replace(opened, reader=compared)
    with guarded(opened.reader.skipped, html, inputs=(opened.test,)):
        found = gather(opened)
    with atomic_write(place) as out:
        out.write(page(found))
    print(f"written: {place}")
    for line in found.skipped:
        print(line)
    if opened.is_of_adapter and found.decoding:
        print(write_scores(opened, found.scores.to_json(), found.tested))


@app.command()
def fairness(
    gold: Path,
    submission: HandedIn,
    by: Annotated[str, typer.Option(help="attributes, with commas between")],
    task: TaskOf = None,
    groups: Annotated[Path | None, typer.Option(help="rows of id and further groups")] = None,
    train: Annotated[
        Path | None, typer.Option(help="the training file; else what the run folder says")
    ] = None,
    train_groups: Annotated[
        Path | None, typer.Option(help="the same for the training file: ids may be others there")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="one of the task's; else its last")] = None,
    min_n: Annotated[int, typer.Option(min=1, help="groups of fewer examples are flagged")] = 20,
    json: Annotated[Path | None, typer.Option(help="also write the numbers here")] = None,
    html: Annotated[Path | None, typer.Option(help="also write a page with plots here")] = None,
    on_bad_row: OnBad = "stop",
) -> None:
    """Report a metric by groups: mean, disparity, worst group, gap, and what may explain them."""
    from panjue.eval.fairness import report
    from panjue.eval.fairness_page import page, show

    name, told = task_of(task, submission)
    reader = Reader(load_task(name), side_groups(groups), on_bad_row=on_bad_row)
    attributes = [name.strip() for name in by.split(",") if name.strip()]
    files = (gold, submission, groups, train, train_groups)
    with guarded(reader.skipped, json, html, inputs=files, told=told):
        found = report(
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
    show(found, Console())
    if reader.skipped.rows:
        print(reader.skipped)
    if json:
        write_json(json, found.to_json())
    if html:
        with atomic_write(html) as out:
            out.write(page(found))
        print(f"written: {html}")


@app.command()
def check(
    submission: HandedIn,
    cases: Annotated[Path, typer.Option(help="the test file that was answered")],
    labels: Annotated[Path | None, typer.Option(help="a labels.json: refuse other labels")] = None,
    task: TaskOf = None,
    on_bad_row: OnBad = "stop",
) -> None:
    """Print every fault that a hand-in has, with its place; exit code 1 if there is one."""
    from panjue.eval.check import check as find_faults

    known = load_labels(labels) if labels else None
    faults = 0
    name, told = task_of(task, submission)
    reader = Reader(load_task(name), on_bad_row=on_bad_row)
    with guarded(reader.skipped, inputs=(), told=told):
        for fault in find_faults(reader, submission, cases, known):
            print(fault)
            faults += 1
    if reader.skipped.rows:
        print(reader.skipped)
    print(f"{submission}: {faults} faults" if faults else f"{submission}: clean")
    raise typer.Exit(1 if faults else 0)


def main() -> None:
    """Run the command line; what a user can mend ends in one line and exit code 2."""
    # On a CPU it asks for a package that has nothing for what is done here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with in_one_line():
        app()
