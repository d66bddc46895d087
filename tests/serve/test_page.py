"""The page in a real headless Chromium, against the running server."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from panjue.prompts.tasks.judgment.articles import article_name
from panjue.serve.middleware import PAGE
from tests import browser as in_tests
from tests.served import KEY, PanjueServe

FACT = (
    "经审理查明：2020年3月，被告人张某甲、李某乙共同盗窃手机一部，价值人民币3000元。"
    "张某甲系主犯。李某乙归案后如实供述。"
)
browser = in_tests.browser  # the fixture


@pytest.fixture
def page(browser: Any, server: PanjueServe) -> Iterator[Any]:
    """Return the page as a reader of Chinese opens it."""
    context = browser.new_context(locale="zh-CN", viewport={"width": 1200, "height": 900})
    opened = context.new_page()
    faults: list[str] = []
    asked: list[str] = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(server.url)
    yield opened
    assert faults == []
    assert all(url.startswith(server.url) for url in asked), "no request leaves the machine"
    context.close()


def fill(page: Any, fact: str = FACT) -> None:
    """Fill in the facts, the key and, if nobody is there, two defendants."""
    page.fill("#fact", fact)
    if not page.locator("#names input").count():
        add(page, "张某甲", "李某乙")
    page.evaluate("document.getElementById('keyed').hidden = false")
    page.fill("#key", KEY)


def add(page: Any, *names: str) -> None:
    for name in names:
        page.click("#add")
        page.fill("#names input >> nth=-1", name)


def ask(page: Any, fact: str = FACT) -> None:
    """Fill in the form, and wait for the answer."""
    fill(page, fact)
    page.click("#go")
    page.wait_for_selector("article")
    page.wait_for_selector("#go:enabled")


def change_results(page: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Have the page see other results than the server sends."""

    def changed(route: Any) -> None:
        response = route.fetch()
        before, event, data = response.text().partition("event: result\ndata: ")
        result = json.loads(data)
        change(result)
        body = f"{before}{event}{json.dumps(result)}\n\n"
        route.fulfill(response=response, body=body)

    page.route("**/v1/judgments", changed)


def test_articles_are_written_as_elsewhere(page: Any) -> None:
    articles = ["264", "358-1", "287.2", "133.1-1", "10", "110", "104", "20-3", "民法典5"]
    functions = (PAGE / "page.js").read_text("utf-8").partition("const TEXTS")[0]
    shown = page.evaluate(f"all => {{ {functions}\nreturn all.map(articleName); }}", articles)
    assert shown == [article_name(article) for article in articles]


def test_a_case_becomes_cards_and_another_defendant_another(page: Any) -> None:
    ask(page)
    assert page.locator("article h3").all_inner_texts() == ["张某甲", "李某乙"]
    assert "罪名" in page.locator("article").first.inner_text()
    assert page.locator("article .bars li").count() > 0
    assert page.locator("#marked mark").count() == 3
    page.fill("#fact", FACT.replace("张某甲", "赵某丁"))
    assert page.is_hidden("#result"), "it belongs to another text"
    ask(page)
    page.hover("article >> nth=1")
    page.wait_for_selector("#marked mark.picked >> nth=1")
    assert page.locator("#marked mark.picked").count() == 2, "the sentences that name 李某乙"
    assert "judgments" in page.locator("#raw").text_content()
    page.fill("#names input >> nth=1", "王某丙")
    page.click("#go")
    page.wait_for_selector("article h3:text('王某丙')")
    assert page.locator("article h3").all_inner_texts() == ["张某甲", "王某丙"]
    assert "事实中没有提到王某丙。" in page.inner_text("#state")
    in_tests.take_pictures(page, "page-zh")


def test_the_example_case_is_filled_in(page: Any) -> None:
    from playwright.sync_api import expect

    page.fill("#fact", FACT)
    add(page, "张某甲")  # of the other case
    page.click("#example")
    # wait_for_function evaluates a string in the page, which the page's policy forbids.
    expect(page.locator("#fact")).to_have_value(re.compile("林某2"))
    sample = json.loads((PAGE / "sample.json").read_text("utf-8"))
    ask(page, sample["fact"])
    assert page.locator("article h3").all_inner_texts() == sample["defendants"]


def test_the_demo_s_model_and_what_a_confidence_is_are_told(page: Any) -> None:
    ask(page)
    assert "演示用的小模型" in page.inner_text("#demo")
    assert "虚构" not in page.inner_text("#demo"), "it may have been trained on real cases"
    said = "置信度是该项回答完全正确的概率，由文本分类器估计；模型回答过验证集的，"
    assert said in page.inner_text("#state")
    assert "置信度 " in page.locator("article td").first.inner_text()
    assert page.inner_text("article h4 >> nth=0") == "各刑罚档次的概率"
    page.click("#language")
    assert "A tiny demo model answers." in page.inner_text("#demo")
    assert "invented" not in page.inner_text("#demo")
    assert "if it answered any" in page.inner_text("#state")
    assert "confidence " in page.locator("article td").first.inner_text()
    labels = {"task": "judgment", "demo": False}
    page.route("**/v1/labels", lambda route: route.fulfill(json=labels))
    page.reload()
    page.wait_for_load_state("networkidle")
    assert page.is_hidden("#demo"), "another model answers"


