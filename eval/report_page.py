"""The report as one HTML page without external files."""

from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from panjue.eval.answers import open_answers
from panjue.eval.fairness import remarks as fairness_remarks
from panjue.eval.report import PageData, page_data
from panjue.eval.score import remarks
from panjue.prompts.options import protect_inputs
from panjue.prompts.plumbing.files import atomic_write

FOLDER = Path(__file__).parent / "page"


def main(run: Path, gold: Path | None) -> None:
    """Write the page and say where it is."""
    opened = open_answers(run, gold)
    page_path = opened.folder / "report.html"
    with protect_inputs(opened.reader.skipped):
        result = page_data(opened)
    with atomic_write(page_path) as out:
        out.write(page(result))
    print(f"written: {page_path}")
    for line in result.skipped:
        print(line)


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
            fairness=fairness_lines(result),
        )
    )


def fairness_lines(result: PageData) -> dict[str, list[str]]:
    """Return attribute -> the lines on differences between its groups."""
    if result.fairness is None:
        return {}
    attributes = result.fairness.attributes.items()
    return {name: list(fairness_remarks(result.fairness, of)) for name, of in attributes}
