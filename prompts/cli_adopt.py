"""`panjue adopt`: make a run folder from other trainers' adapters, and score them."""

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from panjue.eval.choice import best_of, choice_lines
from panjue.finetune.adopt import adopt
from panjue.finetune.card import update_card
from panjue.finetune.classifier.classifier import CLASSIFIER_NAME
from panjue.finetune.foreign import Adoption
from panjue.finetune.trained import Trained, open_trained
from panjue.prompts.cli_choose import adapters_of, add_metrics, choose_adapter, values_of
from panjue.prompts.cli_generate import can_choose, choice_by, held_out_file
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import exclusive_lock
from panjue.prompts.plumbing.records import WHOLE
from panjue.prompts.plumbing.run import ANSWERS, HELD_OUT
from panjue.serve.job import make_job
from panjue.serve.merge import why_only_merged
from panjue.serve.session import read_cases, session
from panjue.serve.settings import choose_settings, generate_settings


def adopt_and_ask(adoption: Adoption) -> None:
    """Make RUN from the adapters. Then ask held-out cases: score one, or choose among several.

    The run stays adopted if the engine cannot start.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    adopt(adoption, console)
    run = adoption.config.run
    if reason := why_only_merged(adoption.config.result):
        console.print(f"{'merged':12s} {reason}; vLLM needs it merged, which is the default")
    try:
        with exclusive_lock(run, wait=True):
            if len(adoption.adapters) > 1:
                candidates = adapters_of(run)
                choose_adapter(run, candidates, choose_settings(candidates[0].trained))
            else:
                ask_held_out(open_trained(run), console)
                console.print(f"next: {shlex.join(['panjue', 'generate', str(run)])} TEST")
    except UserError as error:
        kept = f"{run} is adopted, and the same command asks again"
        raise UserError(f"{error}; {kept}") from None


def ask_held_out(trained: Trained, console: Console) -> None:
    """Ask the held-out cases, and print how well the model answers them; or why there are none.

    If the text classifier can answer, too, print its scores, and keep the choice of who answers
    each field beside the weights, as `panjue generate` does.
    """
    run = trained.run
    job = make_job(run, trained, generate_settings(run, trained))
    found = held_out_file(job, trained, "")  # "": both halves, as no case chose among adapters
    if isinstance(found, str):  # the reason why there are no such cases
        console.print(f"nobody knows how well it answers: {found}; dev=FILE has cases that say it")
        return
    reader, file = found
    job.check_engine()
    place = run / ANSWERS / HELD_OUT
    table = Table(Column("metric", no_wrap=True), "model")
    lines: Sequence[str] = ()
    with exclusive_lock(place, wait=True), session(job, console) as asking:
        cases = read_cases(file, reader, place)
        if can_choose(job):
            choice = choice_by(asking, trained, cases)
            table.add_column(CLASSIFIER_NAME)
            lines = [*choice_lines(choice)]
        else:
            values = {"model": values_of(asking, cases)}
            choice = best_of(values, {WHOLE: job.task.score.headline})
    add_metrics(table, [*choice.candidates.values()], job.task.score.headline)
    console.print(f"scores on {choice.cases} held-out cases, asked with panjue's prompt")
    console.print(table)
    for line in lines:
        console.print(line)
    update_card(trained)
