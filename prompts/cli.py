"""The `panjue` command. Each command imports only its own stage, so that scoring starts fast.

Settings are checked before the stage is imported, because importing torch or vLLM takes seconds.
"""

import atexit
import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from panjue.prompts import cli_scores
from panjue.prompts.plumbing.config import load_values, setting_lines
from panjue.prompts.plumbing.debug import debug_log, quiet_libraries
from panjue.prompts.plumbing.errors import Stopped, UserError, in_one_line, printable
from panjue.prompts.plumbing.files import exclusive_lock
from panjue.prompts.plumbing.run import CONFIG, refuse_answers, refuse_unadopted, weights_folder
from panjue.prompts.plumbing.threads import spin_briefly
from panjue.prompts.plumbing.version import panjue_version
from panjue.serve.engine_processes import watch_parent

watch_parent()  # works only in the processes of an engine

# trl reports the start of each training, even of a dry run. The hub's library reads this on import.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

spin_briefly()

# torch and vLLM have 700,000 objects: a last search for garbage takes two seconds.
atexit.register(gc.freeze)

for name in ("bitsandbytes", "torch._library.triton"):
    # Their imports warn about packages that panjue does not need on a CPU.
    logging.getLogger(name).setLevel(logging.ERROR)

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, e.g. trainer.max_steps=10")]
TAKES_WORDS = {"ignore_unknown_options": True}
"""Settings of commands with words key=value, which say how to write `--lora_rank 16` here."""
RunFolder = Annotated[Path | None, typer.Argument(metavar="RUN", show_default=False)]
ListSettings = Annotated[bool, typer.Option("--settings", help="list all settings, and end")]


def _print_version(wanted: bool) -> None:
    """Print the version and end, if the option `--version` is given."""
    if wanted:
        print(f"panjue {panjue_version()}")
        raise typer.Exit


def _list_settings(module: str, class_name: str, section: str, config: Path) -> None:
    """Print the settings of a command with the values that they have in a config file."""
    config_class = getattr(import_module(f"panjue.{module}"), class_name)
    values = load_values(config) if config.is_file() else {}
    print(*setting_lines(config_class, values.get(section) or {}), sep="\n")


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """Fine-tune a language model to write structured judgments; make submissions and score them."""


@contextmanager
def importing() -> Iterator[None]:
    """Import a stage within the block; its libraries then write warnings to `debug_log`."""
    gc.disable()  # imports stay; searching them for garbage takes a fifth of the time
    try:
        yield
    finally:
        gc.enable()
    quiet_libraries()


@app.command()
def demo(folder: Path) -> None:
    """Write invented cases to FOLDER: train.jsonl, test.jsonl, and base.jsonl for `make base`."""
    from panjue.prompts.tasks.judgment.demo import DEMO_SIZES, write_demo

    write_demo(folder, DEMO_SIZES)


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="JSON, CSV, Parquet, or gzip of them; or a folder")],
    out: Annotated[Path, typer.Argument(help="the file of cases")],
    task: Annotated[str, typer.Option(help="whose cases")] = "judgment",
    form: Annotated[str, typer.Option(help="e.g. alpaca; default: by what FILE has")] = "",
    years: Annotated[bool, typer.Option("--years", help="terms are years, not months")] = False,
) -> None:
    """Make cases from FILE, which has another form; leave out what it does not say for certain."""
    with importing():
        from panjue.prompts.convert import convert as make_cases
    made = make_cases(file, out, task, form, in_years=years)
    for line in made.lines():
        print(printable(line))


@app.command(context_settings=TAKES_WORDS)
def base(config: Path, overrides: Overrides = None) -> None:
    """Train a tiny base model and its tokenizer from scratch, on invented cases."""
    with importing():
        from panjue.finetune.settings import base_settings
    settings = base_settings(config, overrides or [])
    with debug_log(settings.run):
        with importing():
            from panjue.finetune.base import make_base
        make_base(settings)


