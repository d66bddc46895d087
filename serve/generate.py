"""Answer every case of a test file: one schema per case, finished rows streamed to disk."""

import json
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import llguidance.hf
from llguidance import LLMatcher
from pydantic import Field
from rich.console import Console

from panjue.prompts.config import Config, check_settings, load_config
from panjue.prompts.errors import UserError
from panjue.prompts.files import Rows, difference, dump, read_json, sha256, stream, write_json
from panjue.prompts.fit import fit_prompt
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.model import load_tokenizer, model_folder, model_sha256, prompt_sha256
from panjue.prompts.progress import meter
from panjue.prompts.render import prompt_ids
from panjue.prompts.task import Example, Schema, Task, load_task


class GenerateConfig(Config):
    """Settings of one generation; what it writes lies in `run`."""

    task: str = "judgment"
    """Name of a file in prompts/tasks/."""
    run: Path
    """Folder that completions and submission are written to."""
    test: Path
    """Cases to answer."""
    trained: Path | None = None
    """Adapter or model folder of a training run; by default the one in `run`."""
    adapter: Literal["merge", "lora", "none"] = "merge"
    """Serve the adapter folded into a cached copy of its base, or as it is, or the base alone."""
    constrained: bool = True
    """Decode under each case's schema. Without it replies are free text, repaired as well as can be."""
    max_tokens: int | None = Field(None, ge=64)
    """Prompt plus reply; by default what training had, so that cases are shortened alike."""
    seed: int = 0
    """Of the engine."""
    in_flight: int = Field(256, ge=1)
    """Requests handed to the engine ahead of their turn."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Passed to vLLM's engine as they are."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Passed to vLLM's SamplingParams as they are; greedy by default."""


def main(path: Path, overrides: Sequence[str] = ()) -> Path:
    """Generate as the config at `path` says and return the run folder; continues where it stopped."""
    config = load_config(GenerateConfig, path, overrides)
    generate(config)
    return config.run


def generate(config: GenerateConfig) -> None:
    """Write one row per example of `config.test` to `completions.jsonl`.

    A row has the raw reply (`texts`, one per sample), why each ended (`finish`), token counts and
    how many sentences `fit` left out. An example that cannot be asked at all has `refused`, the
    reason, instead. Rows that are there already are kept and not made again.

    Raises:
        UserError: A file or setting is wrong, or the run folder holds rows made otherwise.
    """
    console = Console()
    task = load_task(config.task)
    if not config.test.is_file():
        raise UserError(f"test: no file {config.test}")
    examples = sum(1 for _ in task.read(config.test))
    trained = trained_folder(config)
    labels = load_labels(trained / "labels.json")
    max_tokens = config.max_tokens or read_json(trained / "manifest.json")["max_tokens"]
    made = provenance(config, trained, max_tokens)
    claim(config.run, made, trained)
    done = finished_ids(config.run / "completions.jsonl")
    if len(done) >= examples:
        console.print(f"{config.run / 'completions.jsonl'}: all {examples} are answered already")
        return
    if done:
        console.print(f"continuing: {len(done)} of {examples} are answered already")
    todo = (example for example in task.read(config.test) if str(example.id) not in done)
    run_engine(config, Asker(config, task, labels, trained, max_tokens), todo, (len(done), examples))


def trained_folder(config: GenerateConfig) -> Path:
    """Return the folder of the training result to serve.

    Raises:
        UserError: It has no labels or manifest, or was trained for another task.
    """
    candidates = [config.trained] if config.trained else [config.run / "adapter", config.run / "model"]
    for folder in candidates:
        if (folder / "manifest.json").exists():
            task = read_json(folder / "manifest.json")["task"]
            if task != config.task:
                raise UserError(f"{folder}: was trained for the task {task!r}, not {config.task!r}")
            return folder
    raise UserError(f"{candidates[0]}: nothing trained is there; run `panjue sft` first or set trained=FOLDER")


def provenance(config: GenerateConfig, trained: Path, max_tokens: int) -> dict[str, Any]:
    """Say what the completions are made of; resuming under anything else is refused."""
    return {
        "task": config.task,
        "test": str(config.test),
        "test_sha256": sha256(config.test),
        "trained": str(trained),
        "trained_sha256": model_sha256(trained),
        "labels_sha256": sha256(trained / "labels.json"),
        "prompt_sha256": prompt_sha256(config.task),
        "adapter": config.adapter,
        "constrained": config.constrained,
        "max_tokens": max_tokens,
        "seed": config.seed,
        "engine": config.engine,
        "sampling": config.sampling,
        "versions": {name: version(name) for name in ("llguidance", "transformers")},
    }


def claim(run: Path, made: dict[str, Any], trained: Path) -> None:
    """Make `run` the place of these completions: manifest and labels.

    Raises:
        UserError: Completions made otherwise are there; names what differs.
    """
    place = run / "manifest.json"
    manifest = read_json(place) if place.exists() else {}
    before = manifest.get("generate")
    if before not in (None, made) and (run / "completions.jsonl").exists():
        raise UserError(
            f"{run}/completions.jsonl: was made otherwise ({difference(before, made)}); "
            "choose another run=FOLDER or delete that file"
        )
    run.mkdir(parents=True, exist_ok=True)
    shutil.copy(trained / "labels.json", run / "labels.json")
    write_json(place, {**manifest, "generate": made})


