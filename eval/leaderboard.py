"""The line that a scored run adds to the leaderboard in eval/README.md."""

from pathlib import Path

from panjue.eval.answers import method_of
from panjue.eval.score import Scores, decoding_of
from panjue.prompts.model import is_demo
from panjue.prompts.plumbing.files import generation, read_json, trained_in
from panjue.prompts.task import Task


def leaderboard_line(scores: Scores, submission: Path, task: Task) -> str:
    """Return a row of a Markdown table: system, cases, metrics, the headline's interval, notes.

    It is empty for a submission without its run, for the demo's model, for an endpoint, and for
    scores that are in sample or of other cases.

    Args:
        scores: The scores of the submission.
        submission: A submission, or the folder of answers in which it lies.
        task: Its task.
    """
    file = task.data.submission.find(submission)
    provenance, decoding = generation(file.parent), decoding_of(file)
    trained = trained_in(file.parent, provenance)
    is_other = scores.missing or scores.extra_rows or scores.in_sample or provenance.get("endpoint")
    if trained is None or decoding is None or is_other:
        return ""
    if not (trained / "manifest.json").exists() or is_demo(trained):
        return ""
    manifest = read_json(trained / "manifest.json")
    base = Path(manifest.get("base") or trained).name
    method = "not trained" if provenance.get("adapter") == "none" else manifest.get("method")
    *others, headline = task.score.summary_names
    low, high = scores.total.interval[headline]
    cells = [
        f"{base}, {method}, {method_of(provenance, decoding)}",
        str(scores.total.examples),
        *(f"{scores.total.mean[name]:.3f}" for name in others),
        f"{scores.total.mean[headline]:.3f} ({low:.3f} to {high:.3f})",
        "",
    ]
    return f"| {' | '.join(cells)} |"
