"""The report page in a headless Chromium."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from panjue.eval.report import PageData, page, page_data
from panjue.serve.answers import open_answers
from tests import browser as in_tests
from tests.eval import test_report
from tests.eval.test_report import (
    CLASSES,
    HOSTILE,
    THEFT,
    change_json,
    classes_run,
    run_on,
    think,
)
from tests.finetune.classifier.test_why import knowing
from tests.records import Row, Write, write_answers

hostile = test_report.hostile  # the fixtures
advised = test_report.advised
of_training = test_report.of_training

browser = in_tests.browser  # the fixture


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


def show_report(opened: Any, run: Path, found: PageData | None = None) -> None:
    """Write the report page of a run and open it."""
    written = run / "report.html"
    written.write_text(page(found or page_data(open_answers(run))), "utf-8")
    opened.goto(written.as_uri())


def with_baseline(run: Path) -> PageData:
    """Return the data of a report whose text classifier scores as the submission does."""
    found = page_data(open_answers(run))
    assert found.scores
    found.scores.baselines["text classifier"] = found.scores.total.mean
    return found


def cells(table: Any, row: int) -> list[str]:
    texts: list[str] = table.locator("tr").nth(row).locator("td").all_inner_texts()
    return texts


def test_names_stay_text(opened: Any, hostile: Path) -> None:
    show_report(opened, hostile)
    opened.click("#list button >> nth=0")
    assert opened.locator("#case h4 .name").all_inner_texts() == HOSTILE
    assert opened.inner_text("#facts").startswith(f"被告人{HOSTILE[0]}、{HOSTILE[1]}")
    # The names are colored, not their sentences, and each in the color of its heading.
    assert opened.locator("#facts .name").all_inner_texts() == [*HOSTILE, HOSTILE[2]]
    hue = "one => one.style.getPropertyValue('--hue')"
    in_text = opened.locator("#facts .name").nth(2).evaluate(hue)
    assert in_text == opened.locator("#case h4 .name").nth(2).evaluate(hue) != ""
    assert cells(opened.locator("#case section").nth(1), 1) == ["盗窃罪", "✗ 抢劫罪"]
    assert opened.locator("#case section").nth(0).locator(".missed, .added").count() == 0
    marks = opened.locator("#list button").all_inner_texts()
    assert [mark.splitlines()[0] for mark in marks] == ["1 ✗ charges, penalty", "2 ✓"]
    sizes = opened.locator(".groups >> nth=0 >> tr")
    assert sizes.all_inner_texts()[1:] == ["1*\t1 (counted: 0)\t\t1.0000", "3\t1\t\t0.7667"], (
        "1: weight 0"
    )
    # Groups called as the page's own filters stay apart from them.
    opened.get_by_label("charges").select_option("抢劫罪")
    opened.get_by_label("class", exact=True).select_option("US$5 - $\\foo$")
    opened.get_by_label("confidence", exact=True).select_option("</script><q>")
    assert opened.inner_text("#count") == "1 / 2"


def test_a_missed_label_is_named_on_the_predicted_side(
    opened: Any, case: Row, write: Write, tmp_path: Path
) -> None:
    gold = write("gold.jsonl", [case(1, ("甲", ["盗窃罪", "抢劫罪", "诈骗罪"], ["264"], 11))])

    def change(_number: int, row: dict[str, Any]) -> None:
        row["judgments"][0].update(charges=["盗窃罪", "抢夺罪"], articles=[])

    show_report(opened, run_on(tmp_path / "run", gold, change))
    table = opened.locator("#case table")
    missed = "✗ missed: 抢劫罪 ✗ missed: 诈骗罪"
    assert cells(table, 1) == ["盗窃罪 抢劫罪 诈骗罪", f"✓ 盗窃罪 ✗ 抢夺罪 {missed}"]
    assert cells(table, 2) == ["第二百六十四条", "✗ nothing"]
    assert cells(table, 3)[1] == "✓ 有期徒刑九个月以上一年以下"


def test_the_classifier_s_answer_is_beside_the_model_s(
    opened: Any, hostile: Path, advised: Callable[[Any], None]
) -> None:
    advised(think)
    (hostile / "decode.json").unlink()
    show_report(opened, hostile, with_baseline(hostile))
    heads = opened.locator("#case section >> nth=0 >> tr >> nth=0 >> th")
    assert heads.all_inner_texts() == ["field", "gold", "model", "text classifier"]
    second = opened.locator("#case section").nth(1)
    assert cells(second, 1) == ["盗窃罪", "✗ 抢劫罪", "✗ 诈骗罪 ≠ differs"]
    assert cells(second, 2) == ["第二百六十四条", "✓ 第二百六十四条", "✓ 第二百六十四条"]
    assert cells(second, 3)[2] == "✓ 有期徒刑九个月以上一年以下 ≠ differs"
    assert cells(opened.locator("#agreements"), 1) == ["2", "0", "1", "0", "1"]
    which = opened.get_by_label("model and classifier")
    for value, cases in [("differ, both wrong", "1 / 2"), ("agree, right", "1 / 2"), ("", "2 / 2")]:
        which.select_option(value)
        assert opened.inner_text("#count") == cases
    assert which.locator("option").count() == 5, "no case has `agree, wrong`"
    in_tests.take_pictures(opened, "report-differs-en")


def test_columns_are_named_by_who_answered(
    opened: Any, hostile: Path, advised: Callable[[Any], None]
) -> None:
    advised(think)
    by_field = {"charges": "model", "articles": "classifier", "penalty": "classifier"}
    change_json(hostile / "decode.json", by_field=by_field)
    show_report(opened, hostile)
    heads = opened.locator("#case section >> nth=0 >> th").all_inner_texts()
    assert heads[:4] == ["field", "gold", "handed in", "not handed in"]
    rows = [head.split("\n") for head in heads[4:]]
    assert [row[1] for row in rows] == ["model", "text classifier", "text classifier"]
    assert [row[2] for row in rows] == [f"confidence {share}" for share in ("0.90", "0.60", "0.30")]
    in_tests.take_pictures(opened, "report-by-field-en")
    opened.goto(opened.url + "?lang=zh")
    heads = opened.locator("#case section >> nth=0 >> th").all_inner_texts()
    assert heads[2:4] == ["提交的答案", "未采用的答案"]
    assert heads[5].split("\n")[1:] == ["文本分类器", "置信度 0.60"]
    change_json(hostile / "decode.json", by_field=dict.fromkeys(by_field, "model"))
    show_report(opened, hostile)
    heads = opened.locator("#case section >> nth=0 >> th").all_inner_texts()
    assert heads == ["field", "gold", "model", "text classifier", *heads[4:]]
    assert [head.count("\n") for head in heads[4:]] == [1] * 3, "the confidence alone"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_fold_says_why(
    language: str, opened: Any, hostile: Path, advised: Callable[..., None]
) -> None:
    """The second person's charge is wrong: the classifier does not know it, and gives no words."""
    advised(think, knowing({"盗窃": 3.0, "在场": -1.0}, {"\ue000望": 1.5, "place 2": -0.5}))
    change_json(hostile / "decode.json", by_field={"charges": "classifier"})
    show_report(opened, hostile)
    opened.goto(f"{opened.url}?lang={language}")
    folds = opened.locator("#case details.why")
    assert folds.locator(".likeliest:visible").count() == 0, "it is closed"
    folds.locator("summary").evaluate_all("all => all.forEach(one => one.click())")
    shown = folds.nth(2).inner_text()
    expected = {
        "en": [
            "why",
            "charges: 盗窃罪",
            "answered by the text classifier, confidence 0.90; not in the model's reply",
            "words for",
            "[this person]望 +1.06",
            "against",
            "[no. 3 in the list] −0.35",
        ],
        "zh": [
            "理由",
            "罪名：盗窃罪",
            "回答者：文本分类器，置信度 0.90；模型未答",
            "支持的词",
            "〔本人〕望 +1.06",
            "反对的词",
            "〔名单第 3 人〕 −0.35",
        ],
    }
    for text in expected[language]:
        assert text in shown
    quoted = f"被告人{HOSTILE[0]}、{HOSTILE[1]}、{HOSTILE[2]}共同盗窃。"
    assert quoted in shown, "text, not markup"
    assert "盗窃 +" not in folds.nth(1).inner_text()
    in_tests.take_pictures(opened, f"report-why-{language}")