def finished_ids(path: Path) -> set[str]:
    """Return the ids of the rows that are there, after dropping a torn last one."""
    if not path.exists():
        return set()
    with stream(path):
        pass  # opening it drops a torn last line
    return Rows(path).ids()


class Asker:
    """Turns examples into requests: fits, renders, builds and checks the schema."""

    def __init__(
        self, config: GenerateConfig, task: Task, labels: Labels, trained: Path, max_tokens: int
    ) -> None:
        """Resolve the model to serve and load its tokenizer."""
        from panjue.serve.merge import check_base, merge

        self.config, self.task, self.labels, self.max_tokens = config, task, labels, max_tokens
        self.lora: Path | None = None
        self.model = trained
        if (trained / "adapter_config.json").exists():
            manifest = read_json(trained / "manifest.json")
            if config.adapter == "merge":
                self.model = merge(trained, trained.with_name("merged"))
            else:
                self.model = check_base(trained, manifest)
                self.lora = trained if config.adapter == "lora" else None
        elif config.adapter == "none":
            self.model = model_folder(read_json(trained / "manifest.json")["base"])
        self.tokenizer = load_tokenizer(self.model)
        self._grammar_tokenizer = llguidance.hf.from_tokenizer(self.tokenizer)
        self.dropped: dict[str, int] = {}

    def prompt(self, example: Example) -> list[int]:
        """Return the prompt's token ids, the same that training made.

        Raises:
            Refusal: It cannot be shortened enough.
        """
        fitted = fit_prompt(self.task, example, self.labels, self.tokenizer, self.max_tokens)
        if not fitted.fits:
            raise Refusal(f"the prompt needs {fitted.tokens} tokens, max_tokens is {self.max_tokens}")
        self.dropped[str(example.id)] = fitted.dropped
        return prompt_ids(self.tokenizer, self.task.prompt(fitted.example))

    def schema(self, example: Example) -> Schema:
        """Return the example's schema, known to be one the grammar library takes.

        Raises:
            Refusal: It is not. vLLM would answer such a request with an empty reply and a log line.
        """
        schema = self.task.schema(example, self.labels)
        options = {"whitespace_flexible": not True}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        problem = LLMatcher(self._grammar_tokenizer, grammar, log_level=0).get_error()
        if problem:
            raise Refusal(f"the grammar library refuses its schema: {problem.splitlines()[0]}")
        return schema


class Refusal(Exception):
    """One example cannot be asked; its message says why."""


def run_engine(
    config: GenerateConfig, asker: Asker, todo: Iterator[Example], progress: tuple[int, int]
) -> None:
    """Decode `todo` and append every finished row at once."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    from panjue.serve.engine import Request, complete, engine, on_cpu

    check_settings("sampling", config.sampling, SamplingParams.__struct_fields__)
    if "seed" in config.sampling and on_cpu():
        raise UserError("sampling.seed: a seed per request kills vLLM on the CPU; set the top-level seed")

    def requests() -> Iterator[Request]:
        for example in todo:
            try:
                prompt = asker.prompt(example)
                schema = asker.schema(example) if config.constrained else None
            except Refusal as refusal:
                write({"id": example.id, "refused": str(refusal)})
                continue
            params = SamplingParams(
                **{"temperature": 0.0, "max_tokens": asker.max_tokens - len(prompt), **config.sampling},
                structured_outputs=StructuredOutputsParams(json=schema) if schema else None,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            ids[str(example.id)] = example.id
            yield Request(str(example.id), prompt, params)

    def write(row: dict[str, Any]) -> None:
        out.write(dump(row) + "\n")
        out.flush()
        shown.to(shown.done + 1, f"{shown.rate:.2f} cases/s")

    ids: dict[str, int | str] = {}
    lora = LoRARequest("adapter", 1, str(asker.lora)) if asker.lora else None
    rank = read_json(asker.lora / "adapter_config.json")["r"] if asker.lora else 0
    done, total = progress
    with (
        engine(asker.model, config.engine, asker.max_tokens, config.seed, lora_rank=rank) as llm,
        stream(config.run / "completions.jsonl") as out,
        meter(Console(), total, done) as shown,
    ):
        for key, output in complete(llm, requests(), config.in_flight, lora):
            write(
                {
                    "id": ids.pop(key),
                    "texts": [sample.text for sample in output.outputs],
                    "finish": [sample.finish_reason for sample in output.outputs],
                    "prompt_tokens": len(output.prompt_token_ids or ()),
                    "cached_tokens": output.num_cached_tokens or 0,
                    "completion_tokens": sum(len(sample.token_ids) for sample in output.outputs),
                    "dropped_sentences": asker.dropped.pop(key),
                }
            )
