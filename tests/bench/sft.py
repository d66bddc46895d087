"""How fast training reads real tokens: panjue's trainer, trl's defaults, trl with packing.

    python tests/bench/sft.py MODEL CASES.jsonl [--limit 64] [--max-tokens 2048] [--rows 8]

Every way trains LoRA for one epoch on the same token rows, with the same precision, checkpointing,
length limit and examples per step (packs: as many as hold that many examples), in a process of its
own, so that peak memory is its own. What is counted are real tokens: padding is work, not progress.
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
from rich.console import Console
from rich.table import Table
from trl import SFTConfig, SFTTrainer

from panjue.finetune.data import RowMaker, RowReport, pack
from panjue.finetune.model import has_bf16, load_base, with_lora
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.model import load_tokenizer
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task

WAYS = ("panjue", "panjue, packed", "trl, default", "trl, packing=true")
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


def main() -> None:
    """Run every way, or the one that a parent process asks for."""
    options = arguments()
    if options.way:
        print(json.dumps(train(options)))
        return
    results = {way: in_process(way) for way in WAYS}
    peer = results["trl, default"]["rate"]
    table = Table("", "real tokens/s", "of trl's default", "seconds", "steps", "peak memory, GiB")
    for way, found in results.items():
        rate = found["rate"]
        cells = f"{rate:.0f}", f"{rate / peer:.2f}", f"{found['seconds']:.0f}", str(found["steps"])
        table.add_row(way, *cells, f"{found['memory']:.1f}")
    Console().print(table)
    tokens, examples = results["panjue"]["tokens"], results["panjue"]["examples"]
    print(f"{examples} examples, {tokens} tokens, bfloat16 {'on' if has_bf16() else 'off'}")


def in_process(way: str) -> dict[str, float]:
    """Return what one way measured in a process of its own."""
    command = [sys.executable, *sys.argv, "--way", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{way}: {found}", flush=True)
    return found


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train one epoch the way that `options.way` says and measure it."""
    if not torch.cuda.is_available():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as panjue does
    tokenizer = load_tokenizer(options.model)
    data = token_rows(options, tokenizer)
    packed = "pack" in options.way
    tokens = sum(data["length"])
    per_step = options.rows
    if packed:  # as many packs a step as hold the tokens of that many examples
        per_step = max(1, round(options.rows * tokens / len(data) / options.max_tokens))
    micro = min(options.micro, per_step)
    model = load_base(
        options.model, torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "output_dir": folder,
            "num_train_epochs": 1,
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": max(1, per_step // micro),
            "bf16": has_bf16(),
            "gradient_checkpointing": options.checkpointing,
            "use_cpu": not torch.cuda.is_available(),
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "max_length": options.max_tokens,
        }
        trainer = make(options, with_lora(model, LORA), settings, data)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        steps = trainer.state.global_step
    return {
        "rate": tokens / seconds,
        "seconds": seconds,
        "steps": steps,
        "memory": peak_memory() / 2**30,
        "tokens": tokens,
        "examples": len(data),
    }


def make(
    options: argparse.Namespace,
    model: Any,
    settings: dict[str, Any],
    data: Dataset,
) -> SFTTrainer:
    """Return the trainer of one way, as panjue or as a user of trl would make it."""
    tokenizer = load_tokenizer(options.model)
    packed = "pack" in options.way
    if options.way.startswith("panjue"):
        ours = {
            "train_sampling_strategy": "random" if packed else "group_by_length",
            "dataset_kwargs": {"skip_prepare_dataset": True},
        }
        return ReplyTrainer(
            model,
            args=SFTConfig(**{**settings, **ours, "max_length": None}),
            train_dataset=pack(data, options.max_tokens) if packed else data,
            processing_class=tokenizer,
        )
    return SFTTrainer(
        model,
        args=SFTConfig(**settings, packing=packed),
        train_dataset=data.select_columns(["input_ids", "labels"]),
        processing_class=tokenizer,
    )


def token_rows(options: argparse.Namespace, tokenizer: Any) -> Dataset:
    """Return the rows of the first cases that fit."""
    task = load_task("judgment")
    labels = task.ask.labels(Reader(task).read(options.cases))
    maker = RowMaker(task, tokenizer, labels, options.max_tokens)
    made = maker.rows(Reader(task).read(options.cases), RowReport())
    return Dataset.from_list(list(islice(made, options.limit)))


def peak_memory() -> int:
    """Return the most bytes in use: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--limit", type=int, default=64, help="examples")
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=8, help="examples per step")
    parser.add_argument("--micro", type=int, default=8, help="rows per forward pass")
    parser.add_argument("--dtype", default="bfloat16", help="of the frozen base")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