def test_without_gold_nothing_is_said_to_be_right(
    opened: Any, hostile: Path, case: Row, write: Write, advised: Callable[[Any], None]
) -> None:
    first = case(1, *((name, *THEFT) for name in HOSTILE))
    write_answers(hostile, write("part.jsonl", [first, case(2, ("甲", *THEFT), gold=False)]))
    advised(lambda _example, _answer: None)
    show_report(opened, hostile)
    assert opened.inner_text("#headline") == "2 cases without gold, so there is no score."
    assert opened.inner_text("#facts") == "事实。"
    rows = opened.locator("#case section >> nth=1 >> tr")
    heads = rows.nth(0).locator("th").all_inner_texts()
    assert heads == ["field", "model", "text classifier"]
    assert rows.nth(1).locator("td").first.inner_text() == "抢劫罪"
    assert not re.search("[✓✗]", opened.inner_text("main"))
    opened.get_by_label("charges", exact=True).select_option("抢劫罪")
    assert opened.inner_text("#count") == "1 / 2"
    assert opened.locator("#scores").count() == 0
    in_tests.take_pictures(opened, "report-without-gold-en")


def test_the_page_is_in_the_reader_s_language(opened: Any, hostile: Path) -> None:
    show_report(opened, hostile)  # the browser is English
    assert opened.inner_text("#headline b").startswith("final score 0.")
    parts = "= 0.3 × charge F1 0.6667 + 0.3 × article F1 1.0000 + 0.4 × penalty accuracy 0.6667"
    assert opened.inner_text("#parts").strip() == parts
    assert "2 cases, 1 of which count" in opened.inner_text("#headline")
    assert opened.get_attribute("#headline [title]", "title") == "final", "as in the files"
    assert "得分" not in opened.inner_text("body")
    with opened.expect_navigation():
        opened.click("#language >> text=中文")
    assert opened.inner_text("#headline b").startswith("总分 0.")
    remarks = opened.inner_text("main")
    assert "2 个案件，其中 1 个计分（权重大于 0）；0 个在提交文件里没有对应的行" in remarks
    assert "无法解析的输出：0.00%" in remarks
    assert opened.locator("[lang=en]:visible").count() == 0
    assert opened.locator("#case th").nth(3).inner_text() == "罪名\n置信度 0.90"


