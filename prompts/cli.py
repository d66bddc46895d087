"""The `panjue` command. Each command imports only its own stage, so that scoring starts fast.

Settings are checked before the stage is imported: importing torch or vLLM takes seconds.
"""

import atexit
import gc
import logging
import os
import re
import signal
import sys
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from panjue.prompts import cli_scores
from panjue.prompts.plumbing.config import load_values, setting_lines
from panjue.prompts.plumbing.debug import debug_log, quiet_libraries
from panjue.prompts.plumbing.errors import Stopped, UserError, in_one_line, printable
from panjue.prompts.plumbing.run import Answers, Run
from panjue.prompts.plumbing.threads import spin_briefly
from panjue.prompts.plumbing.version import panjue_version
from panjue.serve.engine_processes import watch_parent

watch_parent()  # acts only in the processes of an engine

# trl reports the start of each training, dry runs too. Read when the hub's library is imported.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

spin_briefly()

# Torch and vLLM have 700,000 objects: a last look for garbage among them takes two seconds.
atexit.register(gc.freeze)

for name in ("bitsandbytes", "torch._library.triton"):
    # Their imports warn of packages that panjue does not need on a CPU.
    logging.getLogger(name).setLevel(logging.ERROR)

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, e.g. trainer.max_steps=10")]
RunFolder = Annotated[Path | None, typer.Argument(metavar="RUN", show_default=False)]
ListSettings = Annotated[bool, typer.Option("--settings", help="list all settings, and end")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"panjue {panjue_version()}")
        raise typer.Exit


def _list_settings(module: str, config_class: str, section: str, config: Path) -> None:
    """Print the settings of a command with the values that they have in a config file."""
    known = getattr(import_module(f"panjue.{module}"), config_class)
    values = load_values(config) if config.is_file() else {}
    print(*setting_lines(known, values.get(section) or {}), sep="\n")


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """Fine-tune a language model to write structured judgments; decode, submit, score."""


def _load(module: str, name: str) -> Any:
    """Import a function of a stage; its libraries then write their warnings to `debug_log`."""
    gc.disable()  # what is imported stays; to look for garbage in it takes a fifth of the time
    try:
        function = getattr(import_module(f"panjue.{module}"), name)
    finally:
        gc.enable()
    quiet_libraries()
    return function


@app.command()
def demo(folder: Path) -> None:
    """Write invented cases to FOLDER: train.jsonl, test.jsonl, and base.jsonl for `make base`."""
    from panjue.prompts.tasks.judgment.demo import DEMO_SIZES, write_demo

    write_demo(folder, DEMO_SIZES)


@app.command()
def base(config: Path, overrides: Overrides = None) -> None:
    """Train a tiny base model and its tokenizer from scratch, on invented cases."""
    settings = _load("finetune.settings", "base_settings")(config, overrides or [])
    with debug_log(settings.run):
        _load("finetune.base", "make_base")(settings)


@app.command()
def sft(
    words: Annotated[list[str] | None, typer.Argument(metavar="[CONFIG] [KEY=VALUE]...")] = None,
    settings: ListSettings = False,
) -> None:
    """Fine-tune: cases in, adapter out. Without CONFIG, that of the run or of this GPU counts."""
    given = words or []
    if settings:
        config, _ = _load("finetune.words", "training_words")([*given, "model=", "train="])
        _list_settings("finetune.settings", "SftConfig", "sft", config)
        return
    config, given = _load("finetune.words", "training_words")(given)
    training = _load("finetune.settings", "sft_settings")(config, given)
    _load("finetune.settings", "launch")(training, config, given)
    try:
        with debug_log(training.run):
            _load("finetune.sft", "train")(training)
    except KeyboardInterrupt:  # from the first step on `StopOnSignal` receives it
        kept = f"stopped; {training.run} has what was finished, run the same command to resume"
        raise Stopped(kept, signal.SIGINT) from None


@app.command()
def merge(
    run: Path,
    base: Annotated[str | None, typer.Option(help="the base model, if it was moved")] = None,
) -> None:
    """Merge the adapter of RUN into its base model: RUN/merged."""
    chosen = Run(run).chosen
    if chosen:
        print(chosen)
    with debug_log(run):
        adapter = run / (chosen.adapter if chosen else "adapter")
        print("written:", _load("serve.merge", "merge")(adapter, base))


