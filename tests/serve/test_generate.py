"""`panjue generate` as a user runs it, on the engine that runs already."""

import asyncio
import json
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from pydantic import TypeAdapter

from panjue.eval.choice import Choice, read_choice
from panjue.eval.decoding import decode_answers
from panjue.eval.opinions import load_advisor
from panjue.prompts.example import Example
from panjue.prompts.labels import load_labels
from panjue.prompts.plumbing.config import load_section
from panjue.prompts.plumbing.errors import Stopped, UserError
from panjue.prompts.plumbing.files import dump, read_json, read_lines, sha256, write_json
from panjue.prompts.plumbing.run import Answers, AnswersRecord, Run
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.ask import answer_all
from panjue.serve.engine import AsyncEngineArgs, EngineEnded
from panjue.serve.generate import generate
from panjue.serve.merge import served_model
from panjue.serve.output import StopSignals
from panjue.serve.settings import RESOURCES, GenerateConfig, generate_settings

Panjue = Callable[..., CompletedProcess[str]]


@pytest.fixture
def cases(workshop: Path) -> Path:
    return workshop / "demo/test.jsonl"


@pytest.fixture
def run(answered: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run."""
    return shutil.copytree(answered, tmp_path / "run")


@pytest.fixture
def partial(run: Path) -> Path:
    """Return a run that was killed while it wrote its 16th row."""
    completions = run / "answers/test/completions.jsonl"
    lines = completions.read_bytes().splitlines(keepends=True)
    completions.write_bytes(b"".join(lines[:15]) + lines[15][:30])
    (run / "answers/test/submission.jsonl").unlink()
    return run


def answer(run: Path, test: Path, *words: str) -> None:
    settings = generate_settings(Run(run), test, ["answer=model", *words])
    generate(Run(run), test, settings, decode_answers)


def submission(run: Path) -> bytes:
    return (run / "answers/test/submission.jsonl").read_bytes()


def test_generate_writes_completions_and_a_clean_submission(
    answered: Path, cases: Path, panjue: Panjue
) -> None:
    folder = answered / "answers/test"
    rows = [row for _, row in read_lines(folder / "completions.jsonl")]
    assert len(rows) == 24
    fields = "id texts finish prompt_tokens cached_tokens completion_tokens dropped_sentences"
    assert {" ".join(row) for row in rows} == {f"{fields} opinions"}
    done = panjue("check", folder / "submission.jsonl", "--cases", cases)
    assert done.returncode == 0, done.stdout
    report = json.loads((folder / "decode.json").read_text("utf-8"))
    assert report["examples"] == 24
    assert report["unreadable"] == report["cut"] == 0
    record = Answers(folder).record
    assert (record.task, record.max_tokens, record.is_of_adapter) == ("judgment", 1024, True)


@pytest.fixture
def fresh(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of a training that has answered nothing."""
    return shutil.copytree(trained, tmp_path / "run")


def said(panjue: Panjue, *words: object) -> list[str]:
    """Return the lines that a command prints."""
    done = panjue(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def held_out_of(run: Path) -> Path:
    """Return the folder of the answers to the held-out cases, which there must be once."""
    [folder] = run.glob("answers/held-out-*")
    return folder


def test_the_first_generate_asks_who_is_better_and_the_classifier_answers(
    fresh: Path, cases: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    lines = said(panjue, "generate", fresh, cases)
    choice = TypeAdapter(Choice).validate_python(read_json(held_out_of(fresh) / "choice.json"))
    assert choice.classifier > choice.model, "a model of two layers has learnt little"
    assert str(choice) in lines
    assert lines[-2:] == [
        f"answered by the text classifier: {choice}",
        f"written: {fresh}/answers/test/submission.jsonl",
    ]
    held_out = Answers(held_out_of(fresh)).record
    assert (held_out.held_out, held_out.answered_by) == (True, "model")
    asked = list(read_lines(held_out_of(fresh) / "completions.jsonl"))
    assert len(asked) == choice.cases > 0
    assert running_engine == [fresh / "merged"]

    assert Answers(fresh / "answers/test").record.answered_by == "classifier"
    assert not (fresh / "answers/test/completions.jsonl").exists(), "no test case was asked"
    task = load_task("judgment")
    advisor = load_advisor(fresh / "adapter", task, load_labels(fresh / "adapter/labels.json"))
    assert advisor
    own = []
    for case in Reader(task).read(cases):
        own.append(task.data.write(case, advisor.alone(case, advisor.opinions(case))))
    assert [row for _, row in read_lines(fresh / "answers/test/submission.jsonl")] == own

    assert str(choice) in said(panjue, "generate", fresh, cases, "answers=again")
    assert len(running_engine) == 1, "the choice is known"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("panjue.serve.generate.held_out_cases", None)  # needs no training file
        assert str(choice) in said(panjue, "generate", fresh, cases, "answers=later")
    for name, words in (("free", "constrained=false"), ("seeded", "seed=1")):
        said(panjue, "generate", fresh, cases, f"answers={name}", words)
    assert len(running_engine) == 3, "that of other replies is not"


def test_a_comparison_that_was_broken_off_is_resumed(
    fresh: Path, cases: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    lines = said(panjue, "generate", fresh, cases)
    torn = held_out_of(fresh) / "completions.jsonl"
    torn.write_bytes(torn.read_bytes()[:-10])
    (held_out_of(fresh) / "choice.json").unlink()
    again = said(panjue, "generate", fresh, cases)
    assert "continuing: 9 of 10 are answered already" in again
    assert again[-2:] == lines[-2:]
    assert len(running_engine) == 2


def test_where_the_model_is_better_one_engine_answers_both_files(
    fresh: Path,
    cases: Path,
    panjue: Panjue,
    running_engine: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Choice, "answered_by", "model")
    monkeypatch.setattr("panjue.eval.scaling.MIN_SCALED", 1)
    lines = said(panjue, "generate", fresh, cases)
    assert running_engine == [fresh / "merged"]
    choice = read_choice(held_out_of(fresh))
    assert choice
    assert AnswersRecord.read(fresh / "answers/test").scaling == choice.scaling != {}
    assert AnswersRecord.read(held_out_of(fresh)).scaling == {}, "they are what it was fitted on"
    assert (held_out_of(fresh) / "completions.jsonl").exists()
    assert len(list(read_lines(fresh / "answers/test/completions.jsonl"))) == 24
    assert lines[-2].startswith("answered by the model: final on ")


def test_a_dev_file_of_the_training_is_asked_once(
    fresh: Path, cases: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    manifest = read_json(fresh / "adapter/manifest.json")
    manifest |= {"dev": str(cases), "dev_sha256": sha256(cases)}
    write_json(fresh / "adapter/manifest.json", manifest)
    lines = said(panjue, "generate", fresh, cases)
    assert "on 24 held-out cases" in lines[-2]
    assert [path.parent.name for path in fresh.glob("answers/*/completions.jsonl")] == ["test"]
    assert said(panjue, "generate", fresh, cases)[-2] == lines[-2]
    assert len(running_engine) == 1


def test_who_answers_can_be_said_and_said_again(
    run: Path, answered: Path, cases: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    completions = run / "answers/test/completions.jsonl"
    before = completions.read_bytes()
    lines = said(panjue, "generate", run, cases, "answer=classifier")
    assert lines[-2] == "answered by the text classifier: as answer=classifier says"
    assert submission(run) != submission(answered)
    lines = said(panjue, "generate", run, cases, "answer=model")
    assert lines[-2] == "answered by the model: as answer=model says"
    assert submission(run) == submission(answered)
    assert completions.read_bytes() == before
    assert not running_engine, "nothing is asked again"
    assert not list(run.glob("answers/held-out*"))


def test_without_the_file_of_the_training_the_model_answers(
    fresh: Path, cases: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    manifest = read_json(fresh / "adapter/manifest.json")
    write_json(fresh / "adapter/manifest.json", {**manifest, "train": "gone.jsonl"})
    lines = said(panjue, "generate", fresh, cases)
    why = "no held-out cases to compare it on: gone.jsonl is missing, or was changed"
    assert lines[-2] == f"answered by the model: {why}"
    assert len(running_engine) == 1


def test_an_interrupted_run_resumes_and_ends_in_the_same_file(
    answered: Path, partial: Path, cases: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    """Settings of memory and speed may differ: after running out of memory they must."""
    completions = partial / "answers/test/completions.jsonl"
    before = completions.read_bytes()
    words = ("engine.gpu_memory_utilization=0.5", "engine.max_num_seqs=4", "in_flight=3")
    done = panjue("generate", partial, cases, "answer=model", *words)
    assert done.returncode == 0, done.stderr
    assert running_engine == [partial / "merged"]
    assert "15 of 24 are answered already" in done.stdout
    assert "replies valid as they came" in done.stdout
    assert completions.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert submission(partial) == submission(answered)


def test_settings_of_memory_and_speed_are_settings_of_the_engine() -> None:
    assert set(RESOURCES) <= {field.name for field in fields(AsyncEngineArgs)}


def test_other_versions_are_printed_and_those_of_the_old_rows_stay(
    run: Path, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "answers/test/manifest.json"
    record = read_json(path)
    record["versions"]["transformers"] = "5.0"
    write_json(path, record)
    answer(run, cases)
    said = capsys.readouterr().out
    assert "resuming with other versions: transformers: 5.0 -> " in said
    assert "all 24 are answered already" in said, "and no engine is started"
    assert read_json(path)["versions"] == record["versions"]


def test_files_made_from_completions_are_deleted_with_them(
    run: Path, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "answers/test"
    for name in ("scores.json", "report.html"):
        (folder / name).write_text("{}", "utf-8")
    (folder / "completions.jsonl").unlink()
    with pytest.raises(UserError, match="engine"):  # so it never answers
        answer(run, cases, "sampling.temperature=0.5", "engine.dtype=float23")
    assert "deleted submission.jsonl, cases.jsonl, decode.json" in capsys.readouterr().out
    assert {path.name for path in folder.glob("[!.]*")} == {"manifest.json", "labels.json"}


def test_answers_of_other_settings_are_kept_and_another_name_is_offered(
    run: Path, cases: Path
) -> None:
    before = sha256(run / "answers/test/completions.jsonl")
    words = ["sampling.temperature=0.5"]
    with pytest.raises(UserError) as error:
        answer(run, cases, *words)
    assert str(error.value) == (
        f"{run}/answers/test: has answers made with other settings "
        "(sampling.temperature: null -> 0.5); they are kept: name another folder for these with "
        "answers=NAME"
    )
    with pytest.raises(UserError, match="engine"):  # so it never answers
        answer(run, cases, *words, "answers=warm", "engine.dtype=float23")
    assert (run / "answers/warm/manifest.json").exists()
    assert sha256(run / "answers/test/completions.jsonl") == before
    for name in ("../x", "a/b", "..", ".hidden"):
        with pytest.raises(UserError, match="answers: String should match"):
            answer(run, cases, *words, f"answers={name}")


def test_one_adapter_answers_several_test_files_each_in_a_folder(
    run: Path, cases: Path, tmp_path: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    other = tmp_path / "b.jsonl"
    rows = cases.read_text("utf-8").splitlines(keepends=True)
    other.write_text("".join(rows[3:5]), "utf-8")
    before = sha256(run / "answers/test"), sha256(run / "adapter")
    done = panjue("generate", run, other, "answer=model")
    assert done.returncode == 0, done.stderr
    assert f"written: {run}/answers/b/submission.jsonl" in done.stdout
    assert running_engine == [run / "merged"]
    made = (run / "answers/b/submission.jsonl").read_bytes().splitlines()
    assert made == submission(run).splitlines()[3:5]
    assert (sha256(run / "answers/test"), sha256(run / "adapter")) == before
    assert panjue("score", other, run).returncode == 0, "the gold file says which answers are meant"
    refused = panjue("decode", run)
    assert refused.returncode == 2
    assert re.sub(r" \(\d+ minutes old\)", "", refused.stderr) == (
        f"panjue: {run}: has answers to several test files; say which: "
        f"{run}/answers/b, {run}/answers/test\n"
    )
    assert panjue("decode", run / "answers/b").returncode == 0


def test_nobody_else_writes_the_answers_until_they_are_decoded(run: Path, cases: Path) -> None:
    def while_held(folder: Path) -> None:
        with ThreadPoolExecutor(1) as another:
            another.submit(decode_answers, folder).result()

    settings = generate_settings(Run(run), cases, ["answer=model"])
    with pytest.raises(UserError, match="answers/test: another process is at work there"):
        generate(Run(run), cases, settings, while_held)
    decode_answers(run / "answers/test")


def test_a_case_that_training_has_no_room_for_is_asked(
    run: Path, tmp_path: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    """The heaviest case of its file is not to be answered without a look at it."""
    names = [f"张某{chr(0x4E00 + i)}" for i in range(40)]
    texts = {1: "被告人" + "、".join(names) + "共同盗窃。", 2: "被告人张某一" + "出行" * 20_000}
    people = {1: names, 2: ["张某一"]}
    rows = [{"id": key, "fact": texts[key], "defendants": people[key]} for key in texts]
    test = tmp_path / "many.jsonl"
    test.write_text("".join(f"{dump(row)}\n" for row in rows), "utf-8")
    done = panjue("generate", run, test, "answer=model")
    assert done.returncode == 0, done.stderr
    made = {row["id"]: row for _, row in read_lines(run / "answers/many/completions.jsonl")}
    asked, refused = made[1], made[2]
    assert len(asked["texts"]) == 1
    assert asked["prompt_tokens"] + asked["completion_tokens"] > Run(run).record.max_tokens
    assert refused["refused"].endswith("give the engine more memory")
    assert "1 could not be asked" in done.stdout
    assert "what no reply has is answered by: text classifier" in done.stdout
    assert f"id 2: {refused['refused']}" in done.stdout


def test_a_base_that_has_moved_is_found_where_it_is_said_to_be(
    answered: Path, tmp_path: Path
) -> None:
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    shutil.copytree(answered / "adapter", adapter)
    made = read_json(adapter / "manifest.json")
    shutil.copytree(made["base"], base)
    write_json(adapter / "manifest.json", {**made, "base": "/no/where"})
    with pytest.raises(UserError, match="say base=FOLDER"):
        served_model(adapter, "lora")
    assert served_model(adapter, "lora", str(base)).model == base


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["sampling.temprature=1"], "sampling: Unexpected keyword argument 'temprature'"),
        (["engine.dtyp=float32"], "engine: no setting 'dtyp'; did you mean 'dtype'"),
        (["contrained=false"], "did you mean 'constrained'"),
        (["sampling.seed=1"], "set the top-level seed"),
        (["sampling.temperature=-1"], "temperature"),
        (["sampling.detokenize=false"], "multiple values for keyword argument 'detokenize'"),
        (["task=drop"], "was trained for 'judgment'; leave out `task`"),
        (["samples=2"], "samples: 'judgment' uses one reply per question; set samples=0"),
        (["replicas=2"], "replicas: needs ray=auto"),
        (["ray=auto", "endpoint=http://127.0.0.1:1/v1#x"], "leave out `ray` or `endpoint`"),
    ],
)
def test_bad_settings_end_in_one_line(
    words: list[str], complaint: str, answered: Path, cases: Path
) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        answer(answered, cases, *words, "answers=other")
    assert "\n" not in str(error.value)
    assert not (answered / "answers/other/completions.jsonl").exists()


def test_missing_files_and_packages_are_named(
    answered: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panjue.serve.settings.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"^ray: is not installed; "):
        answer(answered, cases, "ray=auto")
    with pytest.raises(UserError, match=r"^no file nowhere.jsonl$"):
        answer(answered, Path("nowhere.jsonl"))
    with pytest.raises(UserError, match="nothing trained is there; run `panjue sft` first"):
        answer(tmp_path, cases)


def test_an_adapter_of_another_base_or_prompt_or_other_labels_is_refused(
    run: Path, cases: Path
) -> None:
    path = run / "adapter/manifest.json"
    record = read_json(path)
    for key, problem in (("base_sha256", "another base"), ("prompt_sha256", "its prompt has")):
        write_json(path, {**record, key: "0"})
        with pytest.raises(UserError, match=problem):
            answer(run, cases, "answers=other")
    write_json(path, record)
    labels = read_json(run / "adapter/labels.json")
    labels["counts"]["charges"].pop("盗窃罪")
    write_json(run / "adapter/labels.json", labels)
    with pytest.raises(UserError, match=r"labels.json has changed since training"):
        answer(run, cases, "answers=other")


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "finetune/configs").glob("*.yaml"))
)
def test_the_generate_section_of_every_shipped_config_is_valid(path: Path) -> None:
    if "generate:" in path.read_text("utf-8"):
        assert load_section(GenerateConfig, path, "generate").adapter == "merge"


def test_a_loop_that_is_cancelled_leaves_nothing_running() -> None:
    running: set[int | str] = set()
    ended: set[int | str] = set()

    async def answer(example: Example) -> None:
        running.add(example.id)
        try:
            await asyncio.sleep(60)
        finally:
            ended.add(example.id)

    async def cancel() -> None:
        asking = asyncio.create_task(
            answer_all((Example(i, "甲") for i in range(3)), answer, asyncio.Semaphore(8))
        )
        await asyncio.sleep(0.1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asking, 5)

    asyncio.run(cancel())
    assert running == ended == {0, 1, 2}


def test_a_file_that_cannot_be_read_to_its_end_is_one_error_after_the_answers() -> None:
    answered: list[int | str] = []

    def examples() -> Iterator[Example]:
        yield Example(0, "甲")
        raise UserError("cases.jsonl:2: cut off")

    async def answer(example: Example) -> None:
        await asyncio.sleep(0.01)
        answered.append(example.id)

    with pytest.raises(UserError, match=r"^cases.jsonl:2: cut off$"):
        asyncio.run(answer_all(examples(), answer, asyncio.Semaphore(8)))
    assert answered == [0]


def test_answers_of_the_classifier_are_not_replaced_by_those_to_another_file(
    fresh: Path, cases: Path, tmp_path: Path, panjue: Panjue
) -> None:
    words = ("answer=classifier", "answers=a")
    said(panjue, "generate", fresh, cases, *words)
    other = tmp_path / "test.jsonl"
    five = cases.read_text("utf-8").splitlines(keepends=True)[:5]
    other.write_text("".join(five), "utf-8")
    before = sha256(fresh / "answers/a")
    done = panjue("generate", fresh, other, *words)
    assert (done.returncode, sha256(fresh / "answers/a")) == (2, before)
    assert f"has answers to another file, {cases}; they are kept: name another" in done.stderr
    said(panjue, "generate", fresh, cases, *words)


def test_a_classifier_that_was_not_fitted_cannot_answer(
    fresh: Path, cases: Path, panjue: Panjue
) -> None:
    manifest = read_json(fresh / "adapter/manifest.json")
    del manifest["classifier_sha256"]
    write_json(fresh / "adapter/manifest.json", manifest)
    done = panjue("generate", fresh, cases, "answer=classifier")
    told = f"panjue: answer=classifier: the training of {fresh} fitted none\n"
    assert (done.returncode, done.stderr) == (2, told)
    assert not (fresh / "answers/test").exists()


def test_a_signal_that_nothing_was_there_to_receive_ends_the_block() -> None:
    """The engine gets a Ctrl-C before we do, and fails; ours comes a moment later."""

    def end() -> None:
        raise EngineEnded("engine: its process has ended")

    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(Stopped, match=r"^stopped; no row was finished") as stopped, StopSignals():
        end()
    assert stopped.value.exit_code == 130
    with pytest.raises(EngineEnded), StopSignals():
        end()