def test_gold_of_another_task_is_no_judgment(opened: Any, hostile: Path, tmp_path: Path) -> None:
    show_report(opened, hostile)
    opened.goto(f"{opened.url}?lang=zh")
    assert opened.locator("#case section >> nth=0 >> th").nth(1).inner_text() == "原判"
    show_report(opened, classes_run(tmp_path / "classes", CLASSES))
    assert opened.locator("#case th").nth(1).inner_text() == "gold"
    opened.goto(f"{opened.url}?lang=zh")
    assert opened.locator("#case th").nth(1).inner_text() == "标准答案"
    opened.get_by_label("类别（标准答案或预测）").select_option("没有刑期")
    opened.locator("summary").evaluate_all("all => all.forEach(one => one.click())")
    assert opened.locator(".classes th").nth(1).inner_text() == "标准答案"
    assert "原判" not in opened.inner_text("main")


def test_a_change_of_language_keeps_the_filters_and_the_case(opened: Any, hostile: Path) -> None:
    show_report(opened, hostile)
    opened.get_by_label("search the facts").fill("盗窃")
    opened.get_by_label("charges").select_option("盗窃罪")
    opened.locator("#list button").nth(1).click()
    with opened.expect_navigation():
        opened.click("#language >> text=中文")
    assert opened.input_value("#search") == "盗窃"
    assert opened.get_by_label("罪名").input_value() == "盗窃罪"
    assert (opened.inner_text("#case h3"), opened.inner_text("#count")) == ("2", "2 / 2")
    opened.get_by_label("罪名").select_option("抢劫罪")
    assert opened.inner_text("#count") == "1 / 2"
    opened.get_by_role("button", name="清除筛选").click()
    opened.wait_for_selector("#count:text('2 / 2')")
    assert opened.input_value("#search") == ""


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_curve_of_the_training_in_both_languages(
    language: str, opened: Any, of_training: Path
) -> None:
    show_report(opened, of_training)
    opened.goto(f"{opened.url}?lang={language}")
    points = opened.locator("#loss circle")
    places = points.evaluate_all("all => all.map(one => one.getBoundingClientRect().y)")
    assert len(places) == 2
    assert places[0] > places[1], "0.5 lies below 0.75"
    caption = opened.inner_text("#loss figcaption")
    said = {
        "en": "those of step 10, with a held-out loss of 0.5000",
        "zh": "所用权重是第 10 步的，验证集损失 0.5000",
    }
    assert said[language] in caption
    assert opened.locator("#choice td").first.inner_text() == "0.5000"
    other = {"en": "zh", "zh": "en"}[language]
    assert opened.locator(f"main [lang={other}]:visible").count() == 0
    in_tests.take_pictures(opened, f"report-training-{language}")


