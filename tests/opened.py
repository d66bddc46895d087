"""What tests call as the command line does: a folder is opened, then handed on."""

from collections.abc import Sequence
from pathlib import Path

from panjue.finetune.trained import find_trained
from panjue.serve.answers import open_answers
from panjue.serve.decoding import decode
from panjue.serve.job import Job, make_job
from panjue.serve.settings import AnswerSetting
from panjue.serve.tally import Tally


def decoded(path: Path, answer: AnswerSetting | None = None) -> Tally:
    """Make the submission of a folder of answers again, as `panjue decode` does."""
    return decode(open_answers(path), answer)


def generated(run: Path, test: Path, words: Sequence[str] = ()) -> None:
    """Answer a test file, as `panjue generate` does."""
    from panjue.prompts.cli_generate import generate
    from panjue.serve.settings import generate_settings

    trained = find_trained(run)
    generate(run, trained, test, generate_settings(run, trained, words))


def job_of(run: Path, words: Sequence[str] = ()) -> Job:
    """Return the job of a run, as `panjue generate` makes it."""
    from panjue.serve.settings import generate_settings

    trained = find_trained(run)
    job = make_job(run, trained, generate_settings(run, trained, words))
    job.check_engine()
    return job