@app.command(context_settings=TAKES_WORDS)
def sft(
    words: Annotated[list[str] | None, typer.Argument(metavar="[CONFIG] [KEY=VALUE]...")] = None,
    settings: ListSettings = False,
) -> None:
    """Train an adapter on cases. Without CONFIG, use that of the run, or the one for this GPU."""
    given = words or []
    with importing():
        from panjue.finetune.words import training_words
    if settings:
        # A new training is refused without model and train, but its settings can be listed.
        config, _ = training_words([*given, "model=", "train="])
        _list_settings("finetune.settings", "SftConfig", "sft", config)
        return
    config, given = training_words(given)
    with importing():
        from panjue.finetune.settings import launch, sft_settings
    training = sft_settings(config, given)
    launch(training, config, given)
    try:
        with debug_log(training.run):
            with importing():
                from panjue.finetune.sft import train
            train(training)
    except KeyboardInterrupt:  # from the first step on, `StopOnSignal` receives it
        told = "stopped before anything was finished; run the same command again"
        if training.run.is_dir():
            told = f"stopped; {training.run} has what was finished, run the same command to resume"
        raise Stopped(told, signal.SIGINT) from None


@app.command(context_settings=TAKES_WORDS)
def adopt(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="FOLDER [FOLDER]... [KEY=VALUE]...")
    ] = None,
) -> None:
    """Make a run folder of a LoRA adapter that another trainer wrote, and score it."""
    with importing():
        from panjue.finetune.foreign import adoption
    meant = adoption(words or [])
    try:
        with debug_log(meant.config.run):
            with importing():
                from panjue.prompts.cli_adopt import adopt_and_ask
            adopt_and_ask(meant)
    except KeyboardInterrupt:  # once cases are asked, the session receives it
        raise Stopped("stopped; run the same command again", signal.SIGINT) from None


@app.command()
def merge(
    run: Path,
    base: Annotated[str | None, typer.Option(help="the base model, if it was moved")] = None,
) -> None:
    """Merge the adapter of RUN into its base model, and write RUN/merged."""
    with importing():
        from panjue.finetune.trained import open_trained
    trained = open_trained(run)
    if trained.chosen:
        print(trained.chosen)
    with debug_log(run):
        with importing():
            from panjue.serve.merge import merge as merge_adapter
        print("written:", merge_adapter(trained, base))


@app.command(context_settings=TAKES_WORDS)
def choose(run: Path, overrides: Overrides = None) -> None:
    """Choose the adapter of RUN with the best score on held-out cases by the task's metric."""
    # Another trainer's folder is refused before a lock is made in it.
    refuse_unadopted(run)
    with importing():
        from panjue.prompts.cli_choose import adapters_of, choose_adapter
        from panjue.serve.settings import choose_settings
    with exclusive_lock(run, wait=True):
        adapters = adapters_of(run)
        config = choose_settings(adapters[0].trained, overrides or [])
        with debug_log(run):
            choose_adapter(run, adapters, config)


@app.command(context_settings=TAKES_WORDS)
def generate(
    run: RunFolder = None,
    test: Annotated[Path | None, typer.Argument(metavar="TEST", show_default=False)] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="e.g. in_flight=64")] = None,
    settings: ListSettings = False,
) -> None:
    """Answer every case of TEST with RUN's training; write the submission to RUN/answers/NAME."""
    if settings:
        of_run = (run or Path()) / CONFIG
        _list_settings("serve.settings", "GenerateConfig", "generate", of_run)
        return
    if run is None or test is None:
        raise UserError("generate: give RUN and TEST, e.g. panjue generate runs/mine test.jsonl")
    refuse_answers(run)
    with importing():
        from panjue.finetune.trained import held_training
        from panjue.serve.settings import generate_settings
    with held_training(run) as trained:
        if trained is None and weights_folder(test):
            raise UserError(f"{run}: RUN comes first: panjue generate {test} {run}")
        config = generate_settings(run, trained, overrides or [])
        if not test.exists():
            raise UserError(f"no file {test}")
        with debug_log(run):
            with importing():
                from panjue.prompts.cli_generate import generate as answer
            answer(run, trained, test, config)


