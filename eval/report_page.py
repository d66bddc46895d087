"""The report as one HTML page without external files."""

from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from panjue.eval import figures
from panjue.eval.report import Report
from panjue.eval.score import remarks

FOLDER = Path(__file__).parent / "page"


def templates() -> Environment:
    """Return the pages' templates; they escape all values."""
    return Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )


def page(report: Report) -> str:
    """Return the page: figures, tables, and the case browser with its data."""
    scores = report.scores
    headline = f"eval_{list(scores.total.mean)[-1]}"
    curves = [figures.curve(report.curve, names) for names in (["loss"], ["eval_loss", headline])]
    return (
        templates()
        .get_template("report.html")
        .render(
            report=report,
            scores=scores,
            remarks=[*remarks(scores), *report.skipped],
            style=(FOLDER / "report.css").read_text("utf-8"),
            script=(FOLDER / "report.js").read_text("utf-8"),
            cases=[asdict(case) for case in report.cases],
            metrics=figures.metrics(scores),
            groups={name: figures.by_group(scores, name) for name in scores.groups},
            confusions={name: figures.confusion(report, name) for name in report.confusion},
            reliability=figures.reliability(scores.calibration) if scores.calibration else "",
            curves=[svg for svg in curves if svg],
        )
    )
