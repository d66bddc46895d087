"""Answer every case of a test file: one schema per case, finished rows streamed to disk."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

from rich.console import Console

from panjue.eval.answers import seen_by
from panjue.eval.fit_rule import fit_rules
from panjue.eval.rule import read_fitted
from panjue.prompts.example import Example
from panjue.prompts.model import has_classifier
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import exclusive_lock, sha256
from panjue.prompts.plumbing.run import HELD_OUT, Run
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.engine import Engine
from panjue.serve.job import Job, make_asker, make_job, start, with_model
from panjue.serve.loop import Answerer, answer_all
from panjue.serve.output import StopSignals, output, starting
from panjue.serve.record import Rest, answered_ids, check_held_out, claim, load_rows, record_of
from panjue.serve.settings import GenerateConfig, generate_settings


def main(run: Path, test: Path, words: Sequence[str] = ()) -> Path:
    """Answer `test` with the settings of a run folder and `key=value` words."""
    return generate(Run(run), test, generate_settings(Run(run), test, words))


def generate_and_decode(
    run: Run, test: Path, config: GenerateConfig, decode: Callable[[Path], object]
) -> None:
    """Answer `test` and decode the answers by the rule for such replies.

    If there is none yet, it is fitted on the cases that training held out, which are answered
    first, in the same way.
    """
    held_out = held_out_file(run, config)
    if held_out is None:
        generate(run, test, config, decode)
        return
    if sha256(held_out) == sha256(test):  # the training's own dev file

        def fit_and_decode(folder: Path) -> None:
            fit_rules(folder)
            decode(folder)

        generate(run, test, config, fit_and_decode)
        return
    name = f"{HELD_OUT}-{config.samples}" if config.samples else HELD_OUT
    print(f"the held-out cases first: on these is fitted how answers are decided ({name})")
    tenth = {"held_out": run.record.dev is None, "answers": name}
    generate(run, held_out, config.model_copy(update=tenth), fit_rules)
    print(f"now the cases of {test}")
    generate(run, test, config, decode)


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


def generate(
    run: Run, test: Path, config: GenerateConfig, then: Callable[[Path], object] = Path
) -> Path:
    """Write one row per example of `test` to `completions.jsonl`; return its folder.

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
    return job.folder


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
    with StopSignals(job.folder) as signals, ExitStack() as stack:
        job = with_model(job)
        with nullcontext() if job.config.endpoint else starting(console, "the engine"):
            asker, source = make_asker(job), stack.enter_context(start(job))
        if isinstance(source, Engine):
            asker.longest = source.longest
        out = stack.enter_context(output(job.folder, rest.done, rest.total, console))
        slots = asyncio.Semaphore(job.config.slots)
        answerer = Answerer(source, asker, slots, job.passes)

        async def answer(example: Example) -> None:
            await answerer.answer(example, out.write, rest.find_row)
            out.solved()

        assert source.runner
        source.runner.run(signals.until_stopped(answer_all(rest.examples, answer, slots)))
