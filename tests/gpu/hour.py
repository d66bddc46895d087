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
from io import StringIO
from itertools import cycle, islice
from pathlib import Path
from resource import getrusage
from shutil import rmtree
from subprocess import PIPE
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import is_flash_attn_2_available

from panjue.finetune.settings import sft_settings
from panjue.finetune.sft import train as sft
from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.files import read_lines, read_object, write_json
from panjue.prompts.plumbing.run import Run
from panjue.prompts.reader import Reader
from panjue.serve.ask import LONGEST, Budget, Question, Request
from panjue.serve.engine import RequestOutput, engine
from panjue.serve.job import make_job
from panjue.serve.merge import Served, served_model
from panjue.serve.settings import GenerateConfig
from tests.families import make_family
from tests.gpu.machine import IS_GPU, machine, share

ROOT = Path(__file__).parents[2]
PANJUE = Path(sys.executable).with_name("panjue")
LIMIT_S = 600
FULL = {"steps": 12, "saved": 6, "replies": 64, "schemas": 1000, "cases": 2000, "seconds": 15}
QUICK = {"steps": 4, "saved": 2, "replies": 3, "schemas": 5, "cases": 6, "seconds": 1}
"""How much each stage does: to be measured, or only tried."""

QWEN3_8B = {"intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8}
"""Its shape, where it is not Qwen3Config's default."""

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.05}
"""Type of the engine -> difference of two log-probabilities that its rounding explains."""

Words = dict[str, Any]


