"""`panjue generate` as a user runs it, on the engine that runs already."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import jsonschema
import pytest

from panjue.eval.choice import choice_lines
from panjue.finetune.trained import open_trained
from panjue.prompts.cli_generate import decode_again
from panjue.prompts.example import Example
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.labels import load_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, read_lines, sha256, write_json
from panjue.prompts.plumbing.records import AnswersRecord, Choice
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.answers import DEMO_ANSWERED, Answered
from panjue.serve.ask import answer_all
from tests.opened import decoded, generated

Panjue = Callable[..., CompletedProcess[str]]
Lines = Callable[..., list[str]]


@pytest.fixture
def cases(workshop: Path) -> Path:
    return workshop / "demo/test.jsonl"


@pytest.fixture
def fresh(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of a training that has answered nothing."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def run(answered: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run."""
    return shutil.copytree(answered, tmp_path / "run")


def change_record(run: Path, **changes: Any) -> None:
    """Change entries in the record of a training; None removes one."""
    path = run / "adapter/manifest.json"
    record = {**read_json(path), **changes}
    write_json(path, {name: value for name, value in record.items() if value is not None})


def answer(run: Path, test: Path, *words: str) -> None:
    generated(run, test, ["answer=model", *words])


@pytest.fixture
def lines_of(panjue: Panjue, cases: Path) -> Lines:
    """Return what runs `panjue generate RUN TEST …` and returns the lines that it prints."""

    def lines(run: Path, *words: str, test: Path = cases) -> list[str]:
        done = panjue("generate", run, test, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return lines


def submission(run: Path) -> bytes:
    return (run / "answers/test/submission.jsonl").read_bytes()


def of_classifier(run: Path, cases: Path) -> list[dict[str, Any]]:
    """Return the rows of a submission that the text classifier of a training makes."""
    task = load_task("judgment")
    advisor = open_trained(run).advisor(task)
    assert advisor
    rows = []
    for case in Reader(task).read(cases):
        rows.append(task.data.write(case, advisor.alone(case, advisor.opinions(case))))
    return rows


def held_out_of(run: Path) -> Path:
    """Return the folder of the answers to the held-out cases, which there must be once."""
    [folder] = run.glob("answers/held-out*")
    return folder


def choice_of(run: Path) -> Choice:
    [choice] = open_trained(run).choices
    return choice


def test_generate_writes_completions_and_a_clean_submission(
    answered: Path, cases: Path, panjue: Panjue
) -> None:
    folder = answered / "answers/test"
    rows = {row["id"]: row for _, row in read_lines(folder / "completions.jsonl")}
    fields = (
        "id texts finish prompt_tokens cached_tokens completion_tokens dropped_sentences logprobs"
    )
    assert {" ".join(row) for row in rows.values()} == {f"{fields} opinions"}
    assert panjue("check", folder / "submission.jsonl", "--cases", cases).returncode == 0
    task = load_task("judgment")
    labels = load_labels(folder / "labels.json")
    for case in Reader(task).read(cases):
        [reply] = rows.pop(case.id)["texts"]
        jsonschema.validate(json.loads(reply), task.ask.schema(case, labels))
    assert not rows
    report = read_json(folder / "decode.json")
    assert report["examples"] == 24
    assert report["unreadable"] == report["cut"] == 0
    record = AnswersRecord.read(folder)
    assert (record.task, record.max_tokens, record.is_of_adapter) == ("judgment", 1024, True)


def test_the_first_generate_asks_held_out_cases_and_each_field_has_who_is_better_there(
    fresh: Path, cases: Path, lines_of: Lines, running_engine: list[Path]
) -> None:
    lines = lines_of(fresh)
    choice = choice_of(fresh)
    assert set(choice_lines(choice)) <= set(lines)
    *_, said, written, beside, demo, step = lines
    assert demo == DEMO_ANSWERED
    assert written == f"written: {fresh}/answers/test/submission.jsonl"
    files = [part.partition(", ")[0] for part in beside.removeprefix("beside it: ").split("; ")]
    assert all((fresh / "answers/test" / name).is_file() for name in files)
    assert {"confidence.jsonl", "decode.json"} <= set(files)
    assert step == f"next: panjue score {cases} {fresh}/answers/test"
    who = choice.answered_by
    assert [part.partition(" (")[0] for part in said.split("; ")] == [
        f"{name}: {one}" for name, one in who.items()
    ]
    assert AnswersRecord.read(held_out_of(fresh)).held_out
    asked = list(read_lines(held_out_of(fresh) / "completions.jsonl"))
    assert len(asked) == choice.cases > 0
    assert running_engine == [fresh / "merged"], "once for both files"

    record = AnswersRecord.read(fresh / "answers/test")
    assert record.asked == ("model" in who.values()), "no more is asked than is needed"
    assert (fresh / "answers/test/completions.jsonl").exists() == record.asked
    task = load_task("judgment")
    advisor = open_trained(fresh).advisor(task)
    assert advisor
    rows = dict(read_submission(fresh))
    for case in Reader(task).read(cases):
        alone = task.data.write(case, advisor.alone(case, advisor.opinions(case)))
        for ours, own in zip(rows[case.id], alone["judgments"], strict=True):
            for name, one in who.items():
                assert one == "model" or ours[name] == own[name]


def read_submission(run: Path) -> Iterator[tuple[int | str, list[dict[str, Any]]]]:
    for _, row in read_lines(run / "answers/test/submission.jsonl"):
        yield row["id"], row["judgments"]


def test_the_choice_is_resumed_and_made_once_for_each_way_to_reply(
    fresh: Path, lines_of: Lines, running_engine: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(fresh, "answer=auto")
    torn = held_out_of(fresh) / "completions.jsonl"
    kept, _, last = torn.read_bytes().rstrip().rpartition(b"\n")
    torn.write_bytes(kept + b"\n" + last[:-10])
    (fresh / "adapter/choice.json").unlink()
    again = lines_of(fresh)
    held_out = choice_of(fresh).cases
    assert f"continuing: {held_out - 1} of {held_out} are answered already" in again
    assert again[-4:] == lines[-4:]
    assert torn.read_bytes().startswith(kept + b"\n"), "finished rows are never made again"
    assert len(running_engine) == 2
    for words in (["answers=free", "constrained=false"], ["answers=seeded", "seed=1"]):
        lines_of(fresh, *words)
        assert (fresh / "answers" / f"held-out-{words[0][8:]}").exists()
    assert len(open_trained(fresh).choices) == 3
    assert len(running_engine) == 4, "other replies are compared anew"
    with pytest.raises(AssertionError, match="has answers made with other settings"):
        lines_of(fresh, "seed=2")
    assert len(running_engine) == 4, "refused before the engine starts"
    monkeypatch.setattr("panjue.prompts.cli_generate.held_out_file", None)  # nobody looks for them
    before = held_out_of_all(fresh)
    assert lines_of(fresh, "answers=later")[-5] == lines[-5]
    assert held_out_of_all(fresh) == before, "these answers are made as those of the first choice"


def held_out_of_all(run: Path) -> dict[Path, str]:
    return {folder: sha256(folder) for folder in run.glob("answers/held-out*")}


def test_at_most_so_many_held_out_cases_are_asked(
    fresh: Path, lines_of: Lines, running_engine: list[Path]
) -> None:
    lines_of(fresh, "held_out_cases=4")
    choice = choice_of(fresh)
    assert choice.cases == 4
    rows = held_out_of(fresh) / "completions.jsonl"
    asked = rows.read_bytes()
    assert asked.count(b"\n") == 4
    lines_of(fresh, "held_out_cases=4")
    assert rows.read_bytes() == asked, "the choice is kept"
    lines_of(fresh)
    choice = choice_of(fresh)
    assert choice.cases > 4
    assert rows.read_bytes().startswith(asked), "more cases decide, and none is asked twice"
    lines_of(fresh, "held_out_cases=4")
    assert choice_of(fresh).cases == 4, "and fewer"
    assert rows.read_bytes().count(b"\n") == choice.cases


def test_a_file_with_own_columns_is_answered_like_the_plain_one(
    run: Path, cases: Path, tmp_path: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    plain = submission(run)
    lines = cases.read_text("utf-8").splitlines()
    rows = [
        {{"fact": "content"}.get(k, k): v for k, v in json.loads(line).items()} for line in lines
    ]
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(map(dump, rows)), "utf-8")
    with pytest.raises(UserError, match=r"the row has id, content, .* columns\.fact=COLUMN"):
        answer(run, own)
    answer(run, own, "columns.fact=content")
    folder = run / "answers/own"
    assert (folder / "submission.jsonl").read_bytes() == plain
    assert AnswersRecord.read(folder).columns == {"fact": "content"}
    scores = panjue("score", own, folder)
    assert scores.returncode == 0
    assert (
        scores.stdout.splitlines()[1:]
        == panjue("score", cases, run / "answers/test").stdout.splitlines()[1:]
    )
    assert panjue("score", cases, folder, "--columns", "fact=fact").returncode == 0
    assert panjue("check", folder, "--cases", own).returncode == 0
    with pytest.raises(UserError, match=rf"has answers to another file, {own}; "):
        answer(run, cases, "answers=own")
    change_record(run, columns={"fact": "content"})
    (run / "answers/of-training").mkdir()
    answer(run, own, "answers=of-training")
    assert AnswersRecord.read(run / "answers/of-training").columns == {"fact": "content"}


def test_a_try_of_the_first_cases_touches_nothing_else(
    fresh: Path, cases: Path, panjue: Panjue, lines_of: Lines, running_engine: list[Path]
) -> None:
    first = lines_of(fresh, "limit=3")
    folder = fresh / "answers/test-limit3"
    assert f"written: {folder}/submission.jsonl" in first
    record = AnswersRecord.read(folder)
    assert (record.limit, record.cases) == (3, 3)
    assert not open_trained(fresh).choices, "a try decides for itself alone"
    assert {path.name for path in (fresh / "answers").iterdir() if path.is_dir()} == {
        "test-limit3",
        "held-out-test-limit3",
    }
    few = [row for _, row in read_lines(folder / "submission.jsonl")]
    assert len(few) == 3
    decode_again(folder, None)  # who answers is known
    assert [row for _, row in read_lines(folder / "submission.jsonl")] == few
    scores = panjue("score", cases, fresh)
    assert scores.returncode == 0, scores.stderr
    assert "3 examples" in scores.stdout
    said = f"only the first 3 cases of {cases} were answered (limit=3)"
    assert f"these scores are not kept as those of {cases}: {said}" in scores.stdout
    assert not (folder / "scores.json").exists()
    checked = panjue("check", fresh, "--cases", cases)
    assert (checked.returncode, said in checked.stdout) == (1, True)
    bundled = panjue("bundle", fresh, fresh / "out.zip")
    assert (bundled.returncode, "has the first 3 cases alone" in bundled.stderr) == (2, True)
    with pytest.raises(AssertionError, match="limit: 3 -> null"):
        lines_of(fresh, "answers=test-limit3")
    before = sha256(folder)
    lines_of(fresh)
    assert sha256(folder) == before
    assert choice_of(fresh).most == 1000
    whole = panjue("score", cases, fresh)
    assert f"scores of {fresh}/answers/test\n" in whole.stdout, "the whole one is meant"
    choice = (fresh / "adapter/choice.json").read_bytes()
    lines_of(fresh, "limit=2")
    assert (fresh / "adapter/choice.json").read_bytes() == choice
    assert not (fresh / "answers/held-out-test-limit2").exists(), "nobody is asked again"


def test_a_limit_that_is_no_less_than_the_file_leaves_nothing_out(
    run: Path, cases: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    answer(run, cases, "limit=24")
    folder = run / "answers/test-limit24"
    assert (folder / "submission.jsonl").read_bytes() == submission(run)
    assert panjue("check", folder, "--cases", cases).returncode == 0


def test_a_dev_file_of_the_training_is_asked_once(
    fresh: Path, cases: Path, lines_of: Lines, running_engine: list[Path]
) -> None:
    change_record(fresh, dev=str(cases), dev_sha256=sha256(cases))
    lines = lines_of(fresh)
    assert choice_of(fresh).cases == 24
    assert len(running_engine) == 1
    asked = AnswersRecord.read(fresh / "answers/test").asked
    if asked:
        rows = fresh / "answers/test/completions.jsonl"
        assert rows.read_bytes() == (held_out_of(fresh) / "completions.jsonl").read_bytes()
    assert lines_of(fresh)[-5] == lines[-5]
    assert len(running_engine) == 1


def test_who_answers_can_be_said_and_said_again(
    run: Path, answered: Path, lines_of: Lines, running_engine: list[Path], panjue: Panjue
) -> None:
    completions = run / "answers/test/completions.jsonl"
    before = completions.read_bytes()
    said = "answered by the text classifier, as answer=classifier says"
    assert lines_of(run, "answer=classifier")[-5] == said
    own = submission(run)
    assert lines_of(run, "answer=model")[-5] == "answered by the model, as answer=model says"
    assert submission(run) == submission(answered)
    done = panjue("decode", run / "answers/test", "answer=classifier")
    assert (done.returncode, submission(run)) == (0, own)
    assert said in done.stdout
    wrong = panjue("decode", run / "answers/test", "answer=classifer")
    assert (wrong.returncode, submission(run)) == (2, own)
    three = "answer=auto, answer=model or answer=classifier"
    assert f"'answer=classifer': say {three}; did you mean 'classifier'?" in wrong.stderr
    for words in (["--answer", "model"], ["--answer=model"]):
        wrong = panjue("decode", run / "answers/test", *words)
        said = "panjue: --answer: is written answer=model here\n"
        assert (wrong.returncode, wrong.stderr) == (2, said)
    wrong = panjue("decode", run / "answers/test", "answer=model", "answer=auto")
    assert (wrong.returncode, wrong.stderr) == (2, f"panjue: decode: say once {three}\n")
    assert completions.read_bytes() == before
    assert not running_engine, "nothing is asked again"
    assert not list(run.glob("answers/held-out*"))


def test_without_the_file_of_the_training_an_earlier_choice_counts_or_who_answers_is_said(
    fresh: Path, cases: Path, lines_of: Lines, running_engine: list[Path]
) -> None:
    elsewhere = shutil.copytree(fresh, fresh.with_name("elsewhere"))
    change_record(elsewhere, train="gone.jsonl")
    why = "gone.jsonl is missing, or was changed; say answer=model or answer=classifier$"
    with pytest.raises(UserError, match=f"^{elsewhere}: nobody can decide who answers, .*: {why}"):
        answer(elsewhere, cases, "answer=auto")
    assert not running_engine
    lines = lines_of(fresh)
    choices = (fresh / "adapter/choice.json").read_text("utf-8")
    of_fresh, of_elsewhere = (model_sha256(run / "adapter") for run in (fresh, elsewhere))
    choices = choices.replace(of_fresh, of_elsewhere)
    (elsewhere / "adapter/choice.json").write_text(choices, "utf-8")
    assert lines_of(elsewhere)[-5] == lines[-5]
    other = lines_of(elsewhere, "answers=seeded", "seed=1")
    assert other[-5] == lines[-5]
    assert "who answers was decided on answers that were made in another way: seed: 0 -> 1" in other


def test_a_classifier_that_was_not_fitted_cannot_answer(fresh: Path, cases: Path) -> None:
    change_record(fresh, classifier_sha256=None)
    with pytest.raises(UserError, match=r"^answer=classifier: the training of .* fitted none"):
        answer(fresh, cases, "answer=classifier")
    assert not (fresh / "answers/test").exists()


def test_answers_are_not_replaced_by_those_to_another_file(
    fresh: Path, answered: Path, cases: Path, tmp_path: Path
) -> None:
    """Neither the classifier's, nor the model's whose replies lie elsewhere."""
    words = ("answer=classifier", "answers=a")
    answer(fresh, cases, *words)
    run = shutil.copytree(answered, tmp_path / "finished")
    other = tmp_path / "test.jsonl"
    other.write_text(cases.read_text("utf-8").partition("\n")[0], "utf-8")
    moved = run / "answers/test/completions.jsonl"
    moved.rename(tmp_path / "completions.jsonl")
    for folder, more in ((fresh / "answers/a", words), (run / "answers/test", ())):
        before = sha256(folder)
        to_others = f"has answers to another file, {cases}; .* another folder for those to {other}"
        with pytest.raises(UserError, match=to_others):
            answer(folder.parents[1], other, *more)
        assert sha256(folder) == before
    scores = fresh / "answers/a/scores.json"
    scores.write_text("{}", "utf-8")
    answer(fresh, cases, *words)
    assert scores.exists(), "they are of the same answers"


def test_cases_on_which_the_engine_failed_alone_are_asked_again(
    run: Path, cases: Path, panjue: Panjue, lines_of: Lines, running_engine: list[Path]
) -> None:
    path = run / "answers/test/completions.jsonl"
    before = {row["id"]: row for _, row in read_lines(path)}
    first, second, *others = before.values()
    of_0_4 = {"id": first["id"], "refused": "the engine failed on this request"}
    torn = {**second, "texts": ["{"], "finish": ["error"]}
    path.write_text("".join(dump(row) + "\n" for row in (of_0_4, torn, *others)), "utf-8")
    decoded = panjue("decode", run).stdout
    assert "1 on which the engine failed: the same `panjue generate` asks again" in decoded
    assert "ended by an error of the engine (the same `panjue generate` asks again): 1" in decoded
    lines = lines_of(run, "answer=model")
    assert "continuing: 22 of 24 are answered already" in lines
    assert "2/3 answering 2 cases" in lines
    after = {row["id"]: row.get("texts") for _, row in read_lines(path)}
    assert after == {key: row["texts"] for key, row in before.items()}
    assert not any("without a reply" in line or line.startswith("ended by") for line in lines)


def test_a_run_resumes_with_other_versions_and_settings_of_memory_and_speed(
    run: Path, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After running out of memory such settings must change."""
    path = run / "answers/test/manifest.json"
    record = read_json(path)
    record["versions"]["transformers"] = "5.0"
    write_json(path, record)
    answer(run, cases, "engine.gpu_memory_utilization=0.5", "in_flight=3")
    printed = capsys.readouterr().out
    assert "resuming with other versions: transformers: 5.0 -> " in printed
    assert "all 24 are answered already" in printed, "and no engine is started"
    assert read_json(path)["versions"] == record["versions"], "those of the old rows"


@pytest.mark.parametrize("name", ["..jsonl", "...jsonl"])
def test_a_file_whose_name_names_no_folder_is_refused(
    name: str, run: Path, cases: Path, tmp_path: Path
) -> None:
    test = Path(shutil.copy(cases, tmp_path / name))
    before = sha256(run)
    with pytest.raises(UserError, match=r"gives answers no name for their folder; say answers="):
        answer(run, test, "answer=classifier")
    assert sha256(run) == before


def test_answers_of_other_settings_are_kept_and_another_name_is_offered(
    run: Path, cases: Path
) -> None:
    before = sha256(run / "answers/test/completions.jsonl")
    with pytest.raises(UserError) as error:
        answer(run, cases, "sampling.temperature=0.5")
    assert str(error.value) == (
        f"{run}/answers/test: has answers made with other settings "
        "(sampling.temperature: null -> 0.5); they are kept: name another folder for these with "
        "answers=NAME"
    )
    assert sha256(run / "answers/test/completions.jsonl") == before


def test_nobody_else_writes_the_answers_until_they_are_decoded(
    run: Path, cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def while_held(answered: Answered, _: str) -> None:
        with ThreadPoolExecutor(1) as another:
            another.submit(decode_again, answered.folder, None).result()

    monkeypatch.setattr("panjue.prompts.cli_generate.decode", while_held)
    with pytest.raises(UserError, match="answers/test: another process is at work there"):
        generated(run, cases, ["answer=model"])
    decoded(run / "answers/test")


def test_a_case_that_training_has_no_room_for_is_asked(
    run: Path, tmp_path: Path, lines_of: Lines, running_engine: list[Path]
) -> None:
    """Else the heaviest case of its file would be answered without a look at it."""
    before = sha256(run / "answers/test")
    names = [f"张某{chr(0x4E00 + i)}" for i in range(40)]
    many = {"id": 1, "fact": f"被告人{'、'.join(names)}共同盗窃。", "defendants": names}
    long = {"id": 2, "fact": "被告人张某一" + "出行" * 20_000, "defendants": ["张某一"]}
    test = tmp_path / "many.jsonl"
    test.write_text(f"{dump(many)}\n{dump(long)}\n{{}}\n", "utf-8")
    printed = "\n".join(lines_of(run, "answer=model", test=test))
    rows = {row["id"]: row for _, row in read_lines(run / "answers/many/completions.jsonl")}
    assert len(rows[1]["texts"]) == 1
    limit = open_trained(run).record.max_tokens
    assert rows[1]["prompt_tokens"] + rows[1]["completion_tokens"] > limit
    assert rows[2]["refused"].endswith("delete this row of completions.jsonl")
    assert f"bad rows skipped: 1; the first: {test}:3: " in printed
    assert "what replies lack is answered by: text classifier" in printed
    assert f"id 2: {rows[2]['refused']}" in printed
    assert sha256(run / "answers/test") == before, "each test file has a folder of answers"


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


def test_names_that_their_facts_do_not_have_are_one_line(
    fresh: Path, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in cases.read_text("utf-8").splitlines()]
    names = sum(len(row["defendants"]) for row in rows)
    rows[1]["fact"] = "经审理查明，有人行窃。"
    test = tmp_path / "others.jsonl"
    test.write_text("\n".join(map(dump, rows)), "utf-8")
    generated(fresh, test, ["answer=classifier"])
    first = f"id {rows[1]['id']}, {rows[1]['defendants'][0]}"
    missing = len(rows[1]["defendants"])
    do = "does" if missing == 1 else "do"
    said = f"{missing} of {names} names {do} not occur in their facts, first: {first}\n"
    assert said in capsys.readouterr().out
