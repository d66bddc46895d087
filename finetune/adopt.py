"""Make a run folder from LoRA adapters that another trainer wrote: `panjue adopt`.

It contains what a training of panjue would leave: record, labels, text classifier, config, card.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from panjue.finetune.checkpoints import disk_errors_named
from panjue.finetune.distributed import join_processes
from panjue.finetune.examples import Examples
from panjue.finetune.foreign import Adoption, ForeignAdapter
from panjue.finetune.model import adapts_tied_embeddings, check_trainable
from panjue.finetune.training_log import doubts_of, print_lines
from panjue.finetune.training_run import TrainingRun
from panjue.prompts.architecture import TEXT_KEYS, is_part, text_config
from panjue.prompts.fingerprint import base_sha256, file_sha256
from panjue.prompts.labels import Labels
from panjue.prompts.model import load_tokenizer, model_folder, threads_for
from panjue.prompts.plumbing.errors import UserError, first_line, of_library
from panjue.prompts.plumbing.files import atomic_folder, read_object, write_json
from panjue.prompts.plumbing.records import TrainingSummary
from panjue.prompts.plumbing.run import ADAPTER_CONFIG, ADAPTER_WEIGHTS, kept_place
from panjue.prompts.reader import Reader
from panjue.prompts.render import TEMPLATE_ARGS
from panjue.prompts.task import load_task

PREFIX = "base_model.model."
"""Prefix of peft's names of weights; the name of the module in the base follows."""

NOT_KNOWN = (
    "which prompts it was trained on; panjue asks with its own, without opinions",
    "whether it was trained on the held-out cases; if it was, its scores on them are too high",
)


@dataclass(frozen=True)
class FittingAdapter:
    """A foreign adapter that fits its base, with the names of panjue's text model."""

    foreign: ForeignAdapter
    names: Mapping[str, str]  # name of a weight in the file -> its name here
    config: Mapping[str, Any]  # the content of the new adapter_config.json

    def write(self, folder: Path) -> None:
        """Write weights and config to a folder; copy the file if the names are the same."""
        write_json(folder / ADAPTER_CONFIG, dict(self.config))
        place = folder / ADAPTER_WEIGHTS
        if all(name == ours for name, ours in self.names.items()):
            shutil.copy(self.foreign.weights, place)
            return
        weights = load_file(self.foreign.weights)
        renamed = {self.names[name]: weight for name, weight in weights.items()}
        with disk_errors_named(folder):
            save_file(renamed, place, {"format": "pt"})


def adopt(adoption: Adoption, console: Console) -> None:
    """Make RUN from adapters, unless already done. The last adapter is the result of the run."""
    config = adoption.config
    join_processes(config)
    task = load_task(config.task)
    text = text_config(adoption.base)
    is_multimodal = is_part(adoption.base)
    # Before the weights of the base are downloaded: this needs only its configs.
    fitting = [
        fitting_adapter(adapter, adoption.base, text, is_multimodal=is_multimodal)
        for adapter in adoption.adapters
    ]
    *_, last = adoption.adapters
    check_trainable(config, console)
    base = model_folder(config.model)  # with weights; `adoption.base` may have only the configs
    run = adopting_run(TrainingRun.of(config, base, task), adoption.adapters)
    if run.is_finished():
        doubt = run.doubt()  # what cannot be compared if an earlier version adopted them
        console.print(f"{config.result}: already adopted, with these cases{doubt}")
        return
    layers = f"{len(adapted_modules(fitting[-1].names.values()))} linear layers of {config.model}"
    notes = [("adapter", f"LoRA of rank {last.config['r']} on {layers}")]
    notes += [("not known", line) for line in NOT_KNOWN]
    notes += template_note(last.folder, base)
    with run.lock(), threads_for(base):
        print_lines(console, notes)
        reader = Reader(task, columns=config.columns, on_bad_row=config.on_bad_row)
        examples = Examples(config, reader)
        labels = task.ask.labels(examples)
        counts = f"{len(examples.train)}, and {len(examples.held_out)} held out"
        print_lines(console, [("examples", counts), *doubts_of(examples, labels)])
        classifier = run.classifier(examples, labels, console)
        run.claim()  # before the weights: from now on no other training can take RUN
        reader.skipped.write(config.run / "skipped-train.jsonl")
        save(run, fitting, labels, classifier, len(examples.train))
    console.print(f"written: {config.result}")


