"""Answer every case of a test file: one schema per case, finished rows streamed to disk."""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from panjue.eval.answers import seen_by
from panjue.eval.fit_rule import fit_rules
from panjue.eval.rule import read_fitted
from panjue.prompts.example import Example
from panjue.prompts.model import has_classifier, model_sha256, prompt_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import difference, exclusive_lock, sha256
from panjue.prompts.plumbing.run import HELD_OUT, MANIFEST, AnswersRecord, Run
from panjue.prompts.reader import Reader
from panjue.prompts.render import RULES
from panjue.prompts.task import load_task
from panjue.serve.endpoint import Endpoint
from panjue.serve.engine import Engine, check_length, engine
from panjue.serve.job import Job, make_job
from panjue.serve.loop import Answerer, answer_all
from panjue.serve.output import Rest, StopSignals, answered_ids, load_rows, output, starting
from panjue.serve.settings import RESOURCES, GenerateConfig

# Made from completions, besides the submission.
DERIVED = ("decode.json", "confidence.jsonl", "scores.json", "report.html")


def generate_and_decode(
    run: Run, test: Path, config: GenerateConfig, decode: Callable[[Path], object]
) -> None:
    """Answer `test` and decode the answers by the rule for such replies.

    If there is none yet, it is fitted on the cases that training held out, which are answered
    first, in the same way.
    """
    held_out = held_out_file(run, config)
    is_test = held_out is not None and sha256(held_out) == sha256(test)
    if held_out and not is_test:
        name = f"{HELD_OUT}-{config.samples}" if config.samples else HELD_OUT
        print(f"the held-out cases first: on these is fitted how answers are decided ({name})")
        tenth = {"held_out": run.record.dev is None, "answers": name}
        generate(run, held_out, config.model_copy(update=tenth), fit_rules)
        print(f"now the cases of {test}")

    def fit_and_decode(folder: Path) -> None:
        if is_test:  # it is the training's own dev file
            fit_rules(folder)
        decode(folder)

    generate(run, test, config, fit_and_decode)


def held_out_file(run: Run, config: GenerateConfig) -> Path | None:
    """Return the file with the held-out cases on which a rule for such replies is to be fitted.

    None if there is a rule, or none is needed or possible.
    """
    if config.greedy or config.held_out or config.endpoint or config.adapter == "none":
        return None
    record, trained = run.record, run.trained
    task = load_task(record.task)
    if not task.answer.fields or not (config.samples or has_classifier(trained)):
        return None
    fitted = read_fitted(trained)
    if fitted and fitted.is_for(config.samples, config.sampling, config.constrained):
        return None
    file = Path(record.dev or record.train)
    if not file.is_file() or sha256(file) != (record.dev_sha256 or record.train_sha256):
        print(f"{file}: missing, or not the file of the training: no rule is fitted for decoding")
        return None
    reader = Reader(task, held_out=record.dev is None, on_bad_row=config.on_bad_row)
    return file if next(reader.read(file), None) else None


def generate(run: Run, test: Path, config: GenerateConfig, then: Callable[[Path], object]) -> None:
    """Write one row per example of `test` to `completions.jsonl`.

    No other process writes there until `then`, which gets the folder, has returned.

    A row has the raw replies (`texts`: the first one uses `sampling`, then come the `samples`), why
    each ended (`finish`), its `alternatives`, token counts and how many sentences were left out;
    greedy rows list their `near_ties`. An example that cannot be asked has `refused`, the reason,
    instead. If an example takes several calls, each call has a row. Existing rows are kept.
    """
    console = Console(soft_wrap=True, highlight=False)
    job = make_job(run, test, config)
    reader = Reader(job.task, held_out=config.held_out, on_bad_row=config.on_bad_row)
    console.print("1/3 reading the cases")
    is_seen = seen_by(job.trained)
    flags = [is_seen(example) for example in reader.read(test)]
    examples, seen = len(flags), sum(flags)
    if not examples:
        skipped = f"; {reader.skipped}" if reader.skipped.rows else ""
        raise UserError(f"{test}: has no cases{skipped}")
    if seen:
        console.print(f"{seen} of {examples} cases were trained on; expect lower scores on others")
    if config.held_out:
        check_held_out(run, test)
    record = record_of(job, test)
    with exclusive_lock(job.folder):
        claim(job, record, console)
        reader.skipped.write(job.folder / "skipped-test.jsonl")
        if reader.skipped.rows:
            console.print(str(reader.skipped), markup=False)
        answer_rest(job, reader, test, examples, console)
        console.print("3/3 decoding")
        then(job.folder)