@app.command(context_settings=TAKES_WORDS)
def decode(
    path: Path,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ANSWER", help="answer=auto, model or classifier; default: as before"
        ),
    ] = None,
) -> None:
    """Make the submission of a folder of answers again; this needs no model."""
    with importing():
        from panjue.prompts.cli_generate import decode_again
        from panjue.serve.settings import answer_setting
    decode_again(path, answer_setting(words or []))


@app.command(context_settings=TAKES_WORDS)
def serve(
    run: RunFolder = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="e.g. port=80 other=RUN2")] = None,
    settings: ListSettings = False,
) -> None:
    """Answer over HTTP: POST /v1/judgments, OpenAI's chat completions, and a web page."""
    if settings:
        _list_settings("serve.settings", "ServeConfig", "serve", (run or Path()) / CONFIG)
        return
    if run is None:
        raise UserError("serve: give RUN, e.g. panjue serve runs/mine")
    with importing():
        from panjue.serve.settings import serve_settings
    serving, trainings = serve_settings(run, overrides or [])
    for name, trained in trainings.items():
        if trained.chosen:
            print(f"{name}: {trained.chosen}")
    with debug_log(run):
        with importing():
            from panjue.serve.server import serve as serve_trainings
        serve_trainings(serving, trainings)


@app.command()
def bundle(
    run: Annotated[Path | None, typer.Argument(help="a run folder with its submission")] = None,
    out: Annotated[Path | None, typer.Argument(help="the ZIP")] = None,
    base: Annotated[str | None, typer.Option(help="the base model, if it was moved")] = None,
    verify: Annotated[Path | None, typer.Option(help="a ZIP to test in an empty folder")] = None,
    cases: Annotated[Path | None, typer.Option(help="with --verify: the run's test file")] = None,
) -> None:
    """Pack RUN with code, weights and a manual into the ZIP OUT; or test a ZIP with --verify."""
    with importing():
        from panjue.serve.answers import folder_meant
        from panjue.serve.bundle import bundle as pack
        from panjue.serve.bundle import verify as verify_bundle
    if verify and cases and not (run or base):
        verify_bundle(verify, cases)
    elif run and out and not (verify or cases):
        pack(run, out, base)
    else:
        if run:
            folder_meant(run)  # what is wrong with RUN comes first
        raise UserError("use RUN OUT.zip [--base FOLDER], or --verify ZIP --cases TEST")


app.add_typer(cli_scores.app)


def _is_checkout(folder: Path) -> bool:
    """Say whether a folder has panjue's project file and its four folders."""
    try:
        project = (folder / "pyproject.toml").read_text("utf-8", errors="replace")
    except OSError:
        return False
    is_named = re.search(r'^name = "panjue"$', project, re.MULTILINE)
    folders = ("prompts", "finetune", "serve", "eval")
    return bool(is_named) and all((folder / name).is_dir() for name in folders)


def _warn_of_other_checkout() -> None:
    """Print a line if this code belongs to one checkout, and the working folder is another one.

    A folder that was copied with its .venv would run the old folder's code with its own configs.
    """
    here = Path()
    code = Path(__file__).parents[1]
    if not here.samefile(code) and _is_checkout(here) and _is_checkout(code):
        places = f"this is the code of {code}, not that of the working folder {here.absolute()}"
        print(printable(f"panjue: {places}; say `make install` here"), file=sys.stderr)


def main() -> None:
    """Run the command line. An error that the user can fix gives one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without UTF-8 gets `?` for Chinese
            stream.reconfigure(errors="replace")
    with in_one_line():
        _warn_of_other_checkout()
        app()


if __name__ == "__main__":
    main()
