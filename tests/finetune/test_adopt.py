"""`panjue adopt`: what another trainer wrote becomes a run, or a line says why not."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from panjue.finetune.foreign import read_foreign, step_of_foreign
from panjue.finetune.settings import sft_settings
from panjue.finetune.sft import train
from panjue.finetune.trained import Trained, open_trained, read_trained
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.cli_choose import adapters_of
from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.config import load_values
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, sha256
from panjue.prompts.plumbing.records import DATA, TrainingSummary
from panjue.prompts.plumbing.run import ADAPTER_CONFIG, ADAPTER_WEIGHTS, kept_adapters
from panjue.serve.merge import KNOWN_TEXT, load_dequantized, logits, merge, served_model
from tests.families import make_family
from tests.foreign import adopted, as_of_unsloth, change, contents, load, write_foreign

Panjue = Callable[..., CompletedProcess[str]]
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="session")
def adopted_run(workshop: Path, trained: Path, foreign: Path) -> Path:
    """Return a run with the adapter of plain peft, which nobody may change."""
    run = workshop / "adopted"
    if not (run / "adapter/manifest.json").exists():
        adopted(run, workshop, folders=[foreign])
    return run


@pytest.fixture
def folder(foreign: Path, tmp_path: Path) -> Path:
    """Return a copy of the adapter of plain peft."""
    return shutil.copytree(foreign, tmp_path / "foreign")


def test_a_run_of_another_trainer_has_what_a_training_of_ours_leaves(
    adopted_run: Path, trained: Path, foreign: Path
) -> None:
    of_peft = open_trained(adopted_run)
    ours = open_trained(trained)
    assert (of_peft.run, of_peft.folder) == (adopted_run, adopted_run / "adapter")
    assert of_peft.record.part(DATA) == ours.record.part(DATA)
    assert of_peft.record.adopted == (str(foreign),)
    assert of_peft.record.base_files == ours.record.base_files
    assert of_peft.record.lora.items() >= {"r": 8, "lora_alpha": 16}.items()
    assert not of_peft.record.opinions
    assert of_peft.labels == ours.labels
    for name in ("labels.json", "classifier.npz"):
        assert (of_peft.folder / name).read_bytes() == (ours.folder / name).read_bytes()
    assert sha256(of_peft.folder / ADAPTER_WEIGHTS) == sha256(foreign / ADAPTER_WEIGHTS)
    names = {path.name for path in of_peft.folder.iterdir()}
    assert names <= {path.name for path in ours.folder.iterdir()}
    assert "training_args.bin" not in names
    sections = load_values(adopted_run / "config.yaml")
    assert sections["sft"]["opinions"] is False
    assert "engine" in sections["generate"]
    summary = TrainingSummary.read(adopted_run)
    assert summary
    assert (summary.config, summary.steps, summary.kept_step) == ("", None, None)


def test_its_merge_answers_as_peft_itself_does(
    adopted_run: Path, foreign: Path, workshop: Path
) -> None:
    base = workshop / "base/model"
    ids = torch.tensor([load_tokenizer(base).encode(KNOWN_TEXT)])
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logits(plain, ids)
    expected = logits(PeftModel.from_pretrained(plain, str(foreign)), ids)
    assert float((expected - before).abs().max()) > 0.1, "the steps changed something"
    found = logits(load_dequantized(merge(open_trained(adopted_run))), ids)
    assert torch.allclose(found, expected, atol=1e-3)


def test_what_cannot_be_known_is_said(adopted_run: Path, folder: Path, workshop: Path) -> None:
    said = adopted(folder.parent / "run", workshop, folders=[folder])
    lines = said.splitlines()
    base = workshop / "base/model"
    assert lines[0] == f"adapter      LoRA of rank 8 on 4 linear layers of {base}"
    assert [line.startswith("not known    ") for line in lines[1:3]] == [True, True]
    assert "examples     " in lines[3]
    card = (adopted_run / "adapter/README.md").read_text("utf-8")
    assert "trained by another program, and adopted by panjue for its task `judgment`" in card
    assert "Which prompts and cases the adapter was trained on is not known." in card
    assert "Trained on" not in card.replace("Trained on invented cases", "")
    assert "seed" not in card


def test_the_folder_of_the_other_trainer_is_never_changed(
    adopted_run: Path, foreign: Path, workshop: Path, tmp_path: Path, panjue: Panjue
) -> None:
    folder = shutil.copytree(foreign, tmp_path / "saves")
    before = contents(folder)
    adopted(tmp_path / "run", workshop, folders=[folder])
    merge(open_trained(tmp_path / "run"))
    for words in commands_on(folder, workshop):
        panjue(*words)
    assert contents(folder) == before


def commands_on(run: Path, workshop: Path) -> list[tuple[object, ...]]:
    """Return every command that takes a run folder."""
    test = workshop / "demo/test.jsonl"
    cases = workshop / "demo/train.jsonl"
    return [
        ("generate", run, test),
        ("generate", run, test, "endpoint=http://127.0.0.1:9/v1#m", "task=dialogue"),
        ("choose", run),
        ("merge", run),
        ("serve", run),
        ("bundle", run, run.with_name("out.zip")),
        ("bundle", run),
        ("report", run),
        ("runs", run),
        ("decode", run),
        ("score", test, run),
        ("check", run, "--cases", test),
        ("compare", run, run),
        ("fairness", test, run, "--by", "defendants"),
        ("vote", test, run.with_name("vote"), run, run),
        ("sft", f"model={run}", f"train={cases}", f"run={run.with_name('other')}"),
        ("sft", f"model={workshop / 'base/model'}", f"train={cases}", f"run={run}"),
    ]


@pytest.mark.parametrize("number", range(17))
def test_every_command_names_adopt(
    number: int, folder: Path, workshop: Path, panjue: Panjue
) -> None:
    before = contents(folder)
    done = panjue(*commands_on(folder, workshop)[number])
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert f"`panjue adopt {folder} run=RUN train=FILE` makes a run of it" in line
    assert contents(folder) == before


def test_python_and_other_runs_name_adopt(
    folder: Path, trained: Path, workshop: Path, tmp_path: Path, panjue: Panjue
) -> None:
    from panjue.serve.judge import load as load_judge  # imports vLLM

    told = f"`panjue adopt {folder} run=RUN train=FILE`"
    with pytest.raises(UserError, match=r"panjue did not train") as error, load_judge(folder):
        pass
    assert told in str(error.value)
    assert told in panjue("serve", trained, f"other={folder}").stderr
    mine = shutil.copytree(trained, tmp_path / "mine")
    test = workshop / "demo/test.jsonl"
    words = (
        "answer=model",
        "adapter=lora",
        f"base={folder}",
    )  # a merge that is there needs no base
    done = panjue("generate", mine, test, *words)
    assert (done.returncode, told in done.stderr) == (2, True)
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):  # as trainers leave it that only checkpoint
        (folder / name).unlink()
    assert f"panjue adopt {folder}/checkpoint-4 run=RUN" in panjue("merge", folder).stderr


def test_runs_lists_the_folders_of_other_trainers(
    folder: Path, adopted_run: Path, tmp_path: Path, panjue: Panjue
) -> None:
    shutil.copytree(adopted_run, tmp_path / "mine")
    done = panjue("runs", tmp_path)
    assert done.returncode == 0
    _, mine, problem = done.stdout.splitlines()
    assert mine.split()[:4] == ["mine", "base", "lora", "(adopted)"]
    assert problem.startswith("foreign: has an adapter that panjue did not train; `panjue adopt ")


def test_what_panjue_trained_is_not_of_another_trainer(
    trained: Path, workshop: Path, tmp_path: Path, panjue: Panjue
) -> None:
    for place in (trained / "adapter", trained / "checkpoints/checkpoint-6", trained):
        with pytest.raises(UserError, match=r"is panjue's own already; ask it: panjue gen"):
            adopted(tmp_path / "run", workshop, folders=[place])
    done = panjue("merge", trained / "checkpoints/checkpoint-6")
    assert "nothing trained is there; run `panjue sft` first" in done.stderr


def test_the_same_command_again_is_done_and_another_one_is_refused(
    folder: Path, workshop: Path, trained: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    adopted(run, workshop, folders=[folder])
    before = contents(run)
    assert adopted(run, workshop, folders=[folder]) == (
        f"{run}/adapter: already adopted, with these cases\n"
    )
    moved = folder.rename(tmp_path / "moved")
    assert "already adopted" in adopted(run, workshop, folders=[moved])
    others = [
        ([moved / "checkpoint-2"], ()),
        ([moved], ("max_tokens=512",)),
        ([moved], ("limit=9",)),
    ]
    for folders, words in others:
        with pytest.raises(UserError, match=r"run: holds another run \("):
            adopted(run, workshop, *words, folders=folders)
    with pytest.raises(UserError, match=r"holds another run \("):
        train(sft_settings(workshop / "sft.yaml", [f"run={run}"]))
    with pytest.raises(UserError, match=r"holds another run \("):
        adopted(shutil.copytree(trained, tmp_path / "ours"), workshop, folders=[moved])
    assert contents(run) == before


def test_a_killed_adoption_is_made_anew(
    folder: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("panjue.finetune.training_run.write_card", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            adopted(run, workshop, folders=[folder])
    assert not (run / "adapter").exists()
    assert "written:" in adopted(run, workshop, folders=[folder])
    assert open_trained(run).folder == run / "adapter"


def test_several_checkpoints_are_a_result_and_kept_ones(
    folder: Path, workshop: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    adopted(run, workshop, folders=[folder / "checkpoint-2", folder / "checkpoint-4"])
    assert [*kept_adapters(run)] == [2]
    for place, step in (("adapter", 4), ("kept/step-2", 2)):
        weights = folder / f"checkpoint-{step}" / ADAPTER_WEIGHTS
        assert sha256(run / place / ADAPTER_WEIGHTS) == sha256(weights)
    assert read_trained(run / "kept/step-2").record == open_trained(run).record
    found = [(of.step, of.loss, of.trained.folder.name) for of in adapters_of(run)]
    assert found == [(4, None, "adapter"), (2, None, "step-2")]
    for of in adapters_of(run):
        assert of.trained.labels == open_trained(run).labels
    with pytest.raises(UserError, match=r"so there is none to choose; adopt several"):
        adapters_of(adopted_alone(folder, workshop, tmp_path))


def test_the_base_is_looked_for_and_read_once(
    folder: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Counter[str]()
    for name in ("foreign.config_folder", "adopt.text_config", "adopt.is_part"):
        place = f"panjue.finetune.{name}"
        read = resolve_name(place)

        def counted(*given: Any, name: str = name, read: Callable[..., Any] = read) -> Any:
            calls[name] += 1
            return read(*given)

        monkeypatch.setattr(place, counted)
    folders = [folder / "checkpoint-2", folder / "checkpoint-4"]
    adopted(tmp_path / "run", workshop, folders=folders)
    assert set(calls.values()) == {1}, calls


def adopted_alone(folder: Path, workshop: Path, tmp_path: Path) -> Path:
    adopted(tmp_path / "alone", workshop, folders=[folder])
    return tmp_path / "alone"


def test_the_step_is_that_of_the_folder_or_of_its_state(folder: Path, tmp_path: Path) -> None:
    assert step_of_foreign(folder) is None
    assert step_of_foreign(folder / "checkpoint-4") == 4
    for name in ("best", "2026"):
        moved = (folder / "checkpoint-2").rename(tmp_path / name)
        assert step_of_foreign(moved) == 2
        moved.rename(folder / "checkpoint-2")


def test_folders_that_are_not_steps_of_one_training_are_refused(
    folder: Path, workshop: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"foreign: nobody knows of which step it is; name the"):
        adopted(tmp_path / "run", workshop, folders=[folder / "checkpoint-2", folder])
    copy = shutil.copytree(folder / "checkpoint-2", tmp_path / "again")
    with pytest.raises(UserError, match=r"again: .*checkpoint-2 is of step 2 too; give one"):
        adopted(tmp_path / "run", workshop, folders=[folder / "checkpoint-2", copy])


def test_a_folder_with_checkpoints_alone_lists_them(
    folder: Path, workshop: Path, tmp_path: Path
) -> None:
    (folder / ADAPTER_WEIGHTS).unlink()
    listed = f"{folder}/checkpoint-2 {folder}/checkpoint-4"
    with pytest.raises(
        UserError, match=rf"has no adapter itself; give one or several of {listed}$"
    ):
        adopted(tmp_path / "run", workshop, folders=[folder])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type IA3; panjue takes LoRA adapters"),
    ({"task_type": "SEQ_CLS"}, "task_type SEQ_CLS; train one of a language model"),
    ({"r": None}, "has no rank r; restore the file"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4 changed the base"),
    ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens=\[1\] is not known to be right"),
    ({"layer_replication": [[0, 2]]}, "layer_replication=.* is not known to be right"),
    ({"use_qalora": True}, "use_qalora=true is not known to be right"),
    ({"of_a_later_version": 3}, "of_a_later_version=3 is not known to be right"),
    ({"base_model_name_or_path": None}, "names no base; say base=FOLDER"),
    (
        {"base_model_name_or_path": "unsloth/Qwen3-8B-unsloth-bnb-4bit"},
        "names the base unsloth/Qwen3-8B-unsloth-bnb-4bit, .* say base=unsloth/Qwen3-8B, or base=F",
    ),
    (
        {"base_model_name_or_path": "Qwen/Qwen3-8B", "revision": "v2"},
        "names revision v2 of the base Qwen/Qwen3-8B; download that one, and say base=FOLDER",
    ),
    (
        {"base_model_name_or_path": "/mnt/gone/Qwen3-8B"},
        "'/mnt/gone/Qwen3-8B': there is no such folder.*foreign; say base=FOLDER",
    ),
    ({"r": 4}, rf"{PREFIX}.lora_A.weight is \[8, 64\], where .* needs \[4, 64\]"),
    (
        {"target_modules": ["q_proj"]},
        "has .*v_proj.lora_A.weight, for which .* has no place",
    ),
    ({"target_modules": ["q_proj", "k_proj", "v_proj"]}, "has no .*k_proj.*restore its files"),
    ({"target_modules": ["query_key_value"]}, "query_key_value.* not found in the base model"),
]


@pytest.mark.parametrize(("settings", "complaint"), REFUSED)
def test_what_cannot_be_adopted_is_one_line_before_anything_is_fitted(
    settings: dict[str, Any], complaint: str, folder: Path, workshop: Path, tmp_path: Path
) -> None:
    change(folder, **settings)
    with pytest.raises(UserError, match=complaint) as error:
        adopted(tmp_path / "run", workshop, folders=[folder])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run/manifest.json").exists()
    assert not (tmp_path / "run/adapter").exists()


def test_files_that_cannot_be_adopted_are_one_line(
    folder: Path, workshop: Path, tmp_path: Path
) -> None:
    def told(*words: object) -> str:
        with pytest.raises(UserError) as error:
            adopted(tmp_path / "run", workshop, *words, folders=[folder])
        return str(error.value)

    whole = (folder / ADAPTER_WEIGHTS).read_bytes()
    (folder / ADAPTER_WEIGHTS).write_bytes(whole[:-8])
    assert "is no whole file of weights: " in told()
    (folder / ADAPTER_WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"a pickle")
    assert "adapter_model.bin alone, a pickle, which panjue never opens; where it was" in told()
    (folder / "adapter_model.bin").unlink()
    for place in folder.glob("checkpoint-*"):
        shutil.rmtree(place)
    assert f"{folder}: has no adapter_config.json with adapter_model.safetensors; give" in told()
    shutil.rmtree(folder)
    assert told() == f"{folder}: there is no such folder"
    with pytest.raises(UserError, match="hub: hf download me/mine --local-dir FOLDER first"):
        read_foreign(Path("me/mine"))
    folder.write_bytes(whole)
    assert told() == f"{folder}: is a file; give its folder, {folder.parent}"
    folder.unlink()
    shutil.copytree(workshop / "base/model", folder)
    (folder / "manifest.json").unlink()
    assert f"{folder}: is a whole model, and no LoRA adapter; give the adapter" in told()


def test_another_base_is_refused_by_its_shapes(
    folder: Path, workshop: Path, tmp_path: Path
) -> None:
    for family, complaint in (
        ("qwen2.5", r"needs \[32, 8\]|needs \[64, 8\]"),
        ("opt", "has no place"),
    ):
        base = make_family(family, workshop / "base/model", tmp_path / family)
        with pytest.raises(UserError, match=complaint) as error:
            adopted(tmp_path / "run", workshop, f"base={base}", folders=[folder])
        assert "; it was trained on another base; say base=FOLDER with that one" in str(error.value)


def test_words_that_are_no_settings_are_named(foreign: Path, panjue: Panjue) -> None:
    needed = "panjue: adopt: give FOLDER, run=RUN and train=FILE, e.g. panjue adopt FOLDER run="
    for words in ((), (foreign,), (foreign, "run=r"), ("run=r", "train=t")):
        assert panjue("adopt", *words).stderr.startswith(needed)
    told = panjue("adopt", foreign, "run=r", "train=t", "lora.r=3").stderr
    assert "`panjue adopt` has no setting 'lora' (there are run, task, " in told
    told = panjue("adopt", foreign, "run=r", "train=t", "max_token=3").stderr
    assert "has no setting 'max_token'; did you mean 'max_tokens'?" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--run r train=t", "--run: is written run=r here"),
        ("run=r --train=t", "--train: is written train=t here"),
        ("run=r train=t --cutoff_len 9", "--cutoff_len: is written max_tokens=9 here"),
        ("run=r train=t --lora_rank 9", "no option --lora_rank; settings are written key=value"),
        ("run=r train=t --settings", "no option --settings; settings are written key=value"),
    ],
)
def test_an_option_is_said_in_our_words(
    words: str, said: str, foreign: Path, panjue: Panjue
) -> None:
    done = panjue("adopt", foreign, *words.split())
    assert (done.returncode, done.stderr) == (2, f"panjue: {said}\n")


def test_a_run_folder_around_or_in_the_adapter_is_refused(foreign: Path, workshop: Path) -> None:
    for run in (foreign, foreign / "run", foreign / "..", workshop / "base/model/run"):
        with pytest.raises(UserError, match=r"lie in each other; choose another run=FOLDER"):
            adopted(run, workshop, folders=[foreign])


def test_the_form_of_unsloth_is_adopted_with_the_base_that_is_named(
    folder: Path, workshop: Path, adopted_run: Path, tmp_path: Path
) -> None:
    as_of_unsloth(folder)
    with pytest.raises(UserError, match=r"a copy in four bits; say base=unsloth/Qwen3-8B, or"):
        adopted(tmp_path / "run", workshop, folders=[folder])
    base = workshop / "base/model"
    adopted(tmp_path / "run", workshop, f"base={base}", folders=[folder])
    config = read_json(tmp_path / "run/adapter/adapter_config.json")
    assert (config["base_model_name_or_path"], config["revision"]) == (str(base), None)
    assert logits_of(open_trained(tmp_path / "run"), base).equal(
        logits_of(open_trained(adopted_run), base)
    )


def logits_of(trained: Trained, base: Path) -> torch.Tensor:
    ids = torch.tensor([load_tokenizer(base).encode(KNOWN_TEXT)])
    return logits(load_dequantized(merge(trained)), ids)


VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 3}},
    "dora": {"use_dora": True},
    "modules to save": {"modules_to_save": ["norm"]},
    "bias": {"target_modules": "all-linear", "r": 600},
    "tokens": {"trainable_token_indices": [5, 6]},
    "layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "pattern": {"target_modules": r".*\.1\..*\.(q|o)_proj"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_lora_answer_as_in_peft(
    name: str, workshop: Path, trained: Path, tmp_path: Path
) -> None:
    base = workshop / "base/model"
    cases = workshop / "demo/train.jsonl"
    folder = write_foreign(tmp_path / "foreign", base, cases, (2,), **VARIANTS[name])
    run = tmp_path / "run"
    adopted(run, workshop, folders=[folder])
    ids = torch.tensor([load_tokenizer(base).encode(KNOWN_TEXT)])
    expected = logits(PeftModel.from_pretrained(load(base), str(folder)), ids)
    assert torch.allclose(logits_of(open_trained(run), base), expected, atol=2e-3)
    only_merged = name in {"dora", "modules to save", "bias", "tokens"}
    if not only_merged:
        assert served_model(open_trained(run), "lora").adapter == run / "adapter"
        return
    with pytest.raises(UserError, match=r", which vLLM needs merged; use adapter=merge"):
        served_model(open_trained(run), "lora")


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed", "ignore:Adapter 'default'")
def test_biases_that_no_layer_can_take_are_refused(workshop: Path, tmp_path: Path) -> None:
    cases = workshop / "demo/train.jsonl"
    base = workshop / "base/model"
    folder = write_foreign(tmp_path / "foreign", base, cases, (1,), lora_bias=True)
    with pytest.raises(UserError, match=r"lora_bias, where model.layers.0.self_attn.q_proj has"):
        adopted(tmp_path / "run", workshop, folders=[folder])


def test_an_adapter_of_a_model_that_sees_becomes_one_of_its_text_model(
    workshop: Path, trained: Path, tmp_path: Path
) -> None:
    base = make_family("gemma3", workshop / "base/model", tmp_path / "base")
    cases = workshop / "demo/train.jsonl"
    modules = r".*language_model.*\.(q_proj|down_proj)"
    folder = write_foreign(tmp_path / "foreign", base, cases, (2,), target_modules=modules)
    names = load_file(folder / ADAPTER_WEIGHTS)
    assert all(".language_model." in name for name in names)
    run = tmp_path / "run"
    adopted(run, workshop, folders=[folder])
    ids = torch.tensor([load_tokenizer(base).encode(KNOWN_TEXT)])
    expected = logits(PeftModel.from_pretrained(load(base), str(folder)), ids)
    assert torch.allclose(logits_of(open_trained(run), base), expected, atol=2e-3)
    weights = load_file(folder / ADAPTER_WEIGHTS)
    seeing = {}
    for name, weight in weights.items():
        seeing[name.replace("language_model", "vision_tower")] = weight.clone()
    save_file({**weights, **seeing}, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match=r"has .*vision_tower.*, for which .* has no place"):
        adopted(tmp_path / "other", workshop, folders=[folder])


def test_another_chat_template_is_named(folder: Path, workshop: Path, tmp_path: Path) -> None:
    place = folder / "chat_template.jinja"
    place.write_text("{# another form of the same #}" + place.read_text("utf-8"), "utf-8")
    assert "template  " not in adopted(tmp_path / "same", workshop, folders=[folder])
    place.write_text("{{ messages[0].content }}", "utf-8")
    said = adopted(tmp_path / "run", workshop, folders=[folder])
    assert "template     that of the base is used, and the adapter has another" in said
    base = shutil.copytree(workshop / "base/model", tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"has no chat template; give base=FOLDER, a copy of"):
        adopted(tmp_path / "other", workshop, f"base={base}", folders=[folder])


def test_a_training_starts_from_an_adopted_adapter(
    adopted_run: Path, foreign: Path, workshop: Path, tmp_path: Path, panjue: Panjue
) -> None:
    """With the config for this machine: that of the run says nothing of steps."""
    run = tmp_path / "next"
    words = [f"from={adopted_run}", f"train={workshop}/demo/train.jsonl", f"run={run}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplyTrainer, "train_or_resume", lambda *_: None)
        done = panjue("sft", *words, "max_tokens=1024", "trainer.eval_strategy=no")
    assert done.returncode == 0, done.stderr
    assert f"from         {adopted_run}: its adapter\n" in done.stdout
    assert f"held out     may have cases that {adopted_run} was trained on: nobody" in done.stdout
    before, now = load_file(foreign / ADAPTER_WEIGHTS), load_file(run / "adapter" / ADAPTER_WEIGHTS)
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], before[name]) for name in before)
    opened = open_trained(run)
    assert not opened.record.opinions
    assert opened.record.trainer["learning_rate"] > 0
    assert [bool(one.adopted) for one in opened.record.history] == [False, True]
    done = panjue("sft", *words[:2], f"run={tmp_path}/other", "lora.r=4")
    assert "lora.r: is 4, and " in done.stderr
    done = panjue("sft", f"from={foreign}", words[1])
    assert done.returncode == 2
    assert done.stderr.startswith(f"panjue: from: {foreign}: ")
    assert "`panjue adopt " in done.stderr