def test_the_classifier_s_answer_is_beside_the_model_s(page: Any) -> None:
    def change(result: dict[str, Any]) -> None:
        answer = {"charges": ["盗窃罪", "抢劫罪"], "articles": ["264"], "penalty": "拘役"}
        own = {"charges": ["抢劫罪", "盗窃罪"], "articles": ["264", "263"], "penalty": "拘役"}
        for judgment in result["answer"]["judgments"]:
            judgment.update(answer)
        result["classifier"] = [own for _ in result["classifier"]]

    change_results(page, change)
    ask(page)
    rows = page.locator("article >> nth=0 >> tr")
    assert rows.nth(0).locator("th").all_inner_texts() == ["字段", "模型", "文本分类器"]
    charges = rows.nth(1).locator("td").nth(1).inner_text()
    assert "抢劫罪" in charges
    assert "≠" not in charges, "the order of a set does not matter"
    articles = rows.nth(2).locator("td").nth(1).inner_text()
    assert articles.endswith("≠ 与模型不一致")
    assert "第二百六十三条" in articles
    assert rows.nth(3).locator("td").nth(1).inner_text() == "拘役"
    in_tests.take_pictures(page, "page-differs-zh")
    page.click("#language")
    assert "≠ differs from the model" in rows.nth(2).inner_text()
    in_tests.take_pictures(page, "page-differs-en")


@pytest.mark.parametrize(
    ("by", "head", "said"),
    [
        (("model", "model"), "模型", ["", ""]),
        (("classifier", "classifier"), "文本分类器", ["", ""]),
        (("model", "classifier"), "答案", [" · 模型", " · 文本分类器"]),
    ],
)
def test_the_column_of_answers_is_named_by_who_answered(
    page: Any, by: tuple[str, str], head: str, said: list[str]
) -> None:
    def change(result: dict[str, Any]) -> None:
        result["answered_by"] = {"charges": by[0], "articles": by[0], "penalty": by[1]}

    change_results(page, change)
    ask(page)
    rows = page.locator("article >> nth=0 >> tr")
    assert rows.nth(0).locator("th").all_inner_texts() == ["字段", head, "文本分类器"]
    for row, who in zip((1, 3), said, strict=True):
        small = rows.nth(row).locator("td").nth(0).locator("small").last.inner_text()
        assert small.startswith("置信度 ")
        assert re.sub("置信度 [<>]? ?\\d+%", "", small) == who


def test_the_line_under_a_sentence_has_its_colors_in_turn(page: Any) -> None:
    ask(page)
    line = "one => getComputedStyle(one).backgroundImage"
    of_two = page.locator("#marked mark").first.evaluate(line)
    assert of_two.startswith("repeating-linear-gradient(90deg, ")
    blue, _, red, _ = re.findall(r"rgb\([\d, ]+\)", of_two)
    assert blue != red
    assert re.findall(r"\) (\d+px)", of_two) == ["0px", "16px", "16px", "32px"], "again and again"


def test_without_a_classifier_nothing_is_said_of_one(page: Any) -> None:
    def change(result: dict[str, Any]) -> None:
        for key in ("classifier", "confidence", "probabilities"):
            del result[key]

    change_results(page, change)
    ask(page)
    assert "分类器" not in page.inner_text("#result")
    assert "%" not in page.inner_text("#result")
    assert page.locator("article >> nth=0 >> tr >> nth=0 >> td").count() == 1
    in_tests.take_pictures(page, "page-alone-zh")


def test_an_article_that_training_never_had_with_the_charges_is_doubted(page: Any) -> None:
    def without_pairs(route: Any) -> None:
        response = route.fetch()
        labels = response.json()
        if response.ok:  # without the key there are none
            labels["pairs"] = {charge: {} for charge in labels["pairs"]}
        route.fulfill(status=response.status, json=labels)

    page.route("**/v1/labels", without_pairs)
    ask(page)
    articles = page.locator("article tr >> nth=2 >> td >> nth=0 >> p").count()
    doubted = "article tr >> nth=2 >> td >> nth=0 >> small:has-text('从未与所列罪名')"
    assert page.locator(doubted).count() == articles > 0


def test_empty_facts_and_a_wrong_key_are_said_to_be_wrong(page: Any) -> None:
    page.click("#go")
    assert page.inner_text("#problem") == "请先填写案件事实。"
    page.fill("#fact", FACT)
    page.click("#go")
    assert page.inner_text("#problem") == "请添加被告人的姓名。"
    add(page, "张某甲")
    page.click("#go")  # no key yet
    page.wait_for_selector("#problem:has-text('密钥')")
    assert page.is_visible("#key")
    ask(page)
    assert page.evaluate("document.activeElement.id") == "result-title"
    page.fill("#key", "密钥")
    page.click("#go")
    page.wait_for_selector("#problem:has-text('半角')")
    assert page.is_hidden("#result"), "an old answer does not stand under a new case"
    page.fill("#key", KEY)
    page.route("**/v1/judgments", lambda route: route.fulfill(status=502, body="<html>"))
    page.click("#go")  # a proxy answers
    page.wait_for_selector("#problem:has-text('连不上服务')")


def test_both_languages_and_the_keyboard(page: Any) -> None:
    assert "不是判决" in page.inner_text(".notice")
    page.click("#language")
    assert "not a judgment" in page.inner_text(".notice")
    fill(page)
    page.focus("#fact")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("article")
    assert "Charges" in page.locator("article").first.inner_text()
    page.wait_for_selector("#go:enabled")
    page.focus("article >> nth=0")
    page.wait_for_selector("#marked mark.picked >> nth=1")
    assert page.locator("#marked mark.picked").count() == 2
    in_tests.take_pictures(page, "page-en")


def test_markup_in_a_case_stays_text(page: Any) -> None:
    evil = "<img src=x onerror=document.title='owned'>"
    ask(page, FACT + evil)
    assert page.locator("#marked img").count() == 0
    assert evil in page.inner_text("#marked")
    assert page.title() == "判决 panjue"
