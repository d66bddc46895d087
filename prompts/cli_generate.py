"""`panjue generate`: how a test file becomes a submission, from the top down.

A choice says who answers each field, the model or its text classifier, by the scores of both on
held-out cases. `held_out_cases` limits how many of these are asked: those with the lowest hashes of
their texts, up to `highest_hash`. If they also chose among adapters (`panjue choose`), only their
other half is asked.
"""

import os
import shlex
import shutil
from dataclasses import replace
from heapq import nsmallest
from pathlib import Path

from rich.console import Console

from panjue.eval.choice import best_by_field, choice_lines
from panjue.finetune.card import update_card
from panjue.finetune.trained import Trained, keep_choice
from panjue.prompts.columns import check_columns
from panjue.prompts.plumbing.errors import UserError, printable
from panjue.prompts.plumbing.files import exclusive_lock, sha256
from panjue.prompts.plumbing.ours import refuse_claim
from panjue.prompts.plumbing.records import (
    CHOICE,
    MANIFEST,
    AnswersRecord,
    Choice,
    Half,
    weighs_model,
)
from panjue.prompts.plumbing.run import ANSWERS, HELD_OUT, REPLACED_ANSWERS, is_held_out_name
from panjue.prompts.reader import Reader
from panjue.serve.answers import (
    DEMO_ANSWERED,
    Answered,
    asked_otherwise,
    choice_for,
    folder_meant,
    read_answers,
    with_cases,
)
from panjue.serve.decoding import decode
from panjue.serve.job import Job, make_job
from panjue.serve.session import (
    COMPLETIONS,
    Cases,
    Session,
    check_resumes,
    read_cases,
    record_of,
    session,
)
from panjue.serve.settings import AnswerSetting, GenerateConfig
from panjue.serve.tally import Tally

BESIDE = {
    COMPLETIONS: "the raw replies",
    "confidence.jsonl": "the confidence in each answer",
    "decode.json": "these counts",
}
"""Files beside a submission -> what they contain."""