def adopting_run(run: TrainingRun, adapters: Sequence[ForeignAdapter]) -> TrainingRun:
    """Return a run whose record has the adapters' folders, and one hash over all their files."""
    hashes = {}
    for number, adapter in enumerate(adapters):
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            hashes[f"{number}/{name}"] = file_sha256(adapter.folder / name)
    known = {
        "adopted": tuple(str(adapter.folder) for adapter in adapters),
        "adopted_sha256": base_sha256(hashes),  # hashes any names and hashes, not only a base's
    }
    return replace(run, record=run.record.model_copy(update=known))


def fitting_adapter(
    adapter: ForeignAdapter, base: Path, text: Any, *, is_multimodal: bool
) -> FittingAdapter:
    """Return an adapter with the names of its base; UserError: it does not fit the base.

    `text` is the config of the base's language model. From it and the adapter's config, peft itself
    makes a model without memory; this shows which weights the adapter has.
    """
    place = adapter.weights
    shapes = shapes_in(place)
    names = {name: name for name in shapes}
    if is_multimodal:  # it was trained on the whole base, of which panjue uses the text model
        names = {name: name_in_text_model(name) for name in shapes}
    # The revision is that of a base on the hub; `complete` writes another base into the config.
    config = {**adapter.config, "revision": None}
    if any(name != ours for name, ours in names.items()):
        # A pattern for the whole model may not match the names in its text model.
        config["target_modules"] = adapted_modules(names.values())
        config["exclude_modules"] = None
    model = empty_peft_model(adapter.folder / ADAPTER_CONFIG, config, text)
    needed = get_peft_model_state_dict(model, save_embedding_layers=False)
    # The file may also have weights of the base: some trainers save the embeddings with an adapter.
    allowed = {**model.state_dict(), **needed}
    other_base = "it was trained on another base; say base=FOLDER with that one"
    for name, shape in shapes.items():
        ours = names[name]
        if ours not in allowed:
            no_place = f"has {ours}, for which {base} has no place"
            raise UserError(f"{place}: {no_place}; {other_base}")
        size = tuple(allowed[ours].shape)
        if shape != size:
            sizes = f"{ours} is {list(shape)}, where {base} needs {list(size)}"
            raise UserError(f"{place}: {sizes}; {other_base}")
    found = set(names.values())
    for name in needed:
        if name not in found:
            raise UserError(f"{place}: has no {name}, which its config names; restore its files")
    check_bias(place, config, model)
    if adapts_tied_embeddings(model.get_base_model()):
        reason = "adapts embeddings that are the output layer too (tied), and cannot be merged"
        raise UserError(f"{place}: {reason}; train without them")
    return FittingAdapter(adapter, names, config)


