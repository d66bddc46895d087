"""The first hour on a GPU: stages that show what a CPU cannot; RESULT.md beside this has the table.

    make gpu                               # every stage, at most ten minutes each
    make gpu STAGE=parity MODEL=FOLDER     # one of them, with your own base model

Without MODEL, a GPU gets random weights in the shape of Qwen3-8B, a CPU the demo's tiny base.
"""

import argparse
import asyncio
import gc
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from functools import cached_property
from importlib.metadata import version
from io import StringIO
from itertools import cycle, islice
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from shutil import rmtree
from typing import Any
from unittest.mock import patch

import torch
from peft import PeftModel
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config
from transformers.utils import is_flash_attn_2_available

from panjue.finetune.data import IGNORED
from panjue.finetune.settings import sft_settings
from panjue.finetune.sft import train as sft
from panjue.finetune.trained import Trained, open_trained
from panjue.finetune.training_log import TrainingLog
from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.files import read_lines
from panjue.prompts.reader import Reader
from panjue.serve.ask import Budget, Question, Request
from panjue.serve.engine import VLLM_VERSION, RequestOutput, engine
from panjue.serve.job import make_job
from panjue.serve.merge import Served, served_model
from panjue.serve.settings import GenerateConfig
from tests.gpu.step import lora_flops, peak_of, shares

ROOT = Path(__file__).parents[2]
PANJUE = Path(sys.executable).with_name("panjue")
IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
LIMIT_S = 600
FULL = {"steps": 12, "saved": 6, "replies": 64}
QUICK = {"steps": 4, "saved": 2, "replies": 3}
"""How much each stage does: to be measured, or only tried."""

QWEN3_8B = {"intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8}
"""Its shape, where it is not Qwen3Config's default."""

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.05}
"""Type of the engine -> difference of two log-probabilities that its rounding explains."""

WAYS = {
    "lora": ["trainer.packing=false", "trainer.per_device_train_batch_size=4"],
    "lora-packs": [],
    "qlora-packs": [],
}
if is_flash_attn_2_available():
    WAYS["lora-packs-flash-attention"] = ["attn_implementation=flash_attention_2"]
if IS_GPU:
    WAYS["lora-packs-flex-attention"] = ["attn_implementation=flex_attention"]


