"""How many real tokens a second training reads: panjue's trainer, and trl's with and without packs.

    python -m tests.bench.sft MODEL CASES.jsonl [--limit 64]

Every way trains LoRA for one epoch on the same token rows, with the same precision, length limit
and examples per step (packs: as many as hold that many examples), in a process of its own. What is
counted are real tokens: padding is work, not progress.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from panjue.finetune.data import RowMaker, RowReport, cached, pack
from panjue.finetune.model import has_bf16, load_base, with_lora
from panjue.finetune.packed_attention import use_packed_attention
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.model import load_tokenizer
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from tests.bench.common import compare, parser

OURS = "panjue"
MASKS = "panjue, packs with a mask"
TRL = "trl, default"
TRL_PACKED = "trl, packing=true"
MAX_TOKENS = 2048
EXAMPLES_PER_STEP = 8
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


def main() -> None:
    """Run every way, or the one that a parent process asks for."""
    options = parser(__doc__, "model", "cases")
    options.add_argument("--limit", type=int, default=64, help="examples")
    options.add_argument("--way", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.way:
        print(tokens_per_second(given))
        return
    ways = {way: partial(in_process, way) for way in (OURS, MASKS, TRL, TRL_PACKED)}
    compare(ways, "tokens/s", TRL, given.rounds)


def in_process(way: str) -> float:
    """Return what one way measured in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.sft", *sys.argv[1:], "--way", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def tokens_per_second(given: argparse.Namespace) -> float:
    """Train one epoch the way that `given.way` says."""
    if not torch.cuda.is_available():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as panjue does
    data = token_rows(given)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(given, data, folder)
        began = time.perf_counter()
        trainer.train()
        rate: float = sum(data["length"]) / (time.perf_counter() - began)
    return rate


def token_rows(given: argparse.Namespace) -> Dataset:
    """Return the rows of the first cases that fit."""
    task = load_task("judgment")
    labels = task.ask.labels(Reader(task).read(given.cases))
    maker = RowMaker(task, load_tokenizer(given.model), labels, MAX_TOKENS)
    made = maker.rows(Reader(task).read(given.cases), RowReport())
    return Dataset.from_list(list(islice(made, given.limit)))


def trainer_of(given: argparse.Namespace, data: Dataset, folder: str) -> SFTTrainer:
    """Return the trainer of one way, as panjue or as a user of trl would make it."""
    settings: dict[str, Any] = {
        "output_dir": folder,
        "num_train_epochs": 1,
        "per_device_train_batch_size": EXAMPLES_PER_STEP,
        "bf16": has_bf16(),
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_length": MAX_TOKENS,
    }
    if given.way != TRL:
        mean_length = sum(data["length"]) / len(data)
        packs = max(1, round(EXAMPLES_PER_STEP * mean_length / MAX_TOKENS))
        settings["per_device_train_batch_size"] = packs
    trainer = SFTTrainer
    model = with_lora(load_base(given.model, torch.bfloat16), LORA)
    if given.way == OURS:
        assert use_packed_attention(model, MAX_TOKENS, torch.bfloat16)
    if given.way in (OURS, MASKS):
        trainer = ReplyTrainer
        data, _ = cached(Path(folder), {}, lambda _: iter(data))
        data = pack(data, MAX_TOKENS)
        settings["train_sampling_strategy"] = "random"
        settings["dataset_kwargs"] = {"skip_prepare_dataset": True}
        settings["max_length"] = None
    else:
        data = data.select_columns(["input_ids", "labels"])
        settings["packing"] = given.way == TRL_PACKED
    torch.manual_seed(0)
    return trainer(
        model,
        args=SFTConfig(**settings),
        train_dataset=data,
        processing_class=load_tokenizer(given.model),
    )


if __name__ == "__main__":
    main()