@app.command()
def choose(run: Path, overrides: Overrides = None) -> None:
    """Choose the adapter of RUN that is best by the task's metric on held-out cases."""
    config = _load("serve.settings", "choose_settings")(Run(run), overrides or [])
    with debug_log(run):
        _load("prompts.cli_choose", "choose_adapter")(Run(run), config)


@app.command()
def generate(
    run: RunFolder = None,
    test: Annotated[Path | None, typer.Argument(metavar="TEST", show_default=False)] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="e.g. in_flight=64")] = None,
    settings: ListSettings = False,
) -> None:
    """Answer every case of TEST with RUN's training, and decode: RUN/answers/NAME."""
    if settings:
        config = Run(run or Path()).config
        _list_settings("serve.settings", "GenerateConfig", "generate", config)
        return
    if run is None or test is None:
        raise UserError("generate: give RUN and TEST, e.g. panjue generate runs/mine test.jsonl")
    if Run(test).result and not Run(run).result:
        raise UserError(f"{run}: RUN comes first: panjue generate {test} {run}")
    answering = _load("serve.settings", "generate_settings")(Run(run), test, overrides or [])
    with debug_log(run):
        _load("prompts.cli_generate", "generate")(Run(run), test, answering)


@app.command()
def decode(
    path: Path,
    answer: Annotated[
        str | None, typer.Argument(help="answer=auto, model or classifier; default: as before")
    ] = None,
) -> None:
    """Make the submission of a folder of answers again, without a model."""
    who = _load("serve.settings", "answer_setting")(answer)
    tally = _load("serve.decoding", "decode_answers")(path, who)
    _load("finetune.card", "update_card")(Answers(tally.submission.parent).trained)
    _load("prompts.cli_generate", "print_tally")(tally)


@app.command()
def serve(
    run: RunFolder = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="e.g. port=80 other=RUN2")] = None,
    settings: ListSettings = False,
) -> None:
    """Answer over HTTP: POST /v1/judgments, OpenAI's chat completions, and a web page."""
    if settings:
        _list_settings("serve.settings", "ServeConfig", "serve", Run(run or Path()).config)
        return
    if run is None:
        raise UserError("serve: give RUN, e.g. panjue serve runs/mine")
    serving, runs = _load("serve.settings", "serve_settings")(run, overrides or [])
    for name, served in runs.items():
        if served.chosen:
            print(f"{name}: {served.chosen}")
    with debug_log(run):
        _load("serve.server", "serve")(serving, runs)


@app.command()
def bundle(
    run: Annotated[Path | None, typer.Argument(help="a run folder with its submission")] = None,
    out: Annotated[Path | None, typer.Argument(help="the ZIP")] = None,
    base: Annotated[str | None, typer.Option(help="the base model, if it was moved")] = None,
    verify: Annotated[Path | None, typer.Option(help="a ZIP to test in an empty folder")] = None,
    cases: Annotated[Path | None, typer.Option(help="with --verify: the run's test file")] = None,
) -> None:
    """Pack RUN with code, weights and a manual into OUT; or test such a ZIP with --verify."""
    if verify and cases and not (run or base):
        _load("serve.bundle", "verify")(verify, cases)
    elif run and out and not (verify or cases):
        _load("serve.bundle", "bundle")(run, out, base)
    else:
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
    """Name both places if this code is that of one checkout, and the working folder is another.

    A folder that was copied with its .venv would run the old folder's code with its own configs.
    """
    here = Path()
    code = Path(__file__).parents[1]
    if not here.samefile(code) and _is_checkout(here) and _is_checkout(code):
        places = f"this is the code of {code}, not that of the working folder {here.absolute()}"
        print(printable(f"panjue: {places}; say `make install` here"), file=sys.stderr)


def main() -> None:
    """Run the command line; an error that the user can fix gives one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without UTF-8 gets `?` for Chinese
            stream.reconfigure(errors="replace")
    with in_one_line():
        _warn_of_other_checkout()
        app()


if __name__ == "__main__":
    main()