class Ground:
    """Where the stages work, on what model and cases, and how much they do."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder = options.folder
        self.cases = options.cases
        self.tiny = options.tiny
        self.given = options.model
        self.size = QUICK if options.quick else FULL

    @cached_property
    def model(self) -> Path:
        """Return the base model of all stages."""
        if self.given or not IS_GPU:
            return Path(self.given or self.tiny)
        folder: Path = self.folder / "random-8b"
        if not (folder / "config.json").exists():
            with torch.device("cuda"):
                config = Qwen3Config(**QWEN3_8B, dtype=torch.bfloat16)
                AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            load_tokenizer(self.tiny).save_pretrained(folder)
        return folder

    @property
    def runs(self) -> Path:
        """Return the folder of the runs of this model."""
        return Path(self.folder, self.model.name)

    def training(self, name: str, *words: str) -> list[str]:
        """Return the arguments of `panjue sft` for a run of some steps."""
        method = "qlora" if "qlora" in name else "lora"
        return [
            str(ROOT / f"finetune/configs/qwen3-8b-{method}.yaml"),
            f"run={self.runs / name}",
            f"model={self.model}",
            f"train={self.cases / 'train.jsonl'}",
            "max_tokens=2048",
            "trainer.eval_strategy=no",
            "trainer.logging_steps=1",
            f"trainer.max_steps={self.size['steps']}",
            f"trainer.save_steps={self.size['saved']}",
            *words,
        ]

    def train(self, name: str, *words: str) -> tuple[Trained, str]:
        """Train, if that is not done; return the run and what was printed."""
        config, *rest = self.training(name, *words)
        with redirect_stdout(StringIO()) as printed:
            sft(sft_settings(Path(config), rest))
        gc.collect()  # else the model would stay beside an engine's memory
        torch.cuda.empty_cache()
        return open_trained(self.runs / name), printed.getvalue()

    def questions(self, trained: Trained) -> list[Question]:
        """Return the questions of some cases, from the start again after the last."""
        job = make_job(trained.run, trained, GenerateConfig.model_validate({})).with_model()
        question_maker = job.question_maker()
        examples = cycle(Reader(job.task).read(self.cases / "test.jsonl"))
        return [
            question_maker.question(example) for example in islice(examples, self.size["replies"])
        ]


def training(ground: Ground) -> Iterator[str]:
    """LoRA, packs, QLoRA: real tokens a second, memory planned and used."""
    for name, words in WAYS.items():
        rmtree(ground.runs / name, ignore_errors=True)  # else there is nothing to measure
        if IS_GPU:
            torch.cuda.reset_peak_memory_stats()
        trained, printed = ground.train(name, *words)
        log = [row for _, row in read_lines(trained.run / "log.jsonl") if "loss" in row]
        assert all(math.isfinite(row["loss"]) for row in log)
        first = log[len(log) // 4]  # the steps before it compile and measure
        last = log[-1]
        rate = (last["num_tokens"] - first["num_tokens"]) / (last["seconds"] - first["seconds"])
        [planned] = re.findall(r"memory +([\d.]+) GiB", printed)
        peak = 1024 * getrusage(RUSAGE_SELF).ru_maxrss
        if IS_GPU:
            peak = torch.cuda.max_memory_allocated()
        yield f"{name}: {rate:,.0f} tokens/s; GiB planned {planned}, used {peak / 2**30:.1f}"


class Profiled(TrainingLog):
    """Times the second quarter of a training's steps, and profiles its last half."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if IS_GPU else [])]
        self.profile = profile(activities=kinds, record_shapes=True)
        self.times: dict[int, float] = {}  # step -> when it ended
        self.rows: Any = None
        profiles.append(self)

    def on_step_end(self, _: Any, state: Any, *__: Any, **others: Any) -> None:
        """The first quarter of the steps compiles and measures."""
        super().on_step_end(_, state, *__, **others)
        step, steps = state.global_step, state.max_steps
        if step not in (steps // 4, steps // 2, steps):
            return
        if IS_GPU:
            torch.cuda.synchronize()
        if step == steps:
            self.profile.stop()
            self.rows = others["train_dataloader"].dataset
        self.times[step] = time.perf_counter()
        if step == steps // 2:
            self.profile.start()


profiles: list[Profiled] = []


def step(ground: Ground) -> Iterator[str]:
    """A step on packs: real tokens a second, MFU, and the shares of its time, profiled.

    MFU is the operations that the steps need (`lora_flops`) / seconds / the peak of the data sheet.
    """
    rmtree(ground.runs / "step", ignore_errors=True)
    with patch("panjue.finetune.sft.TrainingLog", Profiled):
        trained, _ = ground.train("step")
    [profiled] = profiles
    log = {row["step"]: row for _, row in read_lines(trained.run / "log.jsonl") if "loss" in row}
    first, middle, last = profiled.times
    tokens = log[middle]["num_tokens"] - log[first]["num_tokens"]
    rate = tokens / (profiled.times[middle] - profiled.times[first])
    rows = profiled.rows
    examples = [size for sizes in rows["seq_lengths"] for size in sizes]
    replies = sum(label != IGNORED for labels in rows["labels"] for label in labels)
    config = AutoConfig.from_pretrained(ground.model)
    of_token = lora_flops(config, trained.record.lora["r"], examples, replies) / sum(examples)
    peak = peak_of(torch.cuda.get_device_name()) if IS_GPU else None
    mfu = f", MFU {rate * of_token / peak:.0%}" if peak else ""
    yield f"{rate:,.0f} tokens/s, {rate * of_token / 1e12:.4f} TFLOP/s{mfu}"
    events = profiled.profile.events()  # type: ignore[no-untyped-call]
    seconds = profiled.times[last] - profiled.times[middle]
    of_time = shares(events, config.vocab_size, seconds, DEVICE)
    yield ", ".join(f"{kind} {share:.1%}" for kind, share in of_time.items())


def parity(ground: Ground) -> Iterator[str]:
    """One adapter, greedy: vLLM merged and unmerged, by both runners, against transformers."""
    trained, _ = ground.train("lora-packs")
    base = AutoModelForCausalLM.from_pretrained(ground.model, dtype="auto")
    dtype = str(base.dtype).removeprefix("torch.")
    questions = [question._replace(schema=None) for question in ground.questions(trained)]
    limit = trained.record.max_tokens
    ways = {}
    for runner in ("0", "1") if IS_GPU else ("0",):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = runner
        for adapter in ("merge", "lora"):
            served = served_model(trained, adapter)
            outputs = asked(served, questions, dtype, limit)
            ways[f"runner V{int(runner) + 1}, {adapter}"] = outputs
    adapted = PeftModel.from_pretrained(base.to(DEVICE), str(trained.folder)).eval()
    for way, outputs in ways.items():
        checked = [against_transformers(adapted, output) for output in outputs]
        gaps = torch.cat([gap for gap, _ in checked])
        errors = torch.cat([error for _, error in checked])
        yield (
            f"{way}: {len(gaps)} tokens, log-probabilities differ by {errors.max():.1e} at most; "
            f"{int((gaps > 0).sum())} near ties"
        )
        assert gaps.max() <= NEAR_TIE[dtype], f"{way}: transformers would write another token"


def against_transformers(model: Any, output: RequestOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each token how much likelier transformers' choice is, and the gap to vLLM."""
    reply = output.outputs[0]
    prompt = list(output.prompt_token_ids)
    written = list(reply.token_ids)
    ids = torch.tensor([prompt + written], device=model.device)
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    logs = torch.log_softmax(logits, -1).cpu()
    own = logs.gather(1, ids[0, len(prompt) :, None].cpu())[:, 0]
    theirs = [top[token].logprob for token, top in zip(written, reply.logprobs, strict=True)]
    return logs.max(-1).values - own, (own - torch.tensor(theirs)).abs()


def speed(ground: Ground) -> Iterator[str]:
    """The engine with a schema a case and without; the server against plain vLLM."""
    trained, _ = ground.train("lora-packs")
    cases = ground.cases / "test.jsonl"
    replies = ground.size["replies"]
    yield from bench("generate", trained.run, cases, "--limit", replies)
    clients = ["--clients", replies, "--limit", 2 * replies, "--answer", "model"]
    yield from bench("serve", trained.run, cases, *clients)


def kills(ground: Ground) -> Iterator[str]:
    """`kill -9` of training and generation: the same commands finish them."""
    run = ground.runs / "killed"
    rmtree(run, ignore_errors=True)
    training = [PANJUE, "sft", *ground.training("killed")]
    killed_when(training, lambda: any(run.glob("checkpoints/*/complete")))
    [resumed] = re.findall(r"resuming from .*-(\d+)", run_words(*training))
    yield f"training went on after step {resumed}"
    generation = [PANJUE, "generate", run, ground.cases / "test.jsonl", "answer=model"]
    rows = run / "answers/test/completions.jsonl"
    killed_when(generation, lambda: rows.exists() and rows.read_bytes().count(b"\n") > 0)
    kept = rows.read_bytes().count(b"\n")
    run_words(*generation)  # starts only if the killed engine has given its memory back
    ids = [row["id"] for _, row in read_lines(rows)]
    assert len(ids) == len(set(ids)), "a case has two rows"
    yield f"generation kept {kept} rows of {len(ids)}"


def killed_when(words: list[object], ready: Callable[[], bool]) -> None:
    """Start a command, and kill it as soon as it is ready to be."""
    process = subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL)
    while not ready() and process.poll() is None:
        time.sleep(0.05)
    assert process.poll() is None, "it ended before it could be killed"
    process.kill()
    process.wait()


def asked(served: Served, questions: list[Question], dtype: str, limit: int) -> list[RequestOutput]:
    """Return vLLM's outputs for all questions at once, with the log-probability of each token."""
    sampling = {"logprobs": 1, "max_tokens": 128}
    requests = [Request(i, question, sampling) for i, question in enumerate(questions)]
    settings = {"dtype": dtype, "enforce_eager": not IS_GPU}
    with engine(served, settings, Budget(limit, limit), seed=0) as llm:

        async def answer() -> list[RequestOutput]:
            return await asyncio.gather(*map(llm.ask, requests))

        return llm.runner.run(answer())


STAGES = {f.__name__: f for f in (training, step, parity, speed, kills)}


def main() -> None:
    """Run the stages, each in a process of its own, and write the table."""
    options = arguments()
    if options.inside:
        for line in STAGES[options.stage](Ground(options)):
            print(f"figure: {line}", flush=True)
        return
    size = " (quick: tried, not measured)" if options.quick else ""
    lines = [f"# `make gpu`{size}", "", f"{machine()}; MODEL={options.model or ''}", ""]
    lines += ["| stage | passed | seconds | figures |", "|---|---|---|---|"]
    beside = options.folder if options.quick else Path(__file__).parent
    for name in [options.stage] if options.stage else STAGES:
        lines.append(row(name))
        (beside / "RESULT.md").write_text("\n".join([*lines, ""]), "utf-8")
    sys.exit("**no**" in "".join(lines))


def row(name: str) -> str:
    """Run one stage; return its row of the table, with its figures and its error, if any."""
    began = time.perf_counter()
    error = ""
    words = [sys.executable, __file__, *sys.argv[1:], "--inside", "--stage", name]
    pipe = subprocess.PIPE
    stage = subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, process_group=0)
    try:
        printed, complaint = stage.communicate(timeout=LIMIT_S)
        if stage.returncode:
            error = (complaint or printed).strip().splitlines()[-1]
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").decode()
        error = f"not done after {LIMIT_S} s"
    finally:  # what it has started too, which would keep the GPU
        with suppress(ProcessLookupError):
            os.killpg(stage.pid, signal.SIGKILL)
    figures = re.findall(r"^figure: (.*)$", printed, re.MULTILINE)
    print(f"{name}: {error or 'passed'}", *figures, sep="\n  ", flush=True)
    seconds = round(time.perf_counter() - began)
    passed = "**no**" if error else "yes"
    cell = "<br>".join([*figures, error]).replace("|", "/")
    return f"| {name} | {passed} | {seconds} | {cell} |"


