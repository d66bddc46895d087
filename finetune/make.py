"""Run a target of the Makefile. In its line, words in capitals stand for values.

`finetune.words` says what they mean for a training, as for `panjue sft`. Only variables on make's
command line count, not those of the environment. They are called `given` here. `meant` are the
same, but with the config of the demo if none of them says what to train.
"""

import os
import re
import shlex
import sys
from pathlib import Path

from panjue.finetune.words import training_words
from panjue.prompts.plumbing.config import load_values, refuse_home
from panjue.prompts.plumbing.errors import UserError, did_you_mean, in_one_line, of_library
from panjue.prompts.plumbing.records import MANIFEST, AnswersRecord
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task

PANJUE = ".venv/bin/panjue"
DEMOS = ("demo", "demo-opinions")
"""The configs of the demo, which need no other values. Without any word, make takes the first."""
DEMO_RUNS = [Path("runs", name) for name in DEMOS]
TRAINING = ("TASK", "MODEL", "TRAIN", "DEV")  # if they differ from those of RUN, `sft` says so
FURTHER = ("SFT", "GENERATE", "SCORE", "SERVE")  # contain further words of a command
VARIABLES = (*TRAINING, "TEST", "RUN", "CONFIG", *FURTHER, "STAGE", "PYTHON", "V")


def variables(makeflags: str) -> dict[str, str]:
    """Return all variables of make's command line; those that are not given are empty."""
    given = dict.fromkeys(VARIABLES, "")
    _, _, words = f" {makeflags}".partition(" -- ")  # "s -- TASK=a"; without flags "-- TASK=a"
    for word in re.findall(r"(?:\\.|[^\\\s])+", words):  # make quotes spaces, doubles dollars
        name, _, value = word.partition("=")
        if name not in VARIABLES:
            hint = did_you_mean(name.upper(), VARIABLES)
            raise UserError(f"no variable {name}{hint} (there are {', '.join(VARIABLES)})")
        given[name] = re.sub(r"\\(.)", r"\1", value).replace("$$", "$").strip()
    return given


def command(line: list[str], goals: list[str], given: dict[str, str]) -> list[str]:
    """Return the arguments for panjue that a target's line means; empty if its work is done.

    `line` is that of the Makefile: `generate RUN TEST GENERATE`. `goals` are the targets that the
    user named: `make score` also runs the lines of `sft` and `generate`, on which it depends.
    """
    meant = with_demo(given)
    run = run_folder(meant)
    test = chosen_test(meant, goals)
    if not line:  # the target `variables`, which comes first, only checks them
        return []
    step = line[0]
    if is_done(step, run, goals, given, meant):
        return []
    answers = answers_folder(run, test, given["GENERATE"])
    if step == "score" and has_no_gold(answers, test):
        print(f"{test}: has no outcomes: nothing to score; the submission is in {answers}")
        return []
    values = {**meant, "ANSWERS": str(answers), "RUN": str(run), "TEST": test}
    if step == "sft" and not given["RUN"]:
        values["RUN"] = ""  # panjue names the folder
    return filled(line, values)


def answers_folder(run: Path, test: str, generate: str) -> Path:
    """Return the folder of answers to TEST that `panjue generate` writes with these arguments."""
    words = dict(word.partition("=")[::2] for word in words_in("GENERATE", generate))
    name = Path(test).stem + (f"-limit{words['limit']}" if words.get("limit") else "")
    return run / "answers" / words.get("answers", name)


def has_no_gold(answers: Path, test: str) -> bool:
    """Say whether no case of the test file of these answers has a gold answer."""
    if not (answers / MANIFEST).is_file():
        return False
    record = AnswersRecord.read(answers)
    reader = Reader(load_task(record.task), columns=record.columns, on_bad_row=record.on_bad_row)
    return all(example.answer is None for example in reader.read(Path(test)))


def with_demo(given: dict[str, str]) -> dict[str, str]:
    """Return the variables, with the first config of the demo if none says what to train.

    TEST says it too: with it, the user wants answers to other cases than the demo's.
    """
    says_what = any(given[name] for name in ("CONFIG", "RUN", "TEST", *TRAINING))
    says_what |= any(word.startswith("from=") for word in words_in("SFT", given["SFT"]))
    return given if says_what else {**given, "CONFIG": DEMOS[0]}