def generate(run: Path, trained: Trained | None, test: Path, config: GenerateConfig) -> None:
    """Answer `test` into RUN/answers/NAME, and print what happened.

    With `answer=auto`, the held-out cases are asked first. On their answers, `eval` compares the
    model with the text classifier. The cases of `test` are asked if the model answers any field.
    `trained` is None if an endpoint answers without a training.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if config.limit:  # a trial on the first cases, which has its own folders
        changes = {
            "answers": config.answers or f"{test.stem}-limit{config.limit}",
            "held_out_cases": min(config.held_out_cases, config.limit),
        }
        config = config.model_copy(update=changes)
    if config.answer == "classifier" and not (trained and trained.has_classifier):
        raise UserError(f"answer=classifier: the training of {run} fitted none")
    job = make_job(run, trained, config)
    if trained and trained.chosen:
        console.print(str(trained.chosen))
    console.print("1/3 reading the cases")
    cases = test_cases(job, test)
    for line in cases.names.lines():
        console.print(printable(line))
    job.check_engine()
    with exclusive_lock(cases.folder, other="answers=NAME"):
        with session(job, console) as asking:
            choice = decided(asking, trained, cases) if trained and can_choose(job) else None
            model_answers = config.answer != "classifier"
            if choice:
                model_answers = "model" in choice.answered_by.values()
            if model_answers:
                answered = asking.ask(cases)
            else:
                answered = asking.without_asking(cases)
                console.print("2/3 the text classifier answers every field, the model is not asked")
        if trained:
            answered = replace(answered, choice=choice or choice_for(trained, answered.record))
        console.print("3/3 decoding")
        tally = decode(answered, config.answer)
        if trained:
            update_card(trained)
    print_tally(tally, answered)


def decode_again(path: Path, answer: AnswerSetting | None) -> None:
    """Make the submission of a folder of answers again, without a model, and print what happened.

    `answer` says who answers; None means as before.
    """
    folder = folder_meant(path)
    with exclusive_lock(folder):
        answered = with_cases(read_answers(folder))
        tally = decode(answered, answer)
        if answered.trained:
            update_card(answered.trained)
    print_tally(tally, answered)


def print_tally(tally: Tally, answered: Answered) -> None:
    """Print what decoding found, who answered, the files, and the next command."""
    for line in tally.lines():
        print(printable(line))
    folder = tally.submission.parent
    print(f"written: {tally.submission}")
    beside = [f"{name}, {what}" for name, what in BESIDE.items() if (folder / name).exists()]
    print(f"beside it: {'; '.join(beside)}")
    if answered.answers.is_of_demo:
        print(DEMO_ANSWERED)
    if "MAKELEVEL" not in os.environ:  # make runs the next command
        print(next_step(answered, tally))


def next_step(answered: Answered, tally: Tally) -> str:
    """Return the next command: `score`, or `check` if there is no gold."""
    words = ["check", answered.folder, "--cases", answered.test]
    if tally.has_gold:
        words = ["score", answered.test, answered.folder]
    return f"next: {shlex.join(['panjue', *map(str, words)])}"


def test_cases(job: Job, test: Path) -> Cases:
    """Return the cases of TEST; UserError: it has none, or their folder has other answers."""
    of_training = job.trained.record.columns if job.trained else {}
    columns = {**of_training, **job.config.columns}
    check_columns(job.task.data, columns)
    reader = Reader(
        job.task, columns=columns, limit=job.config.limit, on_bad_row=job.config.on_bad_row
    )
    name = job.config.answers or test.stem
    if not name.strip("."):
        raise UserError(f"{test}: gives answers no name for their folder; say answers=NAME")
    if is_held_out_name(name):
        raise UserError(f"{test}: answers named {name!r} are those to held-out cases; say answers=")
    cases = read_cases(test, reader, job.run / ANSWERS / name)
    if not cases.count:
        skipped = f"; {reader.skipped}" if reader.skipped.rows else ""
        raise UserError(f"{test}: has no cases{skipped}")
    refuse_others(job, cases)
    return cases


def refuse_others(job: Job, cases: Cases) -> None:
    """Refuse a folder with answers to other cases, made in another way, or not made by panjue.

    A folder without a record of panjue is refused if it has a file that answering would replace.
    """
    names = (*REPLACED_ANSWERS, job.task.data.submission.name)
    refuse_claim(cases.folder, names, "answers=NAME")
    if (cases.folder / MANIFEST).exists():
        old = AnswersRecord.read(cases.folder)
        check_resumes(old, record_of(job, cases, asked=True), cases.folder)


def can_choose(job: Job) -> bool:
    """Say whether held-out cases decide who answers: the fine-tuned model or its text classifier.

    `answer=auto` asks for it, and both must be able to answer.
    """
    trained = job.trained
    if job.config.answer != "auto" or trained is None:
        return False
    if job.config.endpoint or job.config.adapter == "none":
        return False
    return bool(job.task.answer.fields) and trained.has_classifier


def decided(asking: Session, trained: Trained, test: Cases) -> Choice:
    """Return and print the choice of who answers each field, by held-out cases asked as TEST.

    1. An earlier choice, kept beside the weights, counts if its cases were asked in the same way as
       TEST, and if it was made with the same setting `held_out_cases`.
    2. Otherwise the held-out cases are asked for a new choice.
    3. If they cannot be asked, the earlier choice counts all the same. A line says so if its cases
       were asked in another way. UserError: there is no earlier choice.
    """
    job = asking.job
    console = asking.console
    record = record_of(job, test, asked=True)
    choice = choice_for(trained, record)
    differs = asked_otherwise(choice, record) if choice else ""
    # With `limit`, few cases are asked, and a choice by more of them is better.
    is_of_other_size = choice and not job.config.limit and choice.most != job.config.held_out_cases
    if choice is None or differs or is_of_other_size:
        # If an adapter was chosen, its score is too good on the half of the cases that chose it.
        half: Half = "other" if trained.chosen else ""
        found = held_out_file(job, trained, half)
        if not isinstance(found, str):
            reader, file = found
            folder = held_out_folder(job, test)
            with exclusive_lock(folder, wait=True):
                held_out = read_cases(file, reader, folder)
                choice = choice_by(asking, trained, held_out)
                # If TEST is the dev file itself, its cases have just been asked.
                copy_replies(held_out, test, record)
        elif choice is None:
            raise UserError(
                f"{trained.run}: nobody can decide who answers, the model or the text classifier: "
                f"{found}; say answer=model or answer=classifier"
            )
        elif differs:  # the old choice counts; the lines on decoding say what differs
            console.print(f"no held-out cases can be asked: {found}")
    for line in choice_lines(choice):
        console.print(line)
    made = [trained.folder / CHOICE, held_out_folder(job, test)]
    old = " and ".join(str(path) for path in made if path.exists())
    if old and lacks_probability(choice):
        console.print(
            "confidences leave out the model's own probability: the held-out cases were answered "
            f"before it was kept; to ask them again, delete {old}"
        )
    return choice


def lacks_probability(choice: Choice) -> bool:
    """Say whether confidences in the model's answers ignore the model's own probability of them.

    They do so if the choice was made from replies of a version before 0.5, which did not keep this
    probability. Nothing is lacking if the model answers no field with calibrated confidences.
    """
    of_model = [name for name, who in choice.answered_by.items() if who == "model"]
    weights = [choice.calibration[name] for name in of_model if name in choice.calibration]
    return bool(weights) and not weighs_model(weights)


def held_out_folder(job: Job, test: Cases) -> Path:
    """Return the folder for answers to held-out cases, beside those to TEST."""
    name = f"{HELD_OUT}-{job.config.answers}" if job.config.answers else HELD_OUT
    return test.folder.with_name(name)


def choice_by(asking: Session, trained: Trained, held_out: Cases) -> Choice:
    """Return the choice of who answers each field better on held-out cases; keep it with `trained`.

    If no earlier choice was made from them, the model is asked. The caller holds the lock of their
    folder.
    """
    job = asking.job
    refuse_others(job, held_out)
    record = record_of(job, held_out, asked=True)
    for choice in trained.choices:  # another process may have made one meanwhile
        if is_made_of(choice, record):
            break
    else:
        asking.console.print(f"{held_out.count} held-out cases decide who answers each field")
        answered = asking.ask(held_out)
        decode(answered, "model")
        choice = best_by_field(answered)
    # If there are 400 held-out cases, held_out_cases=500 and =1000 ask the same ones. The choice
    # gets the setting of today, or `decided` would take it for one of another number of cases.
    choice = choice.model_copy(update={"most": job.config.held_out_cases})
    if not job.config.limit:  # the choice of a trial is only for the trial
        keep_choice(trained, choice)
    return choice


def held_out_file(job: Job, trained: Trained, half: Half) -> tuple[Reader, Path] | str:
    """Return a reader of the training's held-out cases, and their file; or why there is none.

    They are the dev file, or a part of the training file. At most `held_out_cases` of them are
    taken, those with the lowest hashes, which is a random choice. Of these, the reader gives only
    those in `half`; an empty text means both halves.
    """
    record = trained.record
    file = Path(record.dev or record.train)
    if not file.is_file() or sha256(file) != (record.dev_sha256 or record.train_sha256):
        return f"{file} is missing, or was changed"
    reader = Reader(
        job.task,
        held_out=record.dev is None,
        split_by=record.split_by,
        columns=record.columns,
        limit=record.limit,
        on_bad_row=record.on_bad_row,
    )
    most = job.config.held_out_cases
    lowest = nsmallest(most + 1, map(reader.hash_of, reader.read(file)))
    if not lowest:
        return "the training held out no cases"
    if len(lowest) > most:  # there are more held-out cases than are to be asked
        reader = replace(reader, highest_hash=lowest[most - 1])
    reader = replace(reader, half=half)
    if next(reader.read(file), None) is None:
        return f"none of the {len(lowest)} is in the half that is asked"
    return reader, file


def is_made_of(choice: Choice, record: AnswersRecord) -> bool:
    """Say whether a choice was made from answers with this record.

    The held-out cases are the same if they come from the same file, have the same upper limit of
    their hashes, and are of the same half. They also have to be asked in the same way.
    """
    of_choice = (choice.file_sha256, choice.half, choice.highest_hash)
    of_record = (record.test_sha256, record.half, record.highest_hash)
    return of_choice == of_record and not asked_otherwise(choice, record)


def copy_replies(held_out: Cases, test: Cases, record: AnswersRecord) -> None:
    """Copy the replies to held-out cases to TEST's folder, if both are from the same file.

    So no case is asked twice. `record` is the record of the answers to TEST.
    """
    replies = test.folder / COMPLETIONS
    of_held_out = held_out.folder / COMPLETIONS
    if replies.exists() or held_out.sha256 != test.sha256 or not of_held_out.exists():
        return
    if not (test.folder / MANIFEST).exists():  # a folder with replies needs a record
        # `asked` is False for now: the choice may be that the classifier answers all fields of
        # TEST. If the model is asked, `Session.ask` writes a new record.
        record.model_copy(update={"asked": False}).write(test.folder)
    shutil.copy(of_held_out, replies)
