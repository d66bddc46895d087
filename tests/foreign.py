"""Adapters as other trainers write them: plain peft, real steps, prompts that are not ours."""

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from panjue.finetune.adopt import adopt
from panjue.finetune.foreign import adoption
from panjue.prompts.plumbing.files import read_lines
from tests.finetune.conftest import lend_rows

LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def write_foreign(
    folder: Path, base: Path, cases: Path, steps: tuple[int, ...] = (2, 4), **lora: Any
) -> Path:
    """Train an adapter of a base as a script of one's own would; return its folder.

    Each of `steps` is a checkpoint, and the last one the result, beside which lies a tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", **{**LORA, **lora})
    model = get_peft_model(load(base), config)
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    for step, ids in zip(range(1, max(steps) + 1), texts(cases, tokenizer), strict=False):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in steps:
            place = folder / f"checkpoint-{step}"
            model.save_pretrained(place)
            (place / "training_args.bin").write_bytes(b"a pickle")
            (place / "trainer_state.json").write_text(json.dumps({"global_step": step}), "utf-8")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "args.json").write_text('{"template": "qwen3"}', "utf-8")
    return folder


def load(base: Path) -> Any:
    """Load a base as its own class, which may be that of a model that sees."""
    config = json.loads((base / "config.json").read_text("utf-8"))
    [name] = config["architectures"]
    import transformers

    return getattr(transformers, name, AutoModelForCausalLM).from_pretrained(base)


def texts(cases: Path, tokenizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tokens of cases with their answers in words, [1, tokens]."""
    for _, row in read_lines(cases):
        said = "；".join(f"{one['name']}犯{'、'.join(one['charges'])}" for one in row["outcomes"])
        messages = [
            {"role": "user", "content": f"请判决：{row['fact']}"},
            {"role": "assistant", "content": said},
        ]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        yield torch.tensor([ids[:256]])


def as_of_unsloth(folder: Path) -> None:
    """Give an adapter the form of one that was published from a notebook of Unsloth."""
    classes = {"base_model_class": "Qwen3ForCausalLM", "unsloth_fixed": True}
    parent = {"parent_library": "transformers.models.qwen3.modeling_qwen3"}
    named = {"base_model_name_or_path": "unsloth/Qwen3-8B-unsloth-bnb-4bit", "revision": "unsloth"}
    more = {"peft_version": "0.19.1", "qalora_group_size": 16, "megatron_core": "megatron.core"}
    change(folder, auto_mapping={**classes, **parent}, **named, **more)
    card = "---\nbase_model: unsloth/Qwen3-8B-unsloth-bnb-4bit\nlibrary_name: peft\n---\n# Card\n"
    (folder / "README.md").write_text(card, "utf-8")


def adopted(run: Path, workshop: Path, *words: object, folders: Sequence[Path]) -> str:
    """Adopt as the command does, without asking held-out cases; return what it said."""
    train_file = workshop / "demo/train.jsonl"
    meant = adoption([*map(str, folders), f"run={run}", f"train={train_file}", *map(str, words)])
    lend_rows(workshop, run)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with console.capture() as said:
        adopt(meant, console)
    return said.get()


def change(folder: Path, **settings: Any) -> None:
    """Change settings in the config of an adapter."""
    place = folder / "adapter_config.json"
    config = {**json.loads(place.read_text("utf-8")), **settings}
    place.write_text(json.dumps(config, indent=2), "utf-8")


def contents(folder: Path) -> dict[str, str]:
    """Return the name of everything in a folder -> the hash of its content, if it is a file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = sha256(content).hexdigest()
    return found
