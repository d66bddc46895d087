"""What a target of the Makefile runs: its line, in which words in capitals stand for values.

make starts this for every target, so it imports torch only to see the GPU. Only the variables on
make's command line count, not those of the environment.
"""

import os
import re
import shlex
import sys
from pathlib import Path

from panjue.prompts.plumbing.errors import UserError, did_you_mean, in_one_line, of_library

PANJUE = ".venv/bin/panjue"
CONFIGS = Path("finetune/configs")
DEMO = CONFIGS / "demo.yaml"
TRAINING = ("TASK", "MODEL", "TRAIN", "DEV")  # if they differ from those of RUN, `sft` says so
NEEDED = {"MODEL": "NAME", "TRAIN": "FILE"}
"""What a new training has to be given."""
FURTHER = ("SFT", "GENERATE", "SCORE", "SERVE")  # have further words of a command
VARIABLES = (*TRAINING, "TEST", "RUN", "CONFIG", *FURTHER, "STAGE", "PYTHON", "V")
LORA_BYTES = 39_000 * 2**20
"""Memory of a GPU that trains an 8B model in bfloat16; a smaller one needs four bits."""


def variables(makeflags: str) -> dict[str, str]:
    """Return all variables as make's command line has them, empty where they are not given."""
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
    """Return the words for panjue that a target's line stands for; none if its work is done."""
    config = chosen_config(goals, given)
    run = run_folder(config, given)
    test = chosen_test(config, goals, given)
    if is_done(line[0], config, run, goals, given):
        return []
    scores = run / "answers" / Path(test).stem / "scores.json"
    values = {"CONFIG": str(config), "RUN": str(run), "TEST": test, "SCORES": str(scores)}
    return filled(line, {**given, **values})


def chosen_config(goals: list[str], given: dict[str, str]) -> Path:
    """Return the config to train with: what is ordered, else RUN's own, else the demo's."""
    if given["CONFIG"]:
        return CONFIGS / f"{given['CONFIG']}.yaml"
    run = Path(given["RUN"])
    has_needed = all(given[name] for name in NEEDED)
    is_new = has_needed and ("sft" in goals or not is_trained(run))
    if given["RUN"] and not is_new and (is_trained(run) or (run / "config.yaml").is_file()):
        return run / "config.yaml"
    if has_needed:
        return CONFIGS / f"{config_for_gpu()}.yaml"
    for name in ("RUN", *TRAINING, "TEST"):
        if given[name]:
            missing = " and ".join(f"{key}={NEEDED[key]}" for key in NEEDED if not given[key])
            reason = f"nothing is trained for {name}={given[name]} (CONFIG=demo trains a toy)"
            raise UserError(f"say {missing}, or RUN=FOLDER of a training: {reason}")
    return DEMO


def config_for_gpu() -> str:
    """Return the name of the config for the largest GPU that CUDA may use, or for none."""
    from torch import cuda  # noqa: PLC0415

    if not cuda.is_available():
        return "qwen2.5-0.5b-cpu"
    sizes = [cuda.get_device_properties(n).total_memory for n in range(cuda.device_count())]
    return "qwen3-8b-lora" if max(sizes) >= LORA_BYTES else "qwen3-8b-qlora"


def run_folder(config: Path, given: dict[str, str]) -> Path:
    """Return RUN, or a folder named by config, task, model and training cases."""
    if given["RUN"]:
        return Path(given["RUN"])
    parts = [config.stem]
    if given["TASK"] != "judgment":
        parts.append(given["TASK"])
    parts.append(Path(given["MODEL"]).name)
    parts.append(Path(given["TRAIN"]).stem)
    name = "-".join(filter(None, parts))
    return Path("runs", name.replace(" ", "_"))


def chosen_test(config: Path, goals: list[str], given: dict[str, str]) -> str:
    """Return TEST; without it the demo's cases if nothing else is trained, or nothing.

    UserError if there is no such file, or a goal needs one.
    """
    test = given["TEST"]
    is_demo = config == DEMO and not any(given[name] for name in TRAINING)
    if test and not Path(test).exists():
        raise UserError(f"TEST: no file {test}")
    if not test and is_demo:
        return "data/demo/test.jsonl"
    if not test and not {"generate", "score", "check-submission"}.isdisjoint(goals):
        raise UserError("say TEST=FILE: the invented cases are for the demo alone")
    return test


def is_done(step: str, config: Path, run: Path, goals: list[str], given: dict[str, str]) -> bool:
    is_toy = config == DEMO and not given["MODEL"]
    needs_base = is_toy or not {"demo", "base", "gpu"}.isdisjoint(goals)
    is_asked = "sft" in goals or any(given[name] for name in (*TRAINING, "CONFIG", "SFT"))
    done = {
        "demo": not needs_base or Path("data/demo/train.jsonl").exists(),
        "base": not needs_base or is_trained(Path("runs/base")),
        "sft": not is_asked and is_trained(run),
    }
    return done.get(step, False)


def is_trained(run: Path) -> bool:
    """Say whether a run folder has a finished adapter or model, or is one itself."""
    return any((place / "labels.json").is_file() for place in (run / "adapter", run / "model", run))


def filled(line: list[str], values: dict[str, str]) -> list[str]:
    """Return a line with values for its words in capitals, without those that have none."""
    words = []
    for word in line:
        key, _, name = word.rpartition("=")
        value = values.get(name, name)
        if name in FURTHER:
            with of_library(name):
                words += shlex.split(value)
        elif value:
            words.append(f"{key}={value}" if key else value)
    return words


def main() -> None:
    """Replace this process by the command of a target, if it has something to do."""
    goals, *line = sys.argv[1:]
    with in_one_line():
        given = variables(os.environ["MAKEFLAGS"])
        words = command(line, goals.split(), given)
    if words:
        if given["V"]:
            print(shlex.join([PANJUE, *words]), flush=True)
        os.execv(PANJUE, [PANJUE, *words])


if __name__ == "__main__":
    main()