@pytest.mark.parametrize("width", [390, 900, 1280])
def test_tables_fit_the_screen_and_no_filter_is_alone_in_its_row(
    width: int, opened: Any, of_training: Path, advised: Callable[[Any], None]
) -> None:
    advised(think)
    opened.set_viewport_size({"width": width, "height": 900})
    show_report(opened, of_training, with_baseline(of_training))
    opened.locator("summary").evaluate_all("all => all.forEach(one => one.click())")
    ends = "all => all.map(one => one.getBoundingClientRect().right)"
    assert max(opened.locator("table").evaluate_all(ends)) <= width
    tops = "all => all.map(one => Math.round(one.getBoundingClientRect().bottom))"
    rows = Counter(opened.locator("#filters > div").evaluate_all(tops))
    assert min(rows.values()) > 1


def test_the_report_of_real_cases(
    opened: Any,
    real_data: Path,
    tmp_path: Path,
    panjue: Callable[..., CompletedProcess[str]],
    advised: Callable[[Any], None],
) -> None:
    def change(number: int, row: dict[str, Any]) -> None:
        if number % 3 == 0:
            row["judgments"][0]["penalty"] = 14 - row["judgments"][0]["penalty"] // 2

    advised(lambda _example, answer: answer["judgments"][0].update(articles=["264"]))
    run = run_on(tmp_path / "run", real_data / "drdz/dev.jsonl", change)
    done = panjue("report", run)
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").stat().st_size < 5_000_000
    opened.goto((run / "report.html").as_uri())
    assert opened.inner_text("#count") == "285 / 285"
    assert opened.locator("#case h3").count() == 1, "the first case is open"
    assert opened.locator(".groups th[scope=row]").all_inner_texts() == ["2", "3", "4", "5+"]
    opened.get_by_label("wrong field").select_option("penalty")
    listed = opened.locator("#list button")
    wrong = listed.count()
    assert 0 < wrong <= 95
    opened.get_by_label("charges").select_option("盗窃罪")
    assert 0 < listed.count() < wrong
    opened.get_by_label("mean confidence").select_option("≥ 0.8")
    assert listed.count() == 0
    opened.get_by_label("mean confidence").select_option("")
    listed.first.focus()
    opened.keyboard.press("Enter")  # no mouse
    assert opened.locator("#case td:nth-child(3) .added").count() > 0
    first = opened.inner_text("#case h3")
    opened.get_by_role("button", name="next").press("Enter")
    assert opened.inner_text("#case h3") != first
    opened.get_by_role("button", name="previous").press("Enter")
    assert opened.inner_text("#case h3") == first
    opened.get_by_role("button", name="list").press("Enter")
    assert opened.evaluate("document.activeElement.textContent").startswith(first)
    opened.get_by_label("search the facts").fill("no fact has this")
    assert opened.inner_text("#count") == "0 / 285"
    assert opened.inner_text("#case") == "choose a case"
    opened.get_by_label("search the facts").fill("")
    assert opened.inner_text("#case h3") == first, "what is open comes back with the list"
    opened.get_by_label("defendants", exact=True).select_option("3")
    assert opened.inner_text("#count") == "1 / 285"
    assert opened.inner_text("#case h3") != first, "the only case left is open"
    opened.get_by_label("defendants", exact=True).select_option("")
    opened.set_viewport_size({"width": 390, "height": 800})  # a phone
    listed.nth(1).click()
    assert opened.locator("#case h3").bounding_box()["y"] < 200, "what was tapped is in sight"
    in_tests.take_pictures(opened, "report-en")
    opened.goto((run / "report.html").as_uri() + "?lang=zh")
    in_tests.take_pictures(opened, "report-zh")


def test_the_first_page_shows_the_report(
    opened: Any, hostile: Path, advised: Callable[[Any], None]
) -> None:
    """The picture of the first page is of `in_tests.DEMO`, if that is set."""
    found = None
    if in_tests.DEMO is None:
        advised(think)
        (hostile / "decode.json").unlink()
        found = with_baseline(hostile)
    show_report(opened, in_tests.DEMO or hostile, found)
    for shown in ("final score", "95% interval", "text classifier"):
        assert shown in opened.inner_text("main")
    differ = "differ, model right" if in_tests.DEMO else "differ, both wrong"
    opened.get_by_label("model and classifier").select_option(differ)
    opened.locator("#list button").first.click()
    assert "≠ differs" in opened.inner_text("#case")
    opened.evaluate("scrollTo(0, 0)")
    in_tests.take_picture_of_first_page(opened, "report", height=1150)
