"""`panjue generate`: the way of a test file to its submission, from the top down."""

import os
import shutil
from dataclasses import replace
from heapq import nsmallest
from pathlib import Path

from rich.console import Console

from panjue.eval.choice import choice_lines, choose
from panjue.finetune.card import update_card
from panjue.prompts.model import has_classifier
from panjue.prompts.plumbing.errors import UserError, printable
from panjue.prompts.plumbing.files import exclusive_lock, sha256
from panjue.prompts.plumbing.ours import refuse_claim
from panjue.prompts.plumbing.run import (
    ANSWERS,
    HELD_OUT,
    MANIFEST,
    REPLACED_ANSWERS,
    AnswersRecord,
    Choice,
    Half,
    Run,
)
from panjue.prompts.reader import Reader
from panjue.serve.answers import held_out_answers, next_step, open_answers
from panjue.serve.decoding import Tally, decode_answers
from panjue.serve.job import Job, make_job
from panjue.serve.session import (
    COMPLETIONS,
    Cases,
    Session,
    check_resumes,
    claim,
    read_cases,
    record_of,
    session,
)
from panjue.serve.settings import GenerateConfig

BESIDE = {
    COMPLETIONS: "the raw replies",
    "confidence.jsonl": "the confidence in each answer",
    "decode.json": "these counts",
}
"""Files beside a submission, and what they have."""


