"""A training that starts from a trained adapter: its weights, labels, settings and records."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from panjue.eval.score import in_sample
from panjue.finetune.library_settings import trainer_config
from panjue.finetune.model import load_base, load_model, with_lora
from panjue.finetune.settings import sft_settings
from panjue.finetune.trained import Trained, open_trained
from panjue.finetune.trainer import ReplyTrainer
from panjue.finetune.training_run import TrainingRun
from panjue.prompts.labels import Labels, load_labels, merged_labels
from panjue.prompts.plumbing.config import load_values
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, write_json
from panjue.prompts.plumbing.records import RunRecord
from panjue.prompts.reader import Reader, is_held_out
from panjue.prompts.task import load_task
from panjue.serve.settings import check_trained

from .conftest import UNEVALUATED, adapter_bytes, logged, main

TASK = load_task("judgment")
NEW_CHARGE = "虚构罪"
FOUR_BITS = "{load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_compute_dtype: float32}"
OFTEN = ("trainer.max_steps=2", "trainer.eval_steps=1", "trainer.save_steps=1")


@pytest.fixture(scope="module")
def cases(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of other cases, with a charge that the first training does not know."""
    rows = []
    for line in (workshop / "demo/test.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        row["outcomes"][0] |= {"charges": [NEW_CHARGE], "articles": ["275"]}
        rows.append(row)
    path = tmp_path_factory.mktemp("cases") / "second.jsonl"
    path.write_text("\n".join(map(dump, rows)), "utf-8")
    return path


def words(trained: Path, cases: Path, run: Path) -> list[str]:
    return [f"from={trained}", f"train={cases}", f"run={run}"]


@pytest.fixture(scope="module")
def second(
    trained: Path, cases: Path, workshop: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the run folder of a second training, of two steps, which nobody may change."""
    run = tmp_path_factory.mktemp("second") / "run"
    main(workshop / "sft.yaml", [*words(trained, cases, run), *OFTEN])
    return run


def same_file(one: Path, other: Path) -> bool:
    """Say whether two files of weights have the same tensors, bit for bit and of the same types."""
    tensors, others = load_file(one), load_file(other)
    assert tensors.keys() == others.keys()
    kinds = [(tensors[name].dtype, others[name].dtype) for name in tensors]
    assert {one for one, _ in kinds} == {other for _, other in kinds} == {torch.float32}
    return all(torch.equal(tensors[name], others[name]) for name in tensors)


@pytest.mark.parametrize(
    "setting",
    [
        (),
        ("dtype=bfloat16",),
        ("trainer.bf16=true",),
        ("method=qlora", f"quantization={FOUR_BITS}"),
        ("method=qlora", f"quantization={FOUR_BITS}", "dtype=bfloat16"),
        ("lora.lora_dropout=0.3",),
    ],
    ids=["as it was", "bfloat16", "mixed", "qlora", "qlora-bfloat16", "dropout"],
)
def test_without_a_step_what_is_saved_is_the_adapter_bit_for_bit(
    setting: tuple[str, ...],
    trained: Path,
    cases: Path,
    workshop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything is done but the steps; trl would round a trained adapter on four bits."""
    monkeypatch.setattr(ReplyTrainer, "train_or_resume", lambda *_: None)
    run = tmp_path / "run"
    main(workshop / "sft.yaml", [*words(trained, cases, run), *setting, *UNEVALUATED])
    weights = "adapter/adapter_model.safetensors"
    assert same_file(run / weights, trained / weights)
    config, before = (read_json(one / "adapter/adapter_config.json") for one in (run, trained))
    for one in (config, before):
        one["target_modules"] = sorted(one["target_modules"])
    dropout = {"lora_dropout": 0.3} if "lora.lora_dropout=0.3" in setting else {}
    assert config == before | dropout


def test_variants_of_lora_are_trained_on(
    workshop: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = ("use_dora=true", "use_rslora=true", "rank_pattern.q_proj=4", "lora_alpha=9")
    given = [f"run={tmp_path}/first", *UNEVALUATED, *(f"lora.{one}" for one in variants)]
    main(workshop / "sft.yaml", given)
    monkeypatch.setattr(ReplyTrainer, "train_or_resume", lambda *_: None)
    config = tmp_path / "first/config.yaml"
    main(config, [*words(tmp_path / "first", cases, tmp_path / "run"), *UNEVALUATED])
    weights = "adapter/adapter_model.safetensors"
    assert any("magnitude" in name for name in load_file(tmp_path / "run" / weights))
    assert same_file(tmp_path / "run" / weights, tmp_path / "first" / weights)


def test_before_the_first_step_the_model_answers_as_peft_loads_it(
    trained: Path, cases: Path, workshop: Path, tmp_path: Path
) -> None:
    exact = ["dtype=float32"]
    given = [*words(trained, cases, tmp_path / "run"), *exact]
    config = sft_settings(workshop / "sft.yaml", given)
    base = workshop / "base/model"
    model = load_model(config, base, trainer_config(config))
    fresh = load_model(sft_settings(workshop / "sft.yaml", exact), base, trainer_config(config))
    loaded = PeftModel.from_pretrained(load_base(base, torch.float32), str(trained / "adapter"))
    ids = torch.arange(1, 60)[None]
    with torch.no_grad():
        ours, pefts, new = (one.eval()(ids).logits for one in (model, loaded, fresh))
    assert torch.equal(ours, pefts)
    assert not torch.allclose(ours, new), "the adapter was trained"
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trainable == {n for n, weight in fresh.named_parameters() if weight.requires_grad}


def test_the_chosen_adapter_is_the_start_and_a_folder_alone_is_one(
    trained: Path, cases: Path, workshop: Path, tmp_path: Path
) -> None:
    alone = shutil.copytree(trained / "adapter", tmp_path / "alone")
    config = sft_settings(workshop / "sft.yaml", words(alone, cases, tmp_path / "run"))
    assert config.start
    assert config.start.sha256 == open_trained(trained).sha256
    run = shutil.copytree(trained, tmp_path / "chosen")
    kept = shutil.copytree(run / "adapter", run / "kept/step-6")
    start = open_trained(trained)
    best = {"candidate": "kept/step-6", "metric": "final", "less_first": {}}
    candidate = {"metrics": {"final": 0.5}, "sha256": start.sha256, "step": 6}
    choice = {"candidates": {"kept/step-6": candidate}, "best": {"answer": best}}
    write_json(run / "chosen.json", {**choice, "cases": 9, "counted": 9})
    config = sft_settings(workshop / "sft.yaml", words(run, cases, tmp_path / "run"))
    assert config.start
    assert config.start.folder == kept
    write_json(kept / "labels.json", read_json(kept / "labels.json"))
    (kept / "adapter_config.json").write_text("{}", "utf-8")
    with pytest.raises(UserError, match=r"^from: .*step-6: is not the adapter that was chosen; "):
        sft_settings(workshop / "sft.yaml", words(run, cases, tmp_path / "run"))


def labels_of(path: Path) -> Labels:
    return TASK.ask.labels(Reader(TASK).read(path))


def test_the_labels_are_those_of_both_and_the_classifier_has_them_all(
    trained: Path, cases: Path, second: Path
) -> None:
    before = load_labels(trained / "adapter/labels.json")
    both = load_labels(second / "adapter/labels.json")
    assert NEW_CHARGE not in before.counts["charges"]
    assert both.counts["charges"].keys() == {*before.counts["charges"], NEW_CHARGE}
    only_before = {*before.counts["charges"]} - {*labels_of(cases).counts["charges"]}
    assert only_before
    opened = open_trained(second)
    check_trained(opened)
    example = next(Reader(TASK).read(cases))
    schema = dump(TASK.ask.schema(example, both))
    advisor = opened.advisor(TASK)
    assert advisor
    [probabilities, *_] = advisor.classifier.probabilities(example)
    for label in only_before:
        assert label in schema
        assert 0 < probabilities["charges"][label] < 0.5, "no new case has it"
        reply = example.answer or {}
        reply = {"judgments": [{**one, "charges": [label]} for one in reply["judgments"]]}
        decoded = TASK.ask.decode(dump(reply), example, both)
        assert decoded.repairs == ()


def test_the_plan_names_adapter_and_labels(
    trained: Path, cases: Path, workshop: Path, tmp_path: Path, capsys: Any
) -> None:
    given = words(trained, cases, tmp_path / "run")
    main(workshop / "sft.yaml", [*given, "dry_run=true"])
    said = capsys.readouterr().out.splitlines()
    step = read_json(trained / "training.json")["kept_step"]
    assert f"from         {trained}: adapter of step {step}" in said
    before = load_labels(trained / "adapter/labels.json")
    [line] = [line for line in said if line.startswith("labels       ") and " new" in line]
    known = sum(map(len, before.counts.values()))
    assert line.startswith(f"labels       {known} of {trained}, ")
    both = merged_labels([before, labels_of(cases)])
    new = sum(map(len, both.counts.values())) - known
    assert line.endswith(f" of them in no new case; {new} new")


def test_the_records_say_from_what(
    trained: Path, second: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    record = open_trained(second).record
    start = open_trained(trained)
    assert (record.from_run, record.from_run_sha256) == (str(trained), start.sha256)
    assert record.from_labels_sha256 == start.labels_sha256
    assert [one.train for one in record.history] == [record.train, start.record.train]
    assert RunRecord.read(second).from_record == start.record
    config = load_values(second / "config.yaml")
    assert config["sft"]["from"] == str(trained)
    assert "from_run" not in config["sft"]
    card = (second / "adapter/README.md").read_text("utf-8")
    assert f"| from | `{trained.name}` | {start.sha256} |" in card
    assert str(trained) not in card
    assert f"run (from {trained.name})" in panjue("runs", second).stdout


def test_a_killed_training_resumes_from_its_checkpoint(
    trained: Path,
    cases: Path,
    second: Path,
    workshop: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = shutil.copytree(trained, tmp_path / "start")
    run = shutil.copytree(second, tmp_path / "run")
    shutil.rmtree(run / "adapter")
    (run / "checkpoints/checkpoint-2/complete").unlink()
    given = [*words(start, cases, run), *OFTEN]
    main(workshop / "sft.yaml", given)
    assert f"resuming from {run}/checkpoints/checkpoint-1" in capsys.readouterr().out
    assert adapter_bytes(run) == adapter_bytes(second)
    curves = [[row["loss"] for row in logged(one, "loss")] for one in (run, second)]
    assert curves[0] == curves[1]
    main(run / "config.yaml", [])
    assert "already trained with these settings" in capsys.readouterr().out

    # Another adapter is another start, whether training is finished or not.
    weights = load_file(start / "adapter/adapter_model.safetensors")
    first = next(iter(weights))
    weights[first] = weights[first] + 1
    save_file(weights, start / "adapter/adapter_model.safetensors")
    for _ in ("finished", "killed"):
        with pytest.raises(UserError, match=rf"holds another run \(from: {start} was changed\)"):
            main(workshop / "sft.yaml", given)
        shutil.rmtree(run / "adapter", ignore_errors=True)
    other = [*words(trained, cases, run), "from=null", *OFTEN]
    with pytest.raises(UserError, match=rf"\(from: {start} -> none\)"):
        main(workshop / "sft.yaml", other)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("from=nowhere", "^from: nowhere: there is no such folder; nothing trained is there"),
        ("from=[1]", r"from=\[1\]: Input is not a valid path"),
        ("from_run=a", "no setting 'from_run'"),
        ("task=reading", "^task: is reading, and {run} was trained with judgment; leave out task"),
        ("method=full lora={}", "^method: full trains no adapter, and {run} has one; leave out"),
        ("opinions=false", "^opinions: is false, and {run} was trained with true; leave out opin"),
        ("lora.r=4", "^lora.r: is 4, and {run} was trained with 8; leave out lora.r, or set lora"),
        ("lora.lora_alpha=9", "^lora.lora_alpha: is 9, and {run} was trained with 8; leave out"),
        (
            "lora.target_modules=[q_proj]",
            r'^lora.target_modules: is \["q_proj"\], and {run} was trained with all-linear; ',
        ),
        ("lora.use_dora=true", "^lora.use_dora: is true, and {run} was trained with false; "),
        ("lora.use_rslora=true", "^lora.use_rslora: is true, and {run} was trained with false"),
        ("lora.rank_pattern={q_proj: 4}", '^lora.rank_pattern: is {"q_proj":4}, and .* with {}; '),
        ("lora.init_lora_weights=gaussian", "^lora.init_lora_weights: is gaussian, and .* true; "),
        ("run={run}", "^from: {run} is where this run writes; choose another run=FOLDER"),
        ("run={run} from={run}/adapter", "^from: {run}/adapter is where this run writes; "),
        ("from={base}", "^from: {base}/model is a whole model; leave out `from`, set model={base}"),
    ],
)
def test_what_does_not_go_on_is_refused_in_one_line(
    words: str, told: str, trained: Path, cases: Path, workshop: Path, tmp_path: Path
) -> None:
    places = {"{run}": str(trained), "{base}": f"{workshop}/base"}
    for name, place in places.items():
        words, told = words.replace(name, place), told.replace(name, place)
    apart = words.split(" ") if "{" not in words or "method" in words else [words]
    given = [f"from={trained}", f"train={cases}", f"run={tmp_path}/run", *UNEVALUATED]
    with pytest.raises(UserError, match=told) as error:
        main(workshop / "sft.yaml", [*given, *apart])
    assert "\n" not in str(error.value)


def test_what_is_said_as_it_was_is_taken(
    trained: Path, cases: Path, workshop: Path, tmp_path: Path
) -> None:
    said = ["lora.r=8", "lora.target_modules=all-linear", "lora.use_dora=false", "opinions=true"]
    names = read_json(trained / "adapter/adapter_config.json")["target_modules"]
    of_names = f"lora.target_modules={dump(sorted(names))}"
    for same in (said, [*said, of_names]):
        given = [*words(trained, cases, tmp_path / "run"), *same, "dry_run=true"]
        main(workshop / "sft.yaml", given)


def test_another_base_is_refused_by_its_file(
    trained: Path, cases: Path, workshop: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(workshop / "base/model", tmp_path / "base")
    given = [*words(trained, cases, tmp_path / "run"), f"model={base}", "dry_run=true"]
    main(workshop / "sft.yaml", given)  # the same one elsewhere
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, base / "model.safetensors")
    with pytest.raises(UserError) as error:
        main(workshop / "sft.yaml", given)
    other = f"from: {trained} was trained on another base than {base} is now"
    assert str(error.value) == f"{other} (model.safetensors differs); set model= to that base"


def test_a_base_that_has_moved_is_asked_for(trained: Path, cases: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(trained / "adapter", tmp_path / "alone")
    record = read_json(alone / "manifest.json")
    write_json(alone / "manifest.json", {**record, "base": "./gone"})
    config = tmp_path / "own.yaml"
    config.write_text("sft: {}", "utf-8")
    with pytest.raises(UserError, match=r"gone.* \(the base of .*alone; if it has moved, say mod"):
        sft_settings(config, words(alone, cases, tmp_path / "run"))


def test_an_adapter_whose_weights_do_not_fit_is_named(
    trained: Path, cases: Path, workshop: Path, tmp_path: Path
) -> None:
    base = load_base(workshop / "base/model", torch.float32)
    alone = shutil.copytree(trained / "adapter", tmp_path / "alone")
    file = alone / "adapter_model.safetensors"
    whole = load_file(file)
    first, *others = whole

    def opened() -> Trained:
        start = sft_settings(workshop / "sft.yaml", words(alone, cases, tmp_path / "run")).start
        assert start
        return start

    broken: list[tuple[Callable[[], Any], str]] = [
        (lambda: save_file({name: whole[name] for name in others}, file), "has other weights"),
        (lambda: save_file({**whole, "x": torch.ones(1)}, file), "has other weights"),
        (lambda: save_file({**whole, first: torch.ones(2)}, file), "has other weights"),
        (lambda: file.write_bytes(b"{}"), "; restore it$"),
        (file.unlink, "is missing; restore it$"),
    ]
    for spoil, told in broken:
        spoil()
        with pytest.raises(UserError, match=told) as error:
            with_lora(base, {}, opened())
        assert "\n" not in str(error.value)
        base = load_base(workshop / "base/model", torch.float32)
    save_file(whole, file)
    start = opened()
    save_file({name: tensor + 1 for name, tensor in whole.items()}, file)
    with pytest.raises(UserError, match="was changed while this training began; run the comm"):
        with_lora(base, {}, start)


def test_settings_are_those_of_the_run_that_is_named_and_data_are_not(
    trained: Path, cases: Path, tmp_path: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    run = tmp_path / "run"
    done = panjue("sft", *words(trained, cases, run), "trainer.max_steps=1", "dry_run=true")
    assert done.returncode == 0, done.stderr
    config = trained / "config.yaml"
    step = read_json(trained / "training.json")["kept_step"]
    line = (
        f"from         {trained}: adapter of step {step}; settings as in {config}, but for its data"
    )
    assert line in done.stdout.splitlines()
    assert "steps        1, each of 8 examples" in done.stdout
    done = panjue("sft", f"from={trained}", f"run={run}")
    assert (done.returncode, "say train=FILE" in done.stderr) == (2, True)


def test_held_out_cases_that_were_trained_on_before_are_counted(
    trained: Path, workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (workshop / "demo/train.jsonl").read_text("utf-8").splitlines()
    examples = Reader(TASK).read(workshop / "demo/train.jsonl")
    known = [line for line, one in zip(lines, examples, strict=True) if not is_held_out(one)]
    new = (workshop / "demo/test.jsonl").read_text("utf-8").splitlines()
    (tmp_path / "dev.jsonl").write_text("\n".join([*known[-3:], *new[:4]]), "utf-8")

    def held_out(*given: str) -> list[str]:
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", "dry_run=true", *given])
        said = capsys.readouterr().out.splitlines()
        return [line for line in said if line.startswith("held out ")]

    assert held_out(f"from={trained}") == [], "the same tenth is held out"
    [line] = held_out(f"from={trained}", f"dev={tmp_path}/dev.jsonl")
    assert line.startswith(f"held out     3 of 7 cases were trained on by {trained}: their loss is")
    gone = shutil.copytree(trained / "adapter", tmp_path / "gone")
    record = read_json(gone / "manifest.json")
    write_json(gone / "manifest.json", {**record, "train": "gone.jsonl"})
    [line] = held_out(f"from={gone}")
    told = f"may have cases that {gone} was trained on: gone.jsonl is missing, or was changed since"
    assert line.startswith(f"held out     {told}")


def test_all_stages_are_in_the_record_of_a_third_one(
    trained: Path, second: Path, cases: Path, workshop: Path, tmp_path: Path
) -> None:
    config = sft_settings(workshop / "sft.yaml", words(second, cases, tmp_path / "run"))
    record = TrainingRun.of(config, workshop / "base/model", TASK).record
    files = [one.train for one in record.history]
    assert files == [str(cases), str(cases), f"{workshop}/demo/train.jsonl"]
    record.write(tmp_path)
    assert RunRecord.read(tmp_path) == record


def test_scores_know_what_all_stages_were_trained_on(second: Path, trained: Path) -> None:
    opened = open_trained(second)
    for one in (opened.record, open_trained(trained).record):
        answers = SimpleNamespace(trainings=[opened])
        record = SimpleNamespace(test_sha256=one.train_sha256, held_out=False)
        answered: Any = SimpleNamespace(record=record, test_sha256="", answers=answers)
        assert in_sample(answered) == "these cases were trained on"
    record.test_sha256 = "other"
    assert in_sample(answered) is None
