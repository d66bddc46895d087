"""The page in a real headless Chromium, against the running server."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts.tasks.judgment.articles import article_name
from panjue.serve.middleware import PAGE
from tests import browser as in_tests

FACT = (
    "经审理查明：2020年3月，被告人张某甲、李某乙共同盗窃手机一部，价值人民币3000元。"
    "张某甲系主犯。李某乙归案后如实供述。"
)
browser = in_tests.browser  # the fixture


@pytest.fixture
def page(browser: Any, server: Any) -> Iterator[Any]:
    """Return the page as a reader of Chinese opens it, with the key already given."""
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


def ask(page: Any, fact: str, key: str) -> None:
    page.fill("#fact", fact)
    if not page.locator("#names input").count():
        add(page, "张某甲", "李某乙")
    page.evaluate("document.getElementById('keyed').hidden = false")
    page.fill("#key", key)
    page.click("#go")


def add(page: Any, *names: str) -> None:
    for name in names:
        page.click("#add")
        page.fill("#names input >> nth=-1", name)


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
    script = (Path(__file__).parents[2] / "serve/page/page.js").read_text("utf-8")
    functions = script.partition("const TEXTS")[0]
    shown = page.evaluate(f"all => {{ {functions}\nreturn all.map(articleName); }}", articles)
    assert shown == [article_name(article) for article in articles]


def test_a_case_becomes_cards_and_another_defendant_another(page: Any, server: Any) -> None:
    ask(page, FACT, server.key)
    page.wait_for_selector("article >> nth=1")
    assert page.locator("article h3").all_inner_texts() == ["张某甲", "李某乙"]
    assert "罪名" in page.locator("article").first.inner_text()
    assert page.locator("article .bars li").count() > 0
    assert page.locator("#marked mark").count() == 3
    page.fill("#fact", FACT.replace("张某甲", "赵某丁"))
    assert page.is_hidden("#result"), "it belongs to another text"
    ask(page, FACT, server.key)
    page.wait_for_selector("#go:enabled")  # till then the cards of the case before may stand
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


def test_the_example_case_is_filled_in(page: Any, server: Any) -> None:
    from playwright.sync_api import expect

    page.fill("#fact", FACT)
    add(page, "张某甲")  # of the other case
    page.click("#example")
    # wait_for_function evaluates a string in the page, which the page's policy forbids.
    expect(page.locator("#fact")).to_have_value(re.compile("何某1"))
    sample = json.loads((PAGE / "sample.json").read_text("utf-8"))
    ask(page, sample["fact"], server.key)
    page.wait_for_selector("article >> nth=1")
    assert page.locator("article h3").all_inner_texts() == sample["defendants"]


def test_the_demo_s_model_and_what_a_confidence_is_are_told(page: Any, server: Any) -> None:
    ask(page, FACT, server.key)
    page.wait_for_selector("article")
    assert "演示用的小模型" in page.inner_text("#demo")
    assert "没有任何法律意义" in page.inner_text("#demo")
    said = (
        "置信度是该项回答完全正确的概率，由文本分类器估计；模型答过留出案件的，按那里的对错校准。"
    )
    assert said in page.inner_text("#state")
    assert "置信度 " in page.locator("article td").first.inner_text()
    assert page.inner_text("article h4 >> nth=0") == "各档刑罚：分类器认为的概率"
    page.click("#language")
    assert "A tiny demo model answers." in page.inner_text("#demo")
    assert "if it answered any" in page.inner_text("#state")
    assert "confidence " in page.locator("article td").first.inner_text()
    labels = {"task": "judgment", "demo": False}
    page.route("**/v1/labels", lambda route: route.fulfill(json=labels))
    page.reload()
    page.wait_for_load_state("networkidle")
    assert page.is_hidden("#demo"), "another model answers"


def test_the_classifier_s_answer_is_beside_the_model_s(page: Any, server: Any) -> None:
    def change(result: dict[str, Any]) -> None:
        answer = {"charges": ["盗窃罪", "抢劫罪"], "articles": ["264"], "penalty": "拘役"}
        for judgment, own in zip(result["answer"]["judgments"], result["classifier"], strict=True):
            judgment.update(answer)
            own.update(charges=["抢劫罪", "盗窃罪"], articles=["264", "263"], penalty="拘役")

    change_results(page, change)
    ask(page, FACT, server.key)
    page.wait_for_selector("article")
    rows = page.locator("article >> nth=0 >> tr")
    assert rows.nth(0).locator("th").all_inner_texts() == ["字段", "模型", "文本分类器"]
    charges, articles, penalty = (rows.nth(n).locator("td").nth(1).inner_text() for n in (1, 2, 3))
    assert "抢劫罪" in charges
    assert "≠" not in charges, "the order of a set does not matter"
    assert articles.endswith("≠ 与模型不一致")
    assert "第二百六十三条" in articles
    assert penalty == "拘役"
    in_tests.take_pictures(page, "page-differs-zh")
    page.click("#language")
    assert "≠ differs from the model" in rows.nth(2).inner_text()
    in_tests.take_pictures(page, "page-differs-en")


def test_without_a_classifier_nothing_is_said_of_one(page: Any, server: Any) -> None:
    def change(result: dict[str, Any]) -> None:
        for key in ("classifier", "confidence", "probabilities"):
            del result[key]

    change_results(page, change)
    ask(page, FACT, server.key)
    page.wait_for_selector("article")
    assert "分类器" not in page.inner_text("#result")
    assert "%" not in page.inner_text("#result")
    assert page.locator("article >> nth=0 >> tr >> nth=0 >> td").count() == 1
    in_tests.take_pictures(page, "page-alone-zh")


def test_an_article_that_training_never_had_with_the_charges_is_doubted(
    page: Any, server: Any
) -> None:
    def without_pairs(route: Any) -> None:
        labels = route.fetch().json()
        # Without the key there are none.
        pairs: dict[str, Any] = {charge: {} for charge in labels.get("pairs", ())}
        route.fulfill(status=200 if pairs else 401, json={**labels, "pairs": pairs})

    ask(page, FACT, server.key)
    page.wait_for_selector("article")
    articles = page.locator("article tr >> nth=2 >> td >> nth=0 >> p").count()
    page.route("**/v1/labels", without_pairs)
    page.reload()
    ask(page, FACT, server.key)
    page.wait_for_selector("article")
    doubted = "article tr >> nth=2 >> td >> nth=0 >> small:has-text('从未与所列罪名')"
    assert page.locator(doubted).count() == articles


def test_empty_facts_and_a_wrong_key_are_said_to_be_wrong(page: Any, server: Any) -> None:
    page.click("#go")
    assert page.inner_text("#problem") == "请先填写案件事实。"
    page.fill("#fact", FACT)
    page.click("#go")
    assert page.inner_text("#problem") == "请添加被告人的姓名。"
    add(page, "张某甲")
    page.click("#go")  # no key yet
    page.wait_for_selector("#problem:has-text('密钥')")
    assert page.is_visible("#key")
    ask(page, FACT, server.key)
    page.wait_for_selector("article")
    page.wait_for_selector("#go:enabled")
    assert page.evaluate("document.activeElement.id") == "result-title"
    ask(page, FACT, "密钥")
    page.wait_for_selector("#problem:has-text('半角')")
    assert page.is_hidden("#result"), "an old answer does not stand under a new case"


def test_both_languages_and_the_keyboard(page: Any, server: Any) -> None:
    assert "不是判决" in page.inner_text(".notice")
    page.click("#language")
    assert "not a judgment" in page.inner_text(".notice")
    page.evaluate("document.getElementById('keyed').hidden = false")
    page.fill("#key", server.key)
    add(page, "张某甲", "李某乙")
    page.fill("#fact", FACT)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("article")
    page.keyboard.press("Tab")
    assert "Charges" in page.locator("article").first.inner_text()
    page.wait_for_selector("#go:enabled")
    page.focus("article >> nth=0")
    page.wait_for_selector("#marked mark.picked >> nth=1")
    assert page.locator("#marked mark.picked").count() == 2
    in_tests.take_pictures(page, "page-en")


def test_markup_in_a_case_stays_text(page: Any, server: Any) -> None:
    evil = "<img src=x onerror=document.title='owned'>"
    ask(page, FACT + evil, server.key)
    page.wait_for_selector("article")
    assert page.locator("#marked img").count() == 0
    assert evil in page.inner_text("#marked")
    assert page.title() == "判决 panjue"
