"""The report as one page that needs nothing but a browser."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from panjue.eval import figures
from panjue.eval.report import Report, browsed
from panjue.eval.score import remarks

FOLDER = Path(__file__).parent / "page"


def templates() -> Environment:
    """Return the pages' templates, which escape all that they are given."""
    return Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )


def page(found: Report) -> str:
    """Return the page: figures, tables, and the case browser with its data."""
    scores = found.scores
    measured = sorted({name for row in found.curve for name in row if name.startswith("eval_")})
    curves = [
        figures.curve(found.curve, ["loss"]),
        figures.curve(found.curve, shown(measured, scores.total.mean)),
    ]
    return (
        templates()
        .get_template("report.html")
        .render(
            found=found,
            scores=scores,
            remarks=[*remarks(scores), *found.skipped],
            style=(FOLDER / "report.css").read_text("utf-8"),
            script=(FOLDER / "report.js").read_text("utf-8"),
            cases=[browsed(case) for case in found.cases],
            metrics=figures.metrics(scores),
            groups={name: figures.by_group(scores, name) for name in scores.groups},
            confusions={name: figures.confusion(found, name) for name in found.confusion},
            reliability=figures.reliability(scores.calibration) if scores.calibration else "",
            curves=[one for one in curves if one],
        )
    )


def shown(measured: list[str], metrics: dict[str, float]) -> list[str]:
    """Return the held-out measures that are drawn: the loss and the headline."""
    headline = f"eval_{list(metrics)[-1]}"
    return [name for name in ("eval_loss", headline) if name in measured]
