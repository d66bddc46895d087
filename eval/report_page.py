"""The report as one HTML page without external files."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from panjue.eval.answers import open_answers
from panjue.eval.card import write_scores
from panjue.eval.fairness import remarks as fairness_remarks
from panjue.eval.report import PageData, page_data
from panjue.eval.score import remarks
from panjue.prompts.options import protect_inputs
from panjue.prompts.plumbing.files import atomic_write

FOLDER = Path(__file__).parent / "page"


def main(run: Path, gold: Path | None) -> None:
    """Write the page and the adapter's card; say where they are."""
    opened = open_answers(run, gold)
    page_path = opened.folder / "report.html"
    with protect_inputs(opened.reader.skipped):
        result = page_data(opened)
    with atomic_write(page_path) as out:
        out.write(page(result))
    print(f"written: {page_path}")
    for line in result.skipped:
        print(line)
    if opened.record.is_of_adapter and result.decoding:
        print(write_scores(opened.answers, result.scores.to_json(), result.tested))


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


def page(result: PageData) -> str:
    """Return the page: tables, training curves, and the case browser with its data."""
    headline = list(result.scores.total.mean)[-1]
    curves = [curve(result.curve, name) for name in ("loss", "eval_loss", f"eval_{headline}")]
    return (
        templates()
        .get_template("report.html")
        .render(
            report=result,
            scores=result.scores,
            remarks=[*remarks(result.scores), *result.skipped],
            style=(FOLDER / "report.css").read_text("utf-8"),
            script=(FOLDER / "report.js").read_text("utf-8"),
            cases=[asdict(case) for case in result.cases],
            curves=[one for one in curves if one],
            fairness=fairness_lines(result),
        )
    )


def fairness_lines(result: PageData) -> dict[str, list[str]]:
    """Return attribute -> the lines on differences between its groups."""
    if result.fairness is None:
        return {}
    attributes = result.fairness.attributes.items()
    return {name: list(fairness_remarks(result.fairness, of)) for name, of in attributes}


@dataclass(frozen=True)
class Curve:
    """A value of the training log over the steps; `points` are those of an SVG line."""

    name: str
    first: float
    last: float
    steps: int
    points: str


def curve(rows: Sequence[Mapping[str, float]], name: str) -> Curve | None:
    """Return the curve of a value, 600 wide and 100 high; None if it was logged only once."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    if len(points) < 2:
        return None
    (left, first), (right, last) = points[0], points[-1]
    low, high = min(y for _, y in points), max(y for _, y in points)
    width, height = max(right - left, 1) / 600, max(high - low, 1e-9) / 100
    line = " ".join(f"{(x - left) / width:.1f},{(high - y) / height:.1f}" for x, y in points)
    return Curve(name, first, last, int(right), line)