class Ground:
    """Where the stages work, on what model and cases, and how much they do."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder, self.cases, self.tiny = options.folder, options.cases, options.tiny
        self.given, self.size = options.model, QUICK if options.quick else FULL

    @cached_property
    def model(self) -> Path:
        """Return the base model of all stages but the demo."""
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
        config = ROOT / f"finetune/configs/qwen3-8b-{'qlora' if 'qlora' in name else 'lora'}.yaml"
        steps = [f"trainer.max_steps={self.size['steps']}", "trainer.logging_steps=1"]
        data = [f"train={self.cases / 'train.jsonl'}", f"model={self.model}"]
        data += [f"run={self.runs / name}", "trainer.eval_strategy=no", "max_tokens=2048"]
        return [str(config), *data, *steps, f"trainer.save_steps={self.size['saved']}", *words]

    def train(self, name: str, *words: str) -> tuple[Run, str]:
        """Train, if that is not done; return the run and what was printed."""
        config, *rest = self.training(name, *words)
        with redirect_stdout(StringIO()) as printed:
            sft(sft_settings(Path(config), rest))
        gc.collect()  # else the model would stay beside an engine's memory
        torch.cuda.empty_cache()
        return Run(self.runs / name), printed.getvalue()

    def questions(self, run: Run, count: int) -> list[Question]:
        """Return the questions of as many cases, from the start again after the last."""
        job = make_job(run, GenerateConfig.model_validate({})).with_model()
        asker = job.asker()
        examples = cycle(Reader(job.task).read(self.cases / "test.jsonl"))
        return [asker.question(example) for example in islice(examples, count)]


def demo(_: Ground) -> Iterator[str]:
    """Go the whole way from nothing to a score."""
    run_words("env", "-u", "MAKEFLAGS", "make", "score")  # a MODEL= given to make would count there
    scores = read_object(ROOT / "runs/demo/answers/test/scores.json")
    yield f"final {scores['final']:.4f}"


def families(ground: Ground) -> Iterator[str]:
    """Train the language model of one that also sees; it answers unmerged as merged."""
    base = ground.folder / "family"
    name = "qwen3.5" if IS_GPU else "gemma3"  # vLLM cannot import Qwen3.5 beside a CPU torch
    shape = {"text_config": {}, "vision_config": {"depth": 1}} if IS_GPU else None  # as Qwen3.5-9B
    with torch.device("cuda" if IS_GPU else "cpu"):
        dtype = torch.bfloat16 if IS_GPU else torch.float32
        make_family(name, ground.tiny, base, shape, dtype)
    run, printed = ground.train("family", f"model={base}", "max_tokens=1024")
    yield from (line.strip() for line in printed.splitlines() if re.match("packing|kernels", line))
    questions = ground.questions(run, ground.size["replies"])
    settings = {"dtype": f"{dtype}"[len("torch.") :], "enforce_eager": not IS_GPU}
    sampling, found = {"logprobs": 1, "max_tokens": 64}, []
    # `lora` starts only if the adapter changes what is said; a whole base needs torchvision.
    for adapter in ("merge", "lora") if IS_GPU else ("merge",):
        served = served_model(run.trained, adapter)
        outputs, seconds = asked(served, questions, sampling, settings, Budget(1024, 1024))
        found.append([next(iter(o.outputs[0].logprobs[0].values())).logprob for o in outputs])
        yield f"{adapter}: {len(outputs)} replies in {seconds:.1f} s"
    difference = (torch.tensor(found[0]) - torch.tensor(found[-1])).abs().max()
    yield f"first tokens' log-probabilities differ by {difference:.1e} at most"
    assert difference <= NEAR_TIE[str(settings["dtype"])]
    for folder in (base, run.folder):  # 36 GB with the merged model
        rmtree(folder)


def training(ground: Ground) -> Iterator[str]:
    """LoRA, packs, QLoRA: real tokens a second, use of the GPU, memory planned and used."""
    ways = {"lora": ["trainer.packing=false", "trainer.per_device_train_batch_size=4"]}
    ways |= {"lora-packs": [], "qlora-packs": []}
    if is_flash_attn_2_available():
        ways["lora-packs-flash-attention"] = ["attn_implementation=flash_attention_2"]
    if IS_GPU:
        ways["lora-packs-flex-attention"] = ["attn_implementation=flex_attention"]
    for name, words in ways.items():
        rmtree(ground.runs / name, ignore_errors=True)  # else there is nothing to measure
        if IS_GPU:
            torch.cuda.reset_peak_memory_stats()
        run, printed = ground.train(name, *words)
        log = [row for _, row in read_lines(run.folder / "log.jsonl") if "loss" in row]
        assert all(math.isfinite(row["loss"]) for row in log)
        first, last = log[len(log) // 4], log[-1]  # the first steps compile and measure
        rate = (last["num_tokens"] - first["num_tokens"]) / (last["seconds"] - first["seconds"])
        [total] = re.findall(r"trained of ([\d,]+)", printed)
        [planned] = re.findall(r"memory +([\d.]+) GiB", printed)
        # The base is frozen: 2 operations a weight forwards, 2 backwards, none for its gradient.
        use = share(4 * int(total.replace(",", "")) * rate, "compute")
        peak = torch.cuda.max_memory_allocated() if IS_GPU else 1024 * getrusage(0).ru_maxrss
        yield f"{name}: {rate:,.0f} tokens/s{use}; GiB planned {planned}, used {peak / 2**30:.1f}"


def parity(ground: Ground) -> Iterator[str]:
    """One adapter, greedy: vLLM merged and unmerged, by both runners, against transformers."""
    run, _ = ground.train("lora-packs")
    base = AutoModelForCausalLM.from_pretrained(ground.model, dtype="auto")
    dtype = f"{base.dtype}"[len("torch.") :]
    questions = [q._replace(schema=None) for q in ground.questions(run, ground.size["replies"])]
    settings = {"dtype": dtype, "enforce_eager": not IS_GPU}
    ways = {}
    for runner in ("0", "1") if IS_GPU else ("0",):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = runner
        for adapter in ("merge", "lora"):
            served = served_model(run.trained, adapter)
            sampling = {"logprobs": 1, "max_tokens": 128}
            limit = run.record.max_tokens
            asking = asked(served, questions, sampling, settings, Budget(limit, limit))
            ways[f"runner V{int(runner) + 1}, {adapter}"] = asking[0]
    adapted = PeftModel.from_pretrained(base.to("cuda" if IS_GPU else "cpu"), str(run.trained))
    by_first = [list(output.outputs[0].token_ids) for output in next(iter(ways.values()))]
    for way, outputs in ways.items():
        checked = [against_transformers(adapted.eval(), output) for output in outputs]
        gaps, errors = (torch.cat(each) for each in zip(*checked, strict=True))
        replies = [list(output.outputs[0].token_ids) for output in outputs]
        same = sum(map(list.__eq__, replies, by_first))
        yield (
            f"{way}: {len(gaps)} tokens, log-probabilities differ by {errors.max():.1e} at most; "
            f"{int((gaps > 0).sum())} near ties; {same} of {len(replies)} replies as by the first"
        )
        assert gaps.max() <= NEAR_TIE[dtype], f"{way}: transformers would write another token"


def against_transformers(model: Any, output: RequestOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each token how much likelier transformers' choice is, and the gap to vLLM."""
    reply, prompt = output.outputs[0], list(output.prompt_token_ids)
    written = list(reply.token_ids)
    ids = torch.tensor([prompt + written], device=model.device)
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    logs = torch.log_softmax(logits, -1).cpu()
    own = logs.gather(1, ids[0, len(prompt) :, None].cpu())[:, 0]
    theirs = [top[token].logprob for token, top in zip(written, reply.logprobs, strict=True)]
    return logs.max(-1).values - own, (own - torch.tensor(theirs)).abs()


