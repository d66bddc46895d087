"""The folder and the tokenizer of a base model, for training and serving."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from panjue.prompts.architecture import check_quantization
from panjue.prompts.plumbing.endpoint import making_client
from panjue.prompts.plumbing.errors import UserError, first_line, of_library
from panjue.prompts.plumbing.files import read_object, read_record, sha256
from panjue.prompts.plumbing.records import CHOICE
from panjue.prompts.plumbing.run import way_to_adopt
from panjue.prompts.plumbing.threads import SPINS
from panjue.prompts.render import (
    control_ids,
    neutralize,
    neutralize_tokens,
    prompt_file,
    template_args,
)

CLASSIFIER = "classifier.npz"
"""File of the text classifier in the folder of an adapter, whose manifest has its hash."""

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", CLASSIFIER)
"""Patterns of the files of a model that are downloaded and copied: no pickles, no code."""

NOT_READ_FILES = ("*/*", "consolidated*")
"""Patterns of files that are not downloaded: the same weights in another format."""

CONFIG_FILES = ("config.json", "adapter_config.json", "tokenizer_config.json")
"""Patterns of files that are downloaded first, to check the model."""

MIB = 2**20

OF_MISTRAL = ("mistral", "mistral3", "ministral", "pixtral", "voxtral")
"""`model_type` of models whose older tokenizers split words wrongly."""

TINY_BYTES = 16 * MIB
"""Bytes of weights; models up to this size compute with at most `TINY_THREADS` threads."""

TINY_THREADS = 2


def model_folder(name: str) -> Path:
    """Return the folder of a base: a local one, or one downloaded from the hub (`HF_ENDPOINT`)."""
    folder = config_folder(name)
    if not Path(name).is_dir():
        folder = _from_hub(name, MODEL_FILES)
    check_weights(folder)
    return folder


def config_folder(name: str) -> Path:
    """Return the folder with the configs of a base; download and check them before its weights."""
    folder = Path(name)
    if not folder.is_dir():
        folder = _from_hub(name, CONFIG_FILES)
    if (folder / "adapter_config.json").exists():
        base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
        ways_out = [f"give the base model to be trained ({base})", way_to_adopt(folder)]
        raise UserError(f"{folder}: is an adapter; {'; '.join(filter(None, ways_out))}")
    if not (folder / "config.json").exists():
        snapshots = sorted((folder / "snapshots").glob("*/config.json"))
        if snapshots:  # a folder of the hub's cache
            way_out = f"give {snapshots[0].parent}"
            raise UserError(f"{folder}: has its files in snapshots/; {way_out}")
        raise UserError(f"{folder}: has no config.json; give the folder of the base model")
    configs = [folder / "config.json", folder / "tokenizer_config.json"]
    if any("auto_map" in read_object(path) for path in configs if path.exists()):
        raise UserError(f"{folder}: needs its own code (auto_map), which panjue never runs")
    check_quantization(folder, name)
    return folder


def check_weights(folder: Path) -> None:
    """Refuse weights that are missing, cut, or pointers of git-lfs, by names, headers and sizes."""
    from safetensors import SafetensorError, safe_open

    again = "the copy or download is incomplete, make it again"
    paths = set(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(
            f"{folder}: has no .safetensors weights; {again}, or convert weights of another format"
        )
    single = folder / "model.safetensors"
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    if single in paths and shards:  # transformers reads this one, vLLM the others
        raise UserError(
            f"{folder}: has {single.name} and {shards[0].name}, which may be of two models; keep "
            "those that belong to it"
        )
    for index in folder.glob("*.safetensors.index.json"):
        paths |= {folder / name for name in read_object(index)["weight_map"].values()}
    for path in sorted(paths):
        try:
            with safe_open(path, "np"):  # it compares the size with the header
                pass
        except (SafetensorError, FileNotFoundError) as error:
            raise UserError(f"{path}: is no whole file of weights: {error}; {again}") from None


def is_demo(folder: Path) -> bool:
    """Say whether a model or adapter was trained from a base that `panjue base` made.

    The manifest of a training names the model that it began with. This is followed to the untrained
    model of `panjue base`, which alone has a `start.json`. It takes three steps if the training
    began with the merged model of another one: adapter -> merged model -> base -> untrained model.
    """
    for _ in range(3):
        manifest = folder / "manifest.json"
        base = read_record(manifest).get("base") if manifest.exists() else None
        if not base:
            break
        # A relative path may start from another working folder, above this folder.
        places = [place / base for place in (Path(), *folder.resolve().parents)]
        folder = next(filter(Path.is_dir, places), Path(base))
    return (folder / "start.json").exists()


def is_hub_name(name: str) -> bool:
    """Say whether the name of a base that is no local folder can be a name on the hub."""
    in_hub_form = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    return in_hub_form and not Path(name).is_dir()  # owner/model


def _from_hub(name: str, files: Sequence[str]) -> Path:
    """Return the folder of a hub model with these files; download those that the cache lacks."""
    from huggingface_hub import constants, get_session, snapshot_download
    from huggingface_hub.errors import HFValidationError

    if not is_hub_name(name):
        raise UserError(
            f"base model {name!r}: there is no such folder; give one, or a hub name like "
            "Qwen/Qwen3-8B (`make base` makes that of the demo)"
        )
    if not constants.ENDPOINT.startswith(("http://", "https://")):
        raise UserError(f"HF_ENDPOINT={constants.ENDPOINT}: begins without https://")
    with making_client():  # this names a broken setting of proxy or certificate
        get_session()
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=list(files), ignore_patterns=list(NOT_READ_FILES)
            )
        )
    except (OSError, HFValidationError, RuntimeError) as error:
        raise UserError(
            f"base model {name!r}: no such folder, and the hub cannot provide it "
            f"({constants.ENDPOINT}: {first_line(error)}); set HF_ENDPOINT to a mirror and HF_HOME "
            "to a folder that can be written, or give a folder"
        ) from None


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model; refuse it if a text can forge control tokens with it."""
    from transformers import AutoTokenizer

    config = folder / "config.json"
    kind = read_object(config).get("model_type") if config.exists() else None
    # transformers 5.19 finds out which tokenizers of Mistral split words wrongly, and corrects them
    # if told to (tokenization_utils_tokenizers.py:1387). It also takes others for Mistral's.
    mended = {"fix_mistral_regex": True} if kind in OF_MISTRAL else {}
    with of_library(f"{folder}: its tokenizer", "; restore its files"):
        # A tokenizer from tekken.json, Mistral's format, has no chat template.
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, mistral_format=False, **mended
        )
    if not tokenizer.chat_template:
        raise UserError(
            f"{folder}: its tokenizer has no chat template; take an instruction-tuned model"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"{folder}: its tokenizer has no end token")
    template_args(tokenizer)  # raises if its chat template cannot be used
    for token, number in control_ids(tokenizer).items():
        if number == tokenizer.unk_token_id:
            continue  # any unknown character gives this token
        text = neutralize_tokens(tokenizer, neutralize(f"甲{token}乙"))
        if number in tokenizer(text, add_special_tokens=False).input_ids:
            raise UserError(
                f"{folder}: the special token {token!r} could be forged by a case's text"
            )
    return tokenizer


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model that are downloaded and copied, sorted by name."""
    found = {path for pattern in MODEL_FILES for path in folder.glob(pattern)}
    # CHOICE (who answers) is written later, for the weights that are there; it is no part of them.
    return sorted(found - {folder / CHOICE})


def is_tiny(model: Path) -> bool:
    """Say whether a model is so small that its threads would wait more than they compute."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors")) <= TINY_BYTES


@contextmanager
def threads_for(model: Path) -> Iterator[None]:
    """Let the block, and the processes that it starts, compute with few threads if a model is tiny.

    Two threads if waiting threads spin briefly (see `spin_briefly`), else one, since they wait for
    each other after every small matrix product. The user's OMP_NUM_THREADS counts more. With the
    demo's base, two compute 19,000 tokens/s on an idle machine and one 12,400; beside a busy
    process, two compute 9,500 and one 12,200.
    """
    if not is_tiny(model) or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    import torch

    before = torch.get_num_threads()
    waits_briefly = SPINS in os.environ  # set by `spin_briefly`, or by the user
    threads = min(before, TINY_THREADS) if waits_briefly else 1
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        del os.environ["OMP_NUM_THREADS"]


def prompt_sha256(task: str) -> str:
    """Return the hash of a task's `prompt.md`, for records."""
    return sha256(prompt_file(task))
