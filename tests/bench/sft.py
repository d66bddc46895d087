"""How fast training reads real tokens: panjue's trainer, trl's defaults, trl with packing.

    python -m tests.bench.sft MODEL CASES.jsonl [--limit 64] [--max-tokens 2048] [--rows 8]

Every way trains LoRA for one epoch on the same token rows, with the same precision, length limit
and examples per step (packs: as many as hold that many examples), in a process of its own, so that
peak memory is its own. What is counted are real tokens: padding is work, not progress.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from panjue.finetune.data import RowMaker, RowReport, pack
from panjue.finetune.model import has_bf16, load_base, with_lora
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.model import load_tokenizer
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from tests.bench.common import parser, print_rates

WAYS = ("panjue", "panjue, packed", "trl, default", "trl, packing=true")
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
IS_GPU = torch.cuda.is_available()


def main() -> None:
    """Run every way, or the one that a parent process asks for."""
    options = parser(__doc__)
    options.add_argument("model", type=Path)
    options.add_argument("cases", type=Path)
    options.add_argument("--limit", type=int, default=64, help="examples")
    options.add_argument("--max-tokens", type=int, default=2048)
    options.add_argument("--rows", type=int, default=8, help="examples per step")
    options.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.way:
        print(json.dumps(train(given)))
        return
    results = {way: in_process(way) for way in WAYS}
    print_rates({way: [found["rate"]] for way, found in results.items()}, "tokens/s", WAYS[2])
    print(f"{results['panjue']['tokens']} tokens, bfloat16 {'on' if has_bf16() else 'off'}")


def in_process(way: str) -> dict[str, float]:
    """Return what one way measured in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.sft", *sys.argv[1:], "--way", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{way}: {found}", flush=True)
    return found


def train(given: argparse.Namespace) -> dict[str, float]:
    """Train one epoch the way that `given.way` says and measure it."""
    if not IS_GPU:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as panjue does
    data = token_rows(given)
    tokens = sum(data["length"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(given, data, folder)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "rate": tokens / seconds,
        "seconds": seconds,
        "steps": trainer.state.global_step,
        "memory": (torch.cuda.max_memory_allocated() if IS_GPU else used) / 2**30,
        "tokens": tokens,
    }


def token_rows(given: argparse.Namespace) -> Dataset:
    """Return the rows of the first cases that fit."""
    task = load_task("judgment")
    labels = task.ask.labels(Reader(task).read(given.cases))
    maker = RowMaker(task, load_tokenizer(given.model), labels, given.max_tokens)
    made = maker.rows(Reader(task).read(given.cases), RowReport())
    return Dataset.from_list(list(islice(made, given.limit)))


def trainer_of(given: argparse.Namespace, data: Dataset, folder: str) -> SFTTrainer:
    """Return the trainer of one way, as panjue or as a user of trl would make it."""
    is_ours, is_packed = given.way.startswith("panjue"), "pack" in given.way
    per_step = given.rows
    if is_packed:  # as many packs a step as hold the tokens of that many examples
        mean = sum(data["length"]) / len(data)
        per_step = max(1, round(given.rows * mean / given.max_tokens))
    settings: dict[str, Any] = {
        "output_dir": folder,
        "num_train_epochs": 1,
        "per_device_train_batch_size": per_step,
        "bf16": has_bf16(),
        "gradient_checkpointing": False,
        "use_cpu": not IS_GPU,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if is_ours:
        data = pack(data, given.max_tokens) if is_packed else data
        settings["train_sampling_strategy"] = "random" if is_packed else "group_by_length"
        settings |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
    else:
        data = data.select_columns(["input_ids", "labels"])
        settings |= {"packing": is_packed, "max_length": given.max_tokens}
    torch.manual_seed(0)
    return (ReplyTrainer if is_ours else SFTTrainer)(
        with_lora(load_base(given.model, torch.bfloat16), LORA),
        args=SFTConfig(**settings),
        train_dataset=data,
        processing_class=load_tokenizer(given.model),
    )


if __name__ == "__main__":
    main()