def schema(ground: Ground) -> Iterator[str]:
    """Make and check a schema a case; decode under them and without, at equal tokens."""
    [run, _], began = ground.train("lora-packs"), time.perf_counter()
    count = len(ground.questions(run, ground.size["schemas"]))
    yield f"{count} schemas, {1000 * (time.perf_counter() - began) / count:.1f} ms each with prompt"
    limit = ("--limit", ground.size["replies"])
    yield from bench("generate", run.trained, ground.cases / "test.jsonl", *limit)


def generation(ground: Ground) -> Iterator[str]:
    """Tokens a second of many cases at once, against what GPU and weights allow."""
    run, many = ground.train("lora-packs")[0], ground.size["cases"]
    questions, served = ground.questions(run, many), served_model(run.trained, "merge")
    settings = {"enable_prefix_caching": False}  # the cases repeat
    outputs, seconds = asked(served, questions, {"max_tokens": 128}, settings, Budget(0, LONGEST))
    written = sum(len(output.outputs[0].token_ids) for output in outputs)
    read = sum(len(question.prompt) for question in questions)
    weights = sum(file.stat().st_size for file in served.model.glob("*.safetensors"))
    # Every step of decoding reads all weights once, for as many replies as run together.
    least = share(weights * max(128, written / 1024) / seconds, "bandwidth")
    yield f"{written / seconds:,.0f} tokens/s written, {read / seconds:,.0f} read{least}"


def serving(ground: Ground) -> Iterator[str]:
    """The server against plain vLLM."""
    words = ["--seconds", ground.size["seconds"], "--clients", ground.size["replies"]]
    run, _ = ground.train("lora-packs")
    yield from bench("serve", run.folder, ground.cases / "test.jsonl", *words)


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


def asked(
    served: Served, questions: list[Question], sampling: Words, settings: Words, budget: Budget
) -> tuple[list[RequestOutput], float]:
    """Return vLLM's outputs for all questions at once, and how many seconds they took."""
    requests = [Request(i, question, sampling) for i, question in enumerate(questions)]
    with engine(served, settings, budget, seed=0) as llm:

        async def answer(some: list[Request]) -> list[RequestOutput]:
            return await asyncio.gather(*map(llm.ask, some))

        llm.runner.run(answer(requests[:2]))  # warms up
        began = time.perf_counter()
        return llm.runner.run(answer(requests)), time.perf_counter() - began


ALL = (families, demo, training, parity, schema, generation, serving, kills)
STAGES = {f.__name__: f for f in ALL}


def main() -> None:
    """Run the stages, each in a process of its own, and write the table."""
    options = arguments()
    if options.inside:
        for line in STAGES[options.stage](Ground(options)):
            print(f"figure: {line}", flush=True)
        return
    path = options.folder / "results.json"
    results = dict(read_object(path)) if path.exists() else {}
    for name in [options.stage] if options.stage else STAGES:
        results[name] = result(name)
        write_json(path, results)
        beside = options.folder if options.quick else Path(__file__).parent
        (beside / "RESULT.md").write_text(table(results, options), "utf-8")
    sys.exit(not all(stage["passed"] for stage in results.values()))


def result(name: str) -> dict[str, Any]:
    """Run one stage; return its figures and its error, if any."""
    began, error = time.perf_counter(), ""
    words = [sys.executable, __file__, *sys.argv[1:], "--inside", "--stage", name]
    stage = subprocess.Popen(words, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True, process_group=0)
    try:
        printed, complaint = stage.communicate(timeout=LIMIT_S)
        error = (complaint or printed).strip().splitlines()[-1] if stage.returncode else ""
    except subprocess.TimeoutExpired as late:
        printed, error = (late.stdout or b"").decode(), f"not done after {LIMIT_S} s"
    finally:  # what it has started too, which would keep the GPU
        with suppress(ProcessLookupError):
            os.killpg(stage.pid, signal.SIGKILL)
    figures = re.findall(r"^figure: (.*)$", printed, re.MULTILINE)
    print(f"{name}: {error or 'passed'}", *figures, sep="\n  ", flush=True)
    row = {"passed": not error, "seconds": round(time.perf_counter() - began)}
    return {**row, "figures": figures, "error": error}


def table(results: dict[str, Any], options: argparse.Namespace) -> str:
    """Return RESULT.md for the results of all stages that were ever run in this folder."""
    size = " (quick: tried, not measured)" if options.quick else ""
    lines = [f"# `make gpu`{size}", "", f"{machine()}; MODEL={options.model or ''}", ""]
    lines += ["| stage | passed | seconds | figures |", "|---|---|---|---|"]
    for name in filter(results.get, STAGES):
        stage = results[name]
        cell = "<br>".join(filter(None, [*stage["figures"], stage["error"]])).replace("|", "/")
        lines.append(f"| {name} | {'yes' if stage['passed'] else '**no**'} | {stage['seconds']} | ")
        lines[-1] += f"{cell} |"
    return "\n".join([*lines, ""])


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
