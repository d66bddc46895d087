"""The whole second half as a user runs it, on the engine that runs already."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from panjue.prompts.plumbing.config import load_config
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, sha256, write_json
from panjue.prompts.task import load_task
from panjue.serve.engine import AsyncEngineArgs
from panjue.serve.generate import main
from panjue.serve.job import MIN_COMPILED_REPLIES, engine_arguments
from panjue.serve.settings import RESOURCES, GenerateConfig
from panjue.serve.trained import served_model

Panjue = Callable[..., CompletedProcess[str]]


def test_generate_writes_completions_and_a_clean_submission(
    answered: Path, workshop: Path, panjue: Panjue
) -> None:
    cases = workshop / "demo/test.jsonl"
    assert len((answered / "answers/test/completions.jsonl").read_text("utf-8").splitlines()) == 24
    labels = ("--labels", answered / "answers/test/labels.json")
    done = panjue("check", answered / "answers/test/submission.jsonl", "--cases", cases, *labels)
    assert done.returncode == 0, done.stdout
    report = json.loads((answered / "answers/test/decode.json").read_text("utf-8"))
    assert report["examples"] == 24
    assert report["unreadable"] == report["cut"] == 0


def test_an_interrupted_run_continues_and_ends_in_the_same_file(
    answered: Path, tmp_path: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    again = tmp_path / "run"
    shutil.copytree(answered, again)
    lines = (answered / "answers/test/completions.jsonl").read_bytes().splitlines(keepends=True)
    (again / "answers/test/completions.jsonl").write_bytes(b"".join(lines[:15]) + lines[15][:30])
    (again / "answers/test/submission.jsonl").unlink()
    done = panjue(
        "generate", answered / "generate.yaml", f"run={again}", f"trained={answered}/adapter"
    )
    assert done.returncode == 0, done.stderr
    assert running_engine == [answered / "merged"]
    assert "15 of 24 are answered already" in done.stdout
    assert "replies valid as they came" in done.stdout
    assert (again / "answers/test/completions.jsonl").read_bytes().startswith(b"".join(lines[:15]))
    submissions = [run / "answers/test/submission.jsonl" for run in (again, answered)]
    assert submissions[0].read_bytes() == submissions[1].read_bytes()


@pytest.mark.parametrize(
    ("settings", "cases", "is_eager"),
    [
        ({}, 24, True),
        ({}, MIN_COMPILED_REPLIES, None),
        ({"samples": 4}, MIN_COMPILED_REPLIES // 5 - 1, True),
        ({"samples": 4}, MIN_COMPILED_REPLIES // 5, None),
        ({"ray": "auto", "replicas": 2}, MIN_COMPILED_REPLIES, None),
        ({"ray": "auto", "replicas": 2}, MIN_COMPILED_REPLIES - 1, True),
        ({"engine": {"compilation_config": {"mode": 0}}}, 24, None),
        ({"engine": {"enforce_eager": False}}, 24, False),
        ({"engine": {"enforce_eager": True}}, 10**6, True),
    ],
)
def test_the_engine_is_compiled_for_many_replies_only(
    settings: dict[str, Any], cases: int, is_eager: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panjue.serve.job.on_cpu", lambda: True)
    config = GenerateConfig.model_validate({"run": "r", "test": "t.jsonl", **settings})
    task = load_task("judgment")
    assert engine_arguments(config, task, cases).get("enforce_eager") is is_eager
    dialogues = engine_arguments(config, load_task("dialogue"), cases)
    assert dialogues == config.engine, "each takes many calls"
    monkeypatch.setattr("panjue.serve.job.on_cpu", lambda: False)
    assert engine_arguments(config, task, cases) == config.engine, "vLLM's own default holds"


def test_settings_of_memory_and_speed_are_settings_of_the_engine() -> None:
    assert set(RESOURCES) <= {field.name for field in fields(AsyncEngineArgs)}


def test_a_run_goes_on_under_other_settings_of_memory_and_speed(
    answered: Path, tmp_path: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    """What the word on an engine that ran out of memory asks for is no other run."""
    again = tmp_path / "run"
    shutil.copytree(answered, again)
    lines = (answered / "answers/test/completions.jsonl").read_bytes().splitlines(keepends=True)
    (again / "answers/test/completions.jsonl").write_bytes(b"".join(lines[:15]))
    words = [answered / "generate.yaml", f"run={again}", f"trained={answered}/adapter"]
    less = ["engine.gpu_memory_utilization=0.5", "engine.max_num_seqs=4"]
    done = panjue("generate", *words, *less)
    assert done.returncode == 0, done.stderr
    assert "15 of 24 are answered already" in done.stdout
    submissions = [run / "answers/test/submission.jsonl" for run in (again, answered)]
    assert submissions[0].read_bytes() == submissions[1].read_bytes()
    done = panjue("generate", *words, "engine.dtype=bfloat16")
    assert "has answers made with other settings (engine.dtype: float32 -> bfloat16)" in done.stderr


def test_a_finished_run_starts_no_engine(
    answered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(answered / "generate.yaml")
    assert "all 24 are answered already" in capsys.readouterr().out


def test_resuming_under_other_sampling_stops_and_names_it(answered: Path) -> None:
    with pytest.raises(UserError, match="sampling"):
        main(answered / "generate.yaml", ["sampling.temperature=0.5"])


def test_other_versions_are_told_and_hinder_nothing(
    answered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(answered, copy)
    manifest = read_json(copy / "answers/test/manifest.json")
    manifest["generate"]["versions"]["transformers"] = "5.0"
    write_json(copy / "answers/test/manifest.json", manifest)
    main(answered / "generate.yaml", [f"run={copy}"])
    assert "resuming with other versions: transformers: 5.0 -> " in capsys.readouterr().out
    now = read_json(copy / "answers/test/manifest.json")["generate"]
    assert now["versions"] == manifest["generate"]["versions"], (
        "they are of the rows that are there"
    )


def test_what_was_decoded_from_completions_goes_with_them(
    answered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, words = tmp_path / "run", [f"run={tmp_path}/run", "sampling.temperature=0.5"]
    shutil.copytree(answered, copy)
    folder = copy / "answers/test"
    for name in ("scores.json", "report.html"):
        (folder / name).write_text("{}", "utf-8")
    (folder / "completions.jsonl").unlink()
    with pytest.raises(UserError, match="engine"):  # so it never answers
        main(answered / "generate.yaml", [*words, "engine.dtype=float23"])
    assert "deleted submission.jsonl, decode.json" in capsys.readouterr().out
    assert {path.name for path in folder.glob("[!.]*")} == {"manifest.json", "labels.json"}


def test_answers_of_other_settings_are_kept_and_another_name_is_offered(
    answered: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(answered, tmp_path / "run")
    before = (run / "answers/test/completions.jsonl").read_bytes()
    words = [f"run={run}", "sampling.temperature=0.5"]
    with pytest.raises(UserError) as error:
        main(answered / "generate.yaml", words)
    assert str(error.value) == (
        f"{run}/answers/test: has answers made with other settings "
        "(sampling.temperature: null -> 0.5); they are kept: name another folder for these with "
        "answers=NAME (make: ANSWERS=NAME)"
    )
    with pytest.raises(UserError, match="engine"):  # so it never answers
        main(answered / "generate.yaml", [*words, "answers=warm", "engine.dtype=float23"])
    assert (run / "answers/warm/manifest.json").exists()
    assert (run / "answers/test/completions.jsonl").read_bytes() == before
    for name in ("../x", "a/b", "..", ".hidden"):
        with pytest.raises(UserError, match="answers: String should match"):
            main(answered / "generate.yaml", [*words, f"answers={name}"])


def test_one_adapter_answers_several_test_files_each_in_a_folder(
    answered: Path, workshop: Path, tmp_path: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    run, other = shutil.copytree(answered, tmp_path / "run"), tmp_path / "b.jsonl"
    rows = (workshop / "demo/test.jsonl").read_text("utf-8").splitlines(keepends=True)
    other.write_text("".join(rows[3:5]), "utf-8")
    before = sha256(run / "answers/test"), sha256(run / "adapter")
    done = panjue("generate", answered / "generate.yaml", f"run={run}", f"test={other}")
    assert done.returncode == 0, done.stderr
    assert f"written: {run}/answers/b/submission.jsonl" in done.stdout
    assert running_engine == [run / "merged"]
    first = (run / "answers/test/submission.jsonl").read_bytes().splitlines()
    assert (run / "answers/b/submission.jsonl").read_bytes().splitlines() == first[3:5]
    assert (sha256(run / "answers/test"), sha256(run / "adapter")) == before
    assert panjue("score", other, run).returncode == 0, "the gold file says which answers are meant"
    assert panjue("compare", run / "answers/b", run / "answers/b").returncode == 0
    for words in (("report", run), ("decode", run), ("bundle", run, tmp_path / "out.zip")):
        told = panjue(*words)
        assert told.returncode == 2
        assert told.stderr == (
            f"panjue: {run}: has answers to several test files; say which: "
            f"{run}/answers/b, {run}/answers/test\n"
        )
    assert panjue("report", run / "answers/b").returncode == 0
    assert (run / "answers/b/report.html").exists()


def test_files_that_no_run_made_are_left_alone(answered: Path, tmp_path: Path) -> None:
    own = tmp_path / "submission.jsonl"
    own.write_text("mine", "utf-8")
    words = [f"run={tmp_path}", f"trained={answered}/adapter", "engine.dtype=float23"]
    with pytest.raises(UserError, match="engine"):
        main(answered / "generate.yaml", words)
    assert own.read_text("utf-8") == "mine"


def test_a_base_that_has_moved_is_found_where_it_is_said_to_be(
    answered: Path, workshop: Path, tmp_path: Path
) -> None:
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    shutil.copytree(answered / "adapter", adapter)
    made = read_json(adapter / "manifest.json")
    shutil.copytree(made["base"], base)
    write_json(adapter / "manifest.json", {**made, "base": "/no/where"})
    with pytest.raises(UserError, match="if it has moved, say base=FOLDER"):
        served_model(adapter, "lora")
    assert served_model(adapter, "lora", str(base)).model == base
    (base / "config.json").write_text("{}", "utf-8")
    with pytest.raises(UserError, match="was trained on another base than"):
        served_model(adapter, "lora", str(base))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["test=nowhere.jsonl"], "no file nowhere.jsonl"),
        (["sampling.temprature=1"], "did you mean 'temperature'"),
        (["engine.dtyp=float32"], "did you mean 'dtype'"),
        (["trained=nowhere"], "nothing trained is there"),
        (["contrained=false"], "did you mean 'constrained'"),
        (["sampling.seed=1"], "set the top-level seed"),
        (["sampling.temperature=-1"], "temperature"),
        (["engine.trust_remote_code=true"], "never run"),
        (["engine.load_format=pt"], "only safetensors"),
    ],
)
def test_bad_settings_end_in_one_line(
    words: list[str], complaint: str, answered: Path, tmp_path: Path
) -> None:
    words = [
        f"run={tmp_path}",
        *([] if "trained=nowhere" in words else [f"trained={answered}/adapter"]),
        *words,
    ]
    with pytest.raises(UserError, match=complaint) as error:
        main(answered / "generate.yaml", words)
    assert "\n" not in str(error.value)


def test_cases_without_defendants_end_in_one_line(
    answered: Path, workshop: Path, tmp_path: Path
) -> None:
    case = json.loads((workshop / "demo/test.jsonl").read_text("utf-8").splitlines()[0])
    del case["defendants"]
    (tmp_path / "test.jsonl").write_text("\n" + json.dumps(case), "utf-8")
    with pytest.raises(UserError, match=r"test.jsonl:2: 'defendants'"):
        main(
            answered / "generate.yaml",
            [f"run={tmp_path}", f"trained={answered}/adapter", f"test={tmp_path}/test.jsonl"],
        )


def test_an_adapter_of_another_base_or_other_labels_is_refused(
    answered: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "adapter"
    shutil.copytree(answered / "adapter", copy)
    manifest = json.loads((copy / "manifest.json").read_text("utf-8"))
    (copy / "manifest.json").write_text(json.dumps({**manifest, "base_sha256": "0"}), "utf-8")
    with pytest.raises(UserError, match="another base"):
        main(answered / "generate.yaml", [f"run={tmp_path}/a", f"trained={copy}"])
    (copy / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    labels = json.loads((copy / "labels.json").read_text("utf-8"))
    labels["counts"]["charges"].pop("盗窃罪")
    (copy / "labels.json").write_text(json.dumps(labels), "utf-8")
    with pytest.raises(UserError, match="labels"):
        main(answered / "generate.yaml", [f"run={tmp_path}/b", f"trained={copy}"])
    (copy / "manifest.json").write_text(json.dumps({**manifest, "prompt_sha256": "0"}), "utf-8")
    with pytest.raises(UserError) as error:
        main(answered / "generate.yaml", [f"run={tmp_path}/b", f"trained={copy}"])
    assert str(error.value) == (
        f"{copy}: was trained with another prompt than prompts/tasks/judgment has now; "
        "restore that prompt, or train again with another run=FOLDER"
    )


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "serve/configs").glob("*.yaml"))
)
def test_every_shipped_config_loads(path: Path) -> None:
    assert load_config(GenerateConfig, path, ["test=x.jsonl"]).task == "judgment"
    assert load_task("judgment")