def shapes_in(weights: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the weights in a file; only its header is read."""
    try:
        with safe_open(weights, "pt") as file:
            names = file.keys()
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        problem = f"is no whole file of weights: {first_line(error)}"
        raise UserError(f"{weights}: {problem}; copy or download it again") from None


def name_in_text_model(name: str) -> str:
    """Return a weight's name in the text model, for its name in the whole multimodal model.

    `…model.language_model.norm…` -> `…model.norm…`: panjue trains and loads the text model alone.
    """
    inner = name.removeprefix(PREFIX)
    for pattern, replacement in TEXT_KEYS.items():
        inner = re.sub(pattern, replacement, inner)
    return f"{PREFIX}{inner}"


def adapted_modules(names: Iterable[str]) -> list[str]:
    """Return the modules with LoRA: `base_model.model.model.norm.lora_A.weight` -> `model.norm`."""
    modules = set()
    for name in names:
        module, found, _ = name.removeprefix(PREFIX).partition(".lora_")
        if found:
            modules.add(module)
    return sorted(modules)


def empty_peft_model(place: Path, config: Mapping[str, Any], base: Any) -> PeftModel:
    """Return a base with an adapter, made from both configs; weights have shapes but no content.

    `place` is the file of the adapter's config, for messages.
    """
    # Some initializations read the weights of the base; it no longer matters which one was used.
    known = {**config, "init_lora_weights": True, "base_model_name_or_path": None}
    with of_library(str(place)), torch.device("meta"):
        lora = LoraConfig.from_peft_type(**known)
        model = AutoModelForCausalLM.from_config(base)
        return get_peft_model(model, lora, low_cpu_mem_usage=True)


def check_bias(place: Path, config: Mapping[str, Any], model: PeftModel) -> None:
    """Refuse an adapter with its own biases on layers without bias, since it cannot be merged."""
    if not config.get("lora_bias"):
        return
    for name, module in model.named_modules():
        if name.endswith(".base_layer") and getattr(module, "bias", None) is None:
            layer = name.removeprefix(PREFIX).removesuffix(".base_layer")
            reason = f"lora_bias, where {layer} has none in the base, cannot be merged nor served"
            raise UserError(f"{place}: {reason}; train without it")


def template_note(adapter: Path, base: Path) -> Iterator[tuple[str, str]]:
    """Yield a note if an adapter has another chat template than its base; the base's is used.

    UserError: the base has no template, or its tokenizer cannot be used.
    """
    own = template_in(adapter)
    way_out = f"give base=FOLDER, a copy of {base} with the chat template of {adapter}"
    if own and not template_in(base):  # without `own`, `load_tokenizer` refuses the base
        raise UserError(f"{base}: has no chat template; {way_out}")
    tokenizer = load_tokenizer(base)
    if own and shown_by(tokenizer, own) != shown_by(tokenizer, tokenizer.chat_template):
        differs = "that of the base is used, and the adapter has another one"
        yield "template", f"{differs}; to use it, {way_out}"


def template_in(folder: Path) -> str | None:
    """Return the chat template in a folder with a tokenizer, if it has one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    config = folder / "tokenizer_config.json"
    found = read_object(config).get("chat_template") if config.is_file() else None
    if isinstance(found, list):  # old versions of transformers have several by name
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found


def shown_by(tokenizer: Any, template: str) -> str:
    """Return a message rendered by a chat template, or why the template fails."""
    message = [{"role": "user", "content": "案情"}]
    settings = {"tokenize": False, "add_generation_prompt": True, **TEMPLATE_ARGS}
    try:
        return str(tokenizer.apply_chat_template(message, chat_template=template, **settings))
    except Exception as error:  # whatever a template raises
        return f"it fails: {first_line(error)}"


def save(
    run: TrainingRun,
    adapters: Sequence[FittingAdapter],
    labels: Labels,
    classifier: Path | None,
    examples: int,
) -> None:
    """Write the last adapter to RUN/adapter, and the others as kept adapters of their steps."""
    *others, last = adapters
    summary = TrainingSummary(finished=date.today().isoformat(), kept_step=last.foreign.step)
    run.write_summary(summary)
    places = {}
    for adapter in others:
        assert adapter.foreign.step is not None, "checked with the words of the command"
        places[kept_place(run.config.run, adapter.foreign.step)] = adapter
    places[run.config.result] = last  # last, since its record says that all is complete
    for place, adapter in places.items():
        with atomic_folder(place) as folder:
            adapter.write(folder)
            run.complete(folder, adapter.foreign.step, labels, classifier, {"examples": examples})