def answer_rest(job: Job, reader: Reader, test: Path, total: int, console: Console) -> None:
    """Answer the examples that have no rows yet; `total` is the number of all examples."""
    path = job.folder / "completions.jsonl"
    old_rows = load_rows(path)
    done = answered_ids(reader, test, job.labels, old_rows) if old_rows else set()
    if len(done) >= total:
        console.print(f"{path}: all {total} are answered already")
        return
    if old_rows:
        console.print(f"continuing: {len(done)} of {total} are answered already")
    console.print(f"2/3 answering {total - len(done)} cases")
    todo = (example for example in reader.read(test) if str(example.id) not in done)
    rest = Rest(todo, old_rows, len(done), total)
    if job.config.ray:
        from panjue.serve.ray import answer_in_cluster

        answer_in_cluster(job, rest, console)
    else:
        answer_here(job, rest, console)


def answer_here(job: Job, rest: Rest, console: Console) -> None:
    """Answer with one engine in this process, or with an endpoint."""
    config = job.config
    with StopSignals(job.folder) as signals, ExitStack() as stack:
        job = job.with_model()
        source: Engine | Endpoint
        if config.endpoint:
            asker, source = job.asker(), stack.enter_context(closing(Endpoint(config.endpoint)))
        else:
            assert job.served, "without an endpoint, `make_job` has found a training"
            with starting(console, "the engine"):
                asker, running = job.asker(), engine(job.served, config.engine, None, config.seed)
                source = stack.enter_context(running)
            asker.longest = check_length(source, job.max_tokens).longest
        out = stack.enter_context(output(job.folder, rest.done, rest.total, console))
        slots = asyncio.Semaphore(config.slots)
        answerer = Answerer(source, asker, slots, job.passes)

        async def answer(example: Example) -> None:
            await answerer.answer(example, out.write, rest.find_row)
            out.solved()

        assert source.runner
        source.runner.run(signals.until_stopped(answer_all(rest.examples, answer, slots)))


def check_held_out(run: Run, test: Path) -> None:
    """Check that the training of a run held out a tenth of this test file."""
    record = run.record
    if record.dev_sha256:
        raise UserError(f"held_out: {run.folder} was trained with a dev file; name that file")
    if sha256(test) != record.train_sha256:
        raise UserError(f"held_out: name the training file of {run.folder}: {record.train}")


def record_of(job: Job, test: Path) -> AnswersRecord:
    """Return what the completions depend on; a run resumes only with an equal record."""
    config, trained = job.config, job.trained
    optional: dict[str, Any] = {"endpoint": config.endpoint} if config.endpoint else {}
    if config.on_bad_row == "skip":
        optional["on_bad_row"] = "skip"
    return AnswersRecord(
        task=job.task_name,
        test=str(test),
        test_sha256=sha256(test),
        trained=str(trained) if trained else None,
        trained_sha256=model_sha256(trained) if trained else None,
        labels_sha256=sha256(trained / "labels.json") if trained else None,
        prompt_sha256=prompt_sha256(job.task_name),
        adapter=config.adapter,
        constrained=config.constrained,
        max_tokens=job.max_tokens,
        seed=config.seed,
        engine=config.engine,
        sampling=config.sampling,
        samples=config.samples,
        held_out=config.held_out,
        **optional,
        **job.task.answer.provenance(),
        versions={
            "prompt rules": RULES,
            **{name: version(name) for name in ("llguidance", "transformers")},
        },
    )


def claim(job: Job, record: AnswersRecord, console: Console) -> None:
    """Write the record and the labels of the answers to their folder.

    Other library versions are allowed and printed. If the completions were deleted, the files made
    from them are deleted too, and named.
    """
    folder = job.folder
    if (folder / "completions.jsonl").exists():
        record = _resumed(folder, record, console)
    elif (folder / MANIFEST).exists():
        names = (job.task.data.submission.name, *DERIVED)
        stale = [folder / name for name in names if (folder / name).exists()]
        for file in stale:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        if stale:
            deleted = ", ".join(file.name for file in stale)
            console.print(f"{folder}: deleted {deleted}: their completions are gone", markup=False)
    job.labels.save(folder)
    record.write(folder)


def _resumed(folder: Path, record: AnswersRecord, console: Console) -> AnswersRecord:
    """Return the new record with the versions of the rows that are there."""
    old = AnswersRecord.read(folder)
    both = []
    for one in (old, record):  # settings of memory and speed may differ
        kept = {key: value for key, value in one.engine.items() if key not in RESOURCES}
        both.append(one.model_copy(update={"engine": kept}))
    if changed := both[0].difference(both[1]):
        raise UserError(
            f"{folder}: has answers made with other settings ({changed}); they are kept: "
            "name another folder for these with answers=NAME"
        )
    if changed := difference(old.versions, record.versions):
        console.print(f"resuming with other versions: {changed}", highlight=False, markup=False)
    return record.model_copy(update={"versions": old.versions})