def generate(run: Run, test: Path, config: GenerateConfig) -> None:
    """Answer `test` into RUN/answers/NAME, and print what happened.

    With `answer=auto` the cases that training held out are asked first. On these `eval` compares
    the model with the text classifier; `test` is asked if the model answers any field.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    job = make_job(run, config)
    if config.answer == "classifier" and not (run.result and has_classifier(run.result)):
        raise UserError(f"answer=classifier: the training of {run.folder} fitted none")
    if run.chosen:
        console.print(str(run.chosen))
    console.print("1/3 reading the cases")
    cases = test_cases(job, test)
    with exclusive_lock(cases.folder, other="answers=NAME"):
        with session(job, console) as asking:
            choice = chosen(asking, cases) if can_choose(job) else None
            if is_model_needed(config, choice):
                asking.ask(cases)
            else:
                claim(job, cases, console, asked=False)
                console.print("2/3 the text classifier answers every field, the model is not asked")
        console.print("3/3 decoding")
        tally = decode_answers(cases.folder, config.answer)
    update_card(run.result)
    print_tally(tally)


def print_tally(tally: Tally) -> None:
    """Print what decoding met, who answered, the files, and the next command."""
    for line in tally.lines():
        print(printable(line))
    folder = tally.submission.parent
    print(f"written: {tally.submission}")
    beside = [f"{name}, {what}" for name, what in BESIDE.items() if (folder / name).exists()]
    print(f"beside it: {'; '.join(beside)}")
    if "MAKELEVEL" not in os.environ:  # make goes on
        print(next_step(open_answers(folder)))


def test_cases(job: Job, test: Path) -> Cases:
    """Return the cases of TEST; UserError if it has none, or other answers are in their folder."""
    reader = Reader(job.task, on_bad_row=job.config.on_bad_row)
    name = job.config.answers or test.stem
    if name == HELD_OUT or name.startswith(f"{HELD_OUT}-"):
        raise UserError(f"{test}: answers named {name!r} are those to held-out cases; say answers=")
    cases = read_cases(test, reader, job.run.folder / ANSWERS / name)
    if not cases.count:
        skipped = f"; {reader.skipped}" if reader.skipped.rows else ""
        raise UserError(f"{test}: has no cases{skipped}")
    refuse_others(job, cases)
    return cases


def refuse_others(job: Job, cases: Cases) -> None:
    """Refuse a folder that has answers to other cases, made in another way, or of somebody else."""
    names = (*REPLACED_ANSWERS, job.task.data.submission.name)
    refuse_claim(cases.folder, names, "answers=NAME")
    if (cases.folder / MANIFEST).exists():
        old = AnswersRecord.read(cases.folder)
        check_resumes(old, record_of(job, cases, asked=True), cases.folder)


def can_choose(job: Job) -> bool:
    """Say whether it is open who answers: the fine-tuned model, or a text classifier beside it."""
    trained = job.run.result
    if job.config.answer != "auto" or trained is None:
        return False
    if job.config.endpoint or job.config.adapter == "none":
        return False
    return bool(job.task.answer.fields) and has_classifier(trained)


def is_model_needed(config: GenerateConfig, choice: Choice | None) -> bool:
    """Say whether the model answers any field of the test cases."""
    if config.answer == "auto" and choice:
        return any(of_field.answered_by == "model" for of_field in choice.fields.values())
    return config.answer != "classifier"


def chosen(asking: Session, test: Cases) -> Choice | None:
    """Return who answers each field, as answers to held-out cases made in the same way say.

    Without any the held-out cases are asked now. None if there are no such cases any more.
    """
    job = asking.job
    record = record_of(job, test, asked=True)
    if held_out_answers(test.folder, record) is None:
        held_out = held_out_cases(job, test, asking.console)
        if held_out is None:
            return None
        with exclusive_lock(held_out.folder, wait=True):
            if Choice.read(held_out.folder) is None:  # another process may have made it meanwhile
                asking.console.print(f"{held_out.count} held-out cases say who answers each field")
                asking.ask(held_out)
                decode_answers(held_out.folder, "model")
                choose(held_out.folder)
    folder = held_out_answers(test.folder, record)
    assert folder, "the choice was made just now"
    take_over(folder, test, record)
    choice = Choice.read(folder)
    assert choice
    for line in choice_lines(choice):
        asking.console.print(line)
    return choice


def held_out_cases(job: Job, test: Cases, console: Console) -> Cases | None:
    """Return the held-out cases that choose who answers; of the chosen adapter, the other half.

    None if there are none any more: then the model answers, which is printed.
    """
    found = held_out_file(job, "other" if job.run.chosen else "")
    if isinstance(found, str):
        console.print(f"no held-out cases to choose by, so the model answers: {found}")
        return None
    reader, file = found
    name = f"{HELD_OUT}-{job.config.answers}" if job.config.answers else HELD_OUT
    cases = read_cases(file, reader, test.folder.with_name(name))
    refuse_others(job, cases)
    return cases


def held_out_file(job: Job, half: Half) -> tuple[Reader, Path] | str:
    """Return what reads the cases that the training held out, and their file; or why there is none.

    They are in its dev file, or some of its training file. At most the setting `held_out_cases` of
    them count, those of the lowest hashes, which is a random choice.
    """
    record = job.run.record
    file = Path(record.dev or record.train)
    if not file.is_file() or sha256(file) != (record.dev_sha256 or record.train_sha256):
        return f"{file} is missing, or was changed"
    reader = Reader(
        job.task,
        held_out=record.dev is None,
        split_by=record.split_by,
        on_bad_row=record.on_bad_row,
    )
    most = job.config.held_out_cases
    lowest = nsmallest(most + 1, map(reader.hash_of, reader.read(file)))
    if not lowest:
        return "training held out none"
    if len(lowest) > most:
        reader = replace(reader, highest_hash=lowest[most - 1])
    reader = replace(reader, half=half)
    if next(reader.read(file), None) is None:
        return f"of {len(lowest)} none is of the half that is asked"
    return reader, file


def take_over(held_out: Path, test: Cases, record: AnswersRecord) -> None:
    """Start with the rows of the held-out cases if they are of TEST: none is asked twice."""
    rows = test.folder / COMPLETIONS
    if rows.exists() or AnswersRecord.read(held_out).test_sha256 != sha256(test.file):
        return
    if not (test.folder / MANIFEST).exists():  # without it the rows would be somebody's
        record.model_copy(update={"asked": False}).write(test.folder)
    shutil.copy(held_out / COMPLETIONS, rows)
