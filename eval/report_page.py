"""The report as one HTML page without external files."""

from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from panjue.eval import figures
from panjue.eval.answers import open_answers
from panjue.eval.card import write_scores
from panjue.eval.report import Report, report
from panjue.eval.score import remarks
from panjue.prompts.options import protect_inputs
from panjue.prompts.plumbing.files import atomic_write

FOLDER = Path(__file__).parent / "page"


def main(run: Path, gold: Path | None) -> None:
    """Write the page and the adapter's card; say where they are."""
    opened = open_answers(run, gold)
    page_path = opened.folder / "report.html"
    with protect_inputs(opened.reader.skipped, inputs=()):
        result = report(opened)
    with atomic_write(page_path) as out:
        out.write(page(result))
    print(f"written: {page_path}")
    for line in result.skipped:
        print(line)
    if opened.record.is_of_adapter and result.decoding:
        print(write_scores(opened, result.scores.to_json(), result.tested))


def templates() -> Environment:
    """Return the pages' templates; they escape all values."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # fields in the task's order
    return environment


def page(result: Report) -> str:
    """Return the page: figures, tables, and the case browser with its data."""
    scores = result.scores
    lines = (["loss"], ["eval_loss", f"eval_{list(scores.total.mean)[-1]}"])
    curves = [figures.curve(result.curve, names, result.bilingual) for names in lines]
    return (
        templates()
        .get_template("report.html")
        .render(
            report=result,
            scores=scores,
            remarks=[*remarks(scores), *result.skipped],
            style=(FOLDER / "report.css").read_text("utf-8"),
            script=(FOLDER / "report.js").read_text("utf-8"),
            cases=[asdict(case) for case in result.cases],
            metrics=figures.metrics(scores, result.bilingual),
            groups={
                name: figures.by_group(scores, name, result.bilingual) for name in scores.groups
            },
            confusions={name: figures.confusion(result, name) for name in result.confusion},
            reliability=figures.reliability(scores.calibration, result.bilingual)
            if scores.calibration
            else "",
            curves=[svg for svg in curves if svg],
        )
    )
