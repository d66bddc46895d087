"""What the words of a training mean: the config, the run folder, what is missing."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from panjue.finetune import words as words_module
from panjue.finetune.settings import sft_settings
from panjue.finetune.words import AS_IN_START, OTHER_DATA, config_for_gpu, training_words
from panjue.prompts.plumbing import config as config_module
from panjue.prompts.plumbing.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with configs and a run that was begun; the GPU wants the config `gpu`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("panjue.finetune.words.config_for_gpu", lambda: "gpu")
    configs = tmp_path / "finetune/configs"
    configs.mkdir(parents=True)
    (configs / "gpu.yaml").write_text("sft: {batch: 7}", "utf-8")
    (configs / "m2.5-0.5b.yaml").write_text("sft: {}", "utf-8")
    (configs / "bare.yaml").write_text("generate: {}", "utf-8")
    (tmp_path / "own.yaml").write_text("sft: {run: /data/own}", "utf-8")
    (tmp_path / "tried.yaml").write_text("sft: {run: a-limit20, limit: 20}", "utf-8")
    (tmp_path / "own.conf").write_text("sft: {}", "utf-8")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/config.yaml").write_text("sft: {run: begun}", "utf-8")
    (tmp_path / "alone").mkdir()


AFRESH = " ".join((*AS_IN_START, *OTHER_DATA))


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        # The next stage: the settings of the first one, but not its data.
        (
            "from=begun train=d/b.jsonl",
            f"begun/config.yaml run=runs/begun-b {AFRESH} from=begun train=d/b.jsonl",
        ),
        (
            "from=begun/ train=b.jsonl limit=5 lora.r=8",
            f"begun/config.yaml run=runs/begun-b-limit5 {AFRESH} from=begun/ train=b.jsonl limit=5 "
            "lora.r=8",
        ),
        (
            "from=alone train=b.jsonl run=new",
            f"C/gpu.yaml {AFRESH} from=alone train=b.jsonl run=new",
        ),
        ("from=alone train=b", f"C/gpu.yaml run=runs/gpu-alone-b {AFRESH} from=alone train=b"),
        ("gpu from=begun train=b", "C/gpu.yaml run=runs/gpu-begun-b from=begun train=b"),
        ("from=alone run=begun", "begun/config.yaml from=alone run=begun"),
        (
            "model=q/M-3 train=d/a.b.jsonl",
            "C/gpu.yaml run=runs/gpu-M-3-a.b model=q/M-3 train=d/a.b.jsonl",
        ),
        ("model='a b' train=t", "C/gpu.yaml run=runs/gpu-a_b-t model='a b' train=t"),
        ("gpu", "C/gpu.yaml run=runs/gpu"),
        ("gpu seed=1", "C/gpu.yaml run=runs/gpu seed=1"),
        ("gpu task=judgment", "C/gpu.yaml run=runs/gpu task=judgment"),
        (
            "gpu task=reading train=t.json",
            "C/gpu.yaml run=runs/gpu-reading-t task=reading train=t.json",
        ),
        ("bare", "C/bare.yaml run=runs/bare"),
        ("m2.5-0.5b", "C/m2.5-0.5b.yaml run=runs/m2.5-0.5b"),
        ("own.conf", "own.conf run=runs/own"),
        ("own.yaml train=t", "own.yaml train=t"),
        ("own.yaml run=x train=t", "own.yaml run=x train=t"),
        ("gpu limit=20", "C/gpu.yaml run=runs/gpu-limit20 limit=20"),
        ("gpu limit=null", "C/gpu.yaml run=runs/gpu limit=null"),
        ("own.yaml limit=20", "own.yaml run=/data/own-limit20 limit=20"),
        ("own.yaml run=x limit=20", "own.yaml run=x limit=20"),
        ("tried.yaml", "tried.yaml"),
        ("tried.yaml limit=20", "tried.yaml run=a-limit20 limit=20"),
        ("run=begun", "begun/config.yaml run=begun"),
        ("run=begun model=m train=t", "begun/config.yaml run=begun model=m train=t"),
        ("run=new model=m train=t", "C/gpu.yaml run=new model=m train=t"),
    ],
)
def test_what_words_mean(words: str, meant: str) -> None:
    config, settings = training_words(re.split(" (?=[a-z.]+=)", words))
    found = " ".join((str(config), *settings))
    assert found.replace("finetune/configs/", "C/") == meant


THERE_ARE = "(there are bare, gpu, m2.5-0.5b, or give a file)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say model=NAME and train=FILE, or run=FOLDER of a training; with make in capitals"),
        (["model=m"], "say train=FILE, or run=FOLDER"),
        (["--from", "begun", "train=t"], "--from: is written from=begun here"),
        (["from=begun"], "say train=FILE, or run=FOLDER"),
        (["run=new", "train=t"], "say model=NAME, or run=FOLDER of a training: new has none"),
        (["gpv"], f"no config 'gpv'; did you mean 'gpu'? {THERE_ARE}"),
        (["m2.5-0.6b"], f"no config 'm2.5-0.6b'; did you mean 'm2.5-0.5b'? {THERE_ARE}"),
        (["--lora_rank", "16"], "--lora_rank: is written lora.r=16 here"),
        (["gpu", "--seed=1"], "--seed: is written seed=1 here"),
        (["run=~/x"], f"run=~/x: ~ is not expanded here; write run={Path.home()}/x"),
        (["modle=m", "train=t"], "modle=m: no setting 'modle'; did you mean 'model'?"),
        (["epochs=3"], "epochs=3: no setting 'epochs'; it is trainer.num_train_epochs here"),
        (["trainr.max_steps=1"], "trainr.max_steps=1: no setting 'trainr'; did you mean 'trainer'"),
        (["model=m", "own.yaml"], "'own.yaml': settings are written key=value; a config comes bef"),
    ],
)
def test_what_is_missing_is_named(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        training_words(words)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("section", ["{batchh: 3}", "{run: r, batchh: 3, train: nowhere}"])
def test_a_wrong_name_in_a_file_is_named_before_what_is_missing(
    section: str, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(f"sft: {section}", "utf-8")
    with pytest.raises(UserError, match=r"^own\.yaml: no setting 'batchh'; did you mean 'batch'"):
        sft_settings(*training_words(["own.yaml"]))


def test_a_config_is_found_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    config, settings = training_words(["demo"])
    assert config.is_file()
    assert settings == ["run=runs/demo"]


def test_the_settings_are_those_of_the_words(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": 0, "fact": "甲", "defendants": ["甲"]}\n', "utf-8")
    settings = sft_settings(*training_words(["model=q/m", "train=t.jsonl"]))
    assert (settings.batch, settings.run) == (7, Path("runs/gpu-m-t"))


@pytest.mark.parametrize("word", ["from=~/begun", "run=~/x", "dev=~/d"])
def test_a_home_that_no_shell_has_expanded_is_named(word: str) -> None:
    given = ["model=q/m", "train=t.jsonl", word]
    with pytest.raises(UserError, match=f"^{word}: ~ is not expanded here; write ..*=/"):
        sft_settings(*training_words(given))


def test_words_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": 0, "fact": "甲", "defendants": ["甲"]}\n', "utf-8")
    looked_at = []
    for name in ("refuse_home", "refuse_options"):
        refuse = getattr(config_module, name)

        def counted(*given: Any, refuse: Any = refuse) -> None:
            looked_at.append(given[0])
            refuse(*given)

        for module in (config_module, words_module):
            monkeypatch.setattr(module, name, counted)
    words = ["model=q/m", "train=t.jsonl", "run=new"]
    sft_settings(*training_words(words))
    assert looked_at.count(words) == 1
    assert looked_at.count("run") == 1


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ([], "qwen2.5-0.5b-cpu"),
        ([24_564], "qwen3-8b-qlora"),
        ([24_564, 40_536], "qwen3-8b-lora"),
    ],
)
def test_the_largest_gpu_chooses_the_config(
    sizes: list[int], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [SimpleNamespace(total_memory=size * 2**20) for size in sizes]
    monkeypatch.setattr("torch.version.cuda", None)  # else these would be asked for more
    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(gpus))
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus))
    monkeypatch.setattr("torch.cuda.get_device_properties", gpus.__getitem__)
    assert config_for_gpu() == config