def machine() -> str:
    """Return the GPU, the driver and the versions."""
    gpu = "no GPU"
    if IS_GPU:
        fields = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
        gpu = subprocess.check_output(["nvidia-smi", *fields], text=True).strip()
    names = ("torch", "transformers", "trl", "peft", "bitsandbytes")
    libraries = [f"{name} {version(name)}" for name in names]
    python = sys.version.split()[0]
    return ", ".join([gpu.replace("\n", "; "), f"Python {python}", *libraries, VLLM_VERSION])


def bench(script: str, *words: object) -> list[str]:
    """Return the lines that a script of tests/bench prints."""
    printed = run_words(sys.executable, "-m", f"tests.bench.{script}", *words)
    return [line.strip() for line in printed.splitlines() if line.strip()]


def run_words(*words: object) -> str:
    """Run a command from the project's root within the limit; return what it printed."""
    return subprocess.run(
        list(map(str, words)), cwd=ROOT, capture_output=True, text=True, check=True, timeout=LIMIT_S
    ).stdout


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stage", choices=("", *STAGES), help="one of them; else all")
    parser.add_argument("--model", help="folder of a base model")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/gpu", help="for what is made")
    parser.add_argument("--cases", type=Path, default=ROOT / "data/demo")
    parser.add_argument("--tiny", type=Path, default=ROOT / "runs/base/model")
    parser.add_argument("--quick", action="store_true", help="try every stage, measure nothing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