def run_folder(given: dict[str, str]) -> Path:
    """Return RUN if it is trained, else the folder that `panjue sft` would use for these variables.

    UserError: a variable is missing, or SFT has a word that is no setting of `panjue sft`.
    """
    refuse_home("RUN", given["RUN"])
    run = Path(given["RUN"])
    if given["RUN"] and is_trained(run):
        return run
    named = [name for name in ("RUN", *TRAINING) if given[name]]
    words = [f"{name.lower()}={given[name]}" for name in named]
    # An option, `--settings`, prints something and starts no training.
    words += [word for word in words_in("SFT", given["SFT"]) if not word.startswith("-")]
    config, settings = training_words([given["CONFIG"], *words] if given["CONFIG"] else words)
    for word in reversed(settings):  # the last one counts
        if word.startswith("run="):
            return Path(word.removeprefix("run="))
    return Path(load_values(config)["sft"]["run"])


def chosen_test(given: dict[str, str], goals: list[str]) -> str:
    """Return TEST. Without it, return the demo's cases if the demo is trained, else nothing.

    UserError: there is no such file, or a goal needs one.
    """
    test = given["TEST"]
    # With a task, model or cases of the user, a config of the demo trains something else.
    names_demo = given["CONFIG"] in DEMOS or Path(given["RUN"]) in DEMO_RUNS
    is_demo = names_demo and not any(given[name] for name in TRAINING)
    if test and not Path(test).exists():
        raise UserError(f"TEST: no file {test}")
    if not test and is_demo:
        return "data/demo/test.jsonl"
    if not test and not {"generate", "score", "check-submission"}.isdisjoint(goals):
        raise UserError("say TEST=FILE: the invented cases are for the demo alone")
    return test


def is_done(
    step: str, run: Path, goals: list[str], given: dict[str, str], meant: dict[str, str]
) -> bool:
    """Say whether a step of the Makefile has nothing to do.

    Every goal depends on `demo` and `base`, which make the demo's cases and its base. They have
    nothing to do if nothing needs their result, or if it exists. `sft` has nothing to do if the run
    is trained and neither goals nor variables ask for a training.
    """
    is_demo = meant["CONFIG"] in DEMOS
    is_demo_goal = not {"demo", "base", "gpu"}.isdisjoint(goals)
    of_sft = {word.partition("=")[0] for word in words_in("SFT", given["SFT"])}
    needs_base = is_demo_goal or (is_demo and not given["MODEL"] and "model" not in of_sft)
    has_cases = given["TRAIN"] or "train" in of_sft
    # The demo's base is trained on the demo's cases, too.
    needs_cases = needs_base or (is_demo and not has_cases)
    asks_to_train = "sft" in goals or any(given[name] for name in (*TRAINING, "CONFIG", "SFT"))
    done = {
        "demo": not needs_cases or Path("data/demo/train.jsonl").exists(),
        "base": not needs_base or is_trained(Path("runs/base")),
        "sft": not asks_to_train and is_trained(run),
    }
    return done.get(step, False)


def is_trained(run: Path) -> bool:
    """Say whether a run folder contains a finished adapter or model, or is one itself."""
    return any((place / "labels.json").is_file() for place in (run / "adapter", run / "model", run))


def filled(line: list[str], values: dict[str, str]) -> list[str]:
    """Return a line with values for its words in capitals, without words that have no value.

    `sft CONFIG run=RUN dev=DEV SFT` -> `sft demo run=b seed=2 batch=4`, if DEV has none.
    """
    words = []
    for word in line:
        key, _, name = word.rpartition("=")
        value = values.get(name, name)
        if name in FURTHER:  # several words in one variable
            words += words_in(name, value)
        elif value:
            words.append(f"{key}={value}" if key else value)
    return words


def words_in(name: str, value: str) -> list[str]:
    """Return the words in a variable of FURTHER; UserError, which names it: a quote has no end."""
    with of_library(name):
        return shlex.split(value)


def main() -> None:
    """Replace this process by the command of a target, if it has something to do.

    The arguments are the goals of make in one word, and the line of the target:
    `"sft generate" generate RUN TEST GENERATE`. GENERATE stands for further words of the user.
    """
    goals, *line = sys.argv[1:]
    with in_one_line():
        given = variables(os.environ["MAKEFLAGS"])
        words = command(line, goals.split(), given)
    if words:
        if given["V"]:  # V=1 shows the commands
            print(shlex.join([PANJUE, *words]), flush=True)
        os.execv(PANJUE, [PANJUE, *words])


if __name__ == "__main__":
    main()
