"""The report page: its numbers by hand, and the page itself in a headless Chromium."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from panjue.eval.answers import open_run
from panjue.eval.report import coloured, items_of, report
from panjue.eval.report_page import page
from panjue.prompts.files import dump, sha256, write_json
from panjue.prompts.labels import Labels
from panjue.prompts.task import Example, load_task

TASK = load_task("judgment")
PANJUE = Path(sys.executable).with_name("panjue")
ARTEFACTS = Path(os.environ.get("PANJUE_ARTEFACTS", "build/screenshots"))
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
HOSTILE = ["<script>alert(1)</script>", '王某"A', "李某乙"]


def case(key: int, names: list[str], fact: str) -> dict[str, Any]:
    def outcome(name: str, charge: str, months: int) -> dict[str, Any]:
        penalty = {"surveillance": 0, "detention": 0, "imprisonment": months}
        penalty |= {"death_penalty": False, "life_imprisonment": False}
        return {"name": name, "penalty": penalty, "charges": [charge], "articles": ["264"]}

    outcomes = [outcome(name, "盗窃罪", 12) for name in names]
    return {"id": key, "fact": fact, "defendants": names, "outcomes": outcomes}


def run_on(folder: Path, gold: Path, change: Any) -> Path:
    """Make a run that answers as gold, but for what `change` does to its rows."""
    Labels().save(folder)
    made = {"task": "judgment", "test": str(gold), "test_sha256": sha256(gold), "trained": None}
    write_json(folder / "manifest.json", {"generate": made})
    with (
        (folder / "submission.jsonl").open("w", encoding="utf-8") as out,
        (folder / "completions.jsonl").open("w", encoding="utf-8") as raw,
        (folder / "confidence.jsonl").open("w", encoding="utf-8") as sure,
    ):
        for number, example in enumerate(TASK.read(gold)):
            row = json.loads(dump(TASK.gold(example)))
            change(number, row)
            out.write(dump(row) + "\n")
            raw.write(dump({"id": example.id, "texts": [f"raw reply of {example.id}"]}) + "\n")
            each = {"charges": 0.9, "articles": 0.6, "penalty": 0.3}
            told = {"id": example.id, "confidence": [each] * len(row["judgments"])}
            sure.write(dump(told) + "\n")
    curve = [{"step": step, "loss": 2 / step, "eval_loss": 1 / step} for step in (1, 2, 3)]
    (folder / "log.jsonl").write_text("".join(dump(row) + "\n" for row in curve), "utf-8")
    return folder


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    fact = f"被告人{HOSTILE[0]}、{HOSTILE[1]}、{HOSTILE[2]}共同盗窃。{HOSTILE[2]}望风。无人在场。"
    rows = [case(1, HOSTILE, fact), case(2, ["甲"], "被告人甲盗窃。")]
    gold = tmp_path / "gold.jsonl"
    gold.write_text("".join(dump(row) + "\n" for row in rows), "utf-8")

    def change(number: int, row: dict[str, Any]) -> None:
        if number == 0:
            row["judgments"][1].update(charges=["抢劫罪"], penalty=5)

    return run_on(tmp_path / "run", gold, change)


def test_the_numbers_by_hand(hostile: Path) -> None:
    found = report(open_run(hostile))
    # 盗窃罪: four in gold, three told right. 2 * 3 / (4 + 3).
    [(name, (count, f1))] = found.by_class.items()
    assert (name, count) == ("盗窃罪", 4)
    assert f1 == pytest.approx(6 / 7)
    assert found.pairs == [("盗窃罪", "抢劫罪", 1)]
    order = found.orders["penalty"]
    wrong = order[5]
    assert len(order) == 15  # all classes, from the gravest on
    told = found.confusion["penalty"]
    assert told == {(order[11], order[11]): 3, (order[11], wrong): 1}  # twelve months: class 11
    assert [case.wrong for case in found.cases] == [["charges", "penalty"], []]
    assert [case.confidence for case in found.cases] == [pytest.approx(0.6)] * 2
    assert found.cases[0].reply == ["raw reply of 1"]
    assert list(found.confusion) == ["penalty"]


def test_sentences_know_whom_they_name() -> None:
    example = Example(1, "张某与张某甲打架。张某甲逃跑。无人受伤。", names=("张某", "张某甲"))
    assert [named for _, named in coloured(example, example.names)] == [[0, 1], [1], []]
    assert "".join(text for text, _ in coloured(example, example.names)) == example.text


def test_any_task_has_cases_to_look_at() -> None:
    severity = load_task("severity")
    [(name, fields)] = items_of(severity, {"id": 1, "label": 3}, {"id": 1, "label": 2})
    assert (name, fields[0].gold, fields[0].told, fields[0].is_right) == ("", ["3"], ["2"], False)
    [(_, unanswered)] = items_of(severity, {"id": 1, "label": 3}, None)
    assert [one.told for one in unanswered] == [[]]


def test_the_page_needs_nothing_else(hostile: Path) -> None:
    text = page(report(open_run(hostile)))
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", text)
    assert "<script>alert" not in text
    assert text.count("<script") == 2
    assert page(report(open_run(hostile))) == text, "the same report is the same page"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("there is no Chromium here; apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    shown, faults, asked = context.new_page(), list[str](), list[str]()
    shown.on("pageerror", lambda error: faults.append(str(error)))
    shown.on("console", lambda message: faults.append(message.text))
    shown.on("dialog", lambda dialog: faults.append(dialog.message))
    shown.on("request", lambda request: asked.append(request.url))
    yield shown
    assert faults == []
    assert all(url.startswith("file://") for url in asked)
    context.close()


def test_names_stay_text(opened: Any, hostile: Path) -> None:
    (hostile / "report.html").write_text(page(report(open_run(hostile))), "utf-8")
    opened.goto((hostile / "report.html").as_uri())
    opened.click("#list button >> nth=0")
    assert opened.locator("#case h4").all_inner_texts() == HOSTILE
    assert opened.inner_text("#facts").startswith(f"被告人{HOSTILE[0]}、{HOSTILE[1]}")
    named = opened.locator("#facts span").evaluate_all("all => all.map(one => one.dataset.named)")
    assert named == ["0 1 2", "2", ""]
    shown = opened.locator("#facts span").nth(1).evaluate("one => one.style.background")
    head = opened.locator("#case h4 span").nth(2).evaluate("one => one.style.background")
    assert shown == head != ""
    second = opened.locator("#case section").nth(1)
    assert second.locator(".missed").all_inner_texts()[0] == "盗窃罪"
    assert second.locator(".added").all_inner_texts()[0] == "抢劫罪"
    assert opened.locator("#case section").nth(0).locator(".missed, .added").count() == 0


def test_the_report_of_real_cases(opened: Any, shared: Path, tmp_path: Path) -> None:
    def change(number: int, row: dict[str, Any]) -> None:
        if number % 3 == 0:
            row["judgments"][0]["penalty"] = 14 - row["judgments"][0]["penalty"] // 2

    run = run_on(tmp_path / "run", shared / "drdz/dev.jsonl", change)
    done = subprocess.run(
        [str(PANJUE), "report", str(run)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").stat().st_size < 5_000_000
    opened.goto((run / "report.html").as_uri())
    assert opened.inner_text("#count") == "285 / 285"
    opened.select_option("#filter-wrong", "penalty")
    some = opened.locator("#list button").count()
    assert 0 < some <= 95
    opened.select_option("#filter-class", "盗窃罪")
    assert 0 < opened.locator("#list button").count() < some
    opened.select_option("#filter-confidence", "≥ 0.8")
    assert opened.locator("#list button").count() == 0
    opened.select_option("#filter-confidence", "")
    opened.locator("#list button").first.focus()
    opened.keyboard.press("Enter")  # no mouse
    assert opened.locator("#case .missed").count() > 0
    assert opened.locator("#case pre").count() == 1
    names = opened.locator("#case h4").all_inner_texts()
    parts = opened.locator("#facts span").evaluate_all(
        "all => all.map(one => [one.textContent, one.dataset.named])"
    )
    for text, named in parts:
        assert all(names[int(place)] in text for place in named.split())
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    opened.screenshot(path=ARTEFACTS / "report.png")
    opened.set_viewport_size({"width": 390, "height": 800})  # a phone
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    opened.screenshot(path=ARTEFACTS / "report-phone.png")
