"""The page in a real headless Chromium, against the running server."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts.plumbing.files import read_lines
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


@pytest.fixture
def demo_server(request: pytest.FixtureRequest) -> Iterator[PanjueServe]:
    """Return the server of `in_tests.DEMO`, if that is set; else that of all tests."""
    if in_tests.DEMO is None:
        yield request.getfixturevalue("server")
        return
    started = PanjueServe(in_tests.DEMO)
    try:
        started.ready()
        yield started
    finally:
        started.end()


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
    script = (PAGE / "page.js").read_text("utf-8")
    functions = script[script.index("function articleName") : script.index("const TEXTS")]
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


def test_the_first_page_shows_its_question(browser: Any, demo_server: PanjueServe) -> None:
    """The picture of the first page is of `in_tests.DEMO`, if that is set."""
    question = json.loads((PAGE / "sample.json").read_text("utf-8"))
    first_page = Path(__file__).parents[2] / "README.md"
    assert json.dumps(question, ensure_ascii=False) in first_page.read_text("utf-8")
    opened = browser.new_page(locale="en-US")
    opened.goto(demo_server.url)
    opened.click("#example")
    opened.wait_for_selector("#names input >> nth=1")
    if in_tests.DEMO is None:  # this server wants a key
        fill(opened, question["fact"])
    for _ in range(2):  # the first reply of an engine takes longer, and the page shows the seconds
        with opened.expect_response("**/v1/judgments"):
            opened.click("#go")
        opened.wait_for_selector("#go:enabled")
    assert opened.locator("article h3").all_inner_texts() == question["defendants"]
    opened.mouse.move(0, 0)  # no sentence is picked
    in_tests.take_picture_of_first_page(opened, "page")
    opened.close()


def test_the_demo_s_model_and_what_a_confidence_is_are_told(page: Any) -> None:
    ask(page)
    assert "演示用的小模型" in page.inner_text("#demo")
    assert "虚构" not in page.inner_text("#demo"), "it may have been trained on real cases"
    said = page.inner_text("#state")
    assert "置信度：该项答案完全正确的概率，由文本分类器估计" in said
    assert "模型若已回答过验证集，则模型自身的概率也计入" in said
    assert "置信度 " in page.locator("article td").first.inner_text()
    assert page.inner_text("article h4 >> nth=0") == "各刑罚档次的概率"
    page.click("#language")
    assert "A tiny demo model answers." in page.inner_text("#demo")
    assert "invented" not in page.inner_text("#demo")
    assert "its own probability counts, too" in page.inner_text("#state")
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
    assert articles.endswith("≠ 不一致")
    assert "第二百六十三条" in articles
    assert rows.nth(3).locator("td").nth(1).inner_text() == "拘役"
    in_tests.take_pictures(page, "page-differs-zh")
    page.click("#language")
    assert "≠ differs" in rows.nth(2).inner_text()
    in_tests.take_pictures(page, "page-differs-en")


def by_field(charges: str, penalty: str) -> Callable[[dict[str, Any]], None]:
    """Return a change after which these two answered, and said different things of all fields."""
    said = {
        "model": {"charges": ["盗窃罪"], "articles": ["264"], "penalty": "拘役"},
        "classifier": {"charges": ["抢劫罪"], "articles": ["263"], "penalty": "无期徒刑"},
    }
    answered_by = {"charges": charges, "articles": charges, "penalty": penalty}

    def change(result: dict[str, Any]) -> None:
        for judgment in result["answer"]["judgments"]:
            judgment.update({name: said[who][name] for name, who in answered_by.items()})
        people = len(result["defendants"])
        result.update({who: [said[who]] * people for who in said}, answered_by=answered_by)

    return change


MIXED = ["答案", "未采用的答案"]


@pytest.mark.parametrize(
    ("by", "heads", "who"),
    [
        (("model", "model"), ["模型", "文本分类器"], []),
        (("classifier", "classifier"), ["文本分类器", "模型"], []),
        (("model", "classifier"), MIXED, [("模型", "文本分类器"), ("文本分类器", "模型")]),
        (("classifier", "model"), MIXED, [("文本分类器", "模型"), ("模型", "文本分类器")]),
    ],
)
def test_who_answered_a_field_and_what_the_other_one_said(
    page: Any, by: tuple[str, str], heads: list[str], who: list[tuple[str, str]]
) -> None:
    change_results(page, by_field(*by))
    ask(page)
    rows = page.locator("article >> nth=0 >> tr")
    assert rows.nth(0).locator("th").all_inner_texts() == ["字段", *heads]
    said = {"model": ("盗窃罪", "拘役"), "classifier": ("抢劫罪", "无期徒刑")}
    for row, number in ((1, 0), (3, 1)):
        taken, other = rows.nth(row).locator("td").all_inner_texts()
        answerer = by[number]
        [left_out] = said.keys() - {answerer}
        assert said[answerer][number] in taken
        assert said[left_out][number] in other
        assert other.endswith("≠ 不一致")
        named = who[number] if who else ("", "")
        assert re.sub("置信度 [<>]? ?\\d+%", "", taken).endswith(f" · {named[0]}" if who else "")
        assert (named[1] in other) == (named[1] != "") or not who
    if who:
        in_tests.take_pictures(page, f"serve-{by[0]}-{by[1]}-zh")
        page.click("#language")
        heads_now = rows.nth(0).locator("th").all_inner_texts()
        assert heads_now == ["Field", "Answer", "Not taken"]
        in_tests.take_pictures(page, f"serve-{by[0]}-{by[1]}-en")


def test_what_the_reply_does_not_have_is_said(page: Any) -> None:
    def change(result: dict[str, Any]) -> None:
        by_field("classifier", "classifier")(result)
        result["model"] = [dict.fromkeys(("charges", "articles", "penalty"))] * 2

    change_results(page, change)
    ask(page)
    cells = page.locator("article >> nth=0 >> tr >> td:nth-child(3)").all_inner_texts()
    assert cells == ["模型未答"] * 3, "and nothing differs"
    page.click("#language")
    assert page.inner_text("article >> nth=0 >> tr >> td >> nth=1") == "not in the reply"


def paste(page: Any, text: str) -> None:
    """Paste a text in place of the facts, as a user does."""
    page.fill("#fact", text)
    page.focus("#fact")
    for key in ("Control+a", "Control+x", "Control+v"):
        page.keyboard.press(key)


def names(page: Any) -> list[str]:
    return [str(field.input_value()) for field in page.locator("#names input").all()]


def test_whom_the_facts_call_defendants_is_proposed(page: Any) -> None:
    assert page.is_hidden("#proposed")
    paste(page, FACT)
    assert names(page) == ["张某甲", "李某乙"]
    assert "请核对" in page.inner_text("#proposed")
    assert page.is_hidden("#result"), "nothing is asked before the user has seen them"
    in_tests.take_pictures(page, "serve-proposed-zh")
    page.click("#language")
    assert "Check them" in page.inner_text("#proposed")
    in_tests.take_pictures(page, "serve-proposed-en")
    paste(page, FACT.replace("张某甲", "赵某丁"))
    assert names(page) == ["赵某丁", "李某乙"], "nobody has touched them"
    page.fill("#names input >> nth=1", "李某")
    paste(page, FACT)
    assert names(page) == ["赵某丁", "李某"], "what the user wrote stays"
    assert page.is_hidden("#proposed")


def test_without_names_the_button_proposes_some_and_asks_nothing(page: Any) -> None:
    page.fill("#fact", FACT)  # typed
    assert names(page) == []
    page.click("#go")
    assert page.inner_text("#problem") == "被告人是根据事实填入的，请核对后再点“预测”。"
    assert names(page) == ["张某甲", "李某乙"]
    assert page.is_hidden("#result")
    ask(page)
    assert page.locator("article h3").all_inner_texts() == ["张某甲", "李某乙"]


PROPOSED = {
    "被告人张某甲伙同被告人李某乙盗窃。": ["张某甲", "李某乙"],
    "被告人王某、赵某（另案处理）到场。": ["王某"],
    "被告人王某、孙某、赵某（二人另案处理）到场。": ["王某"],
    "被告人王某、孙某、赵某(均在逃)到场。": ["王某"],
    "被告人王某（绰号“三哥”）、赵某（已判刑）、钱某到场。": ["王某", "钱某"],
    "被告人徐某A、张某1、李×、陈XX、王某某在场。": ["徐某A", "张某1", "李×", "陈XX", "王某某"],
    "被告人张某1与被告人张某12共谋，李某2于2019年": ["张某1", "张某12"],
    "被告人李某2日到场": ["李某"],
    "被告人欧阳某某、买买提·某某抢劫，被告人艾力•买买提盗窃。": [
        *("欧阳某某", "买买提·某某", "艾力·买买提"),
    ],
    "被告人王建国伙同李刚，于2020年3月盗窃。": ["王建国"],
    "被告人欧阳锋、司马相如、于建国在家。": ["欧阳锋", "司马相如", "于建国"],
    "被告人刘军通过微信联系买家，刘军通过他人付款。": ["刘军"],
    "被告人张某军在家，张某军与张某的钱，被告人张某通过他人。": ["张某军", "张某"],
    "被告人 张 某 甲、\n李某乙盗窃。": ["张某甲", "李某乙"],
    "上诉人（原审被告人）张三（男，1980年生），被告人：李四。": ["张三", "李四"],
    "被告人甲、乙、丙共同盗窃，被告人丙醚": ["甲", "乙", "丙"],
    "被告人王某１、王某２共谋。": ["王某1", "王某2"],
    "被告人张某与王某因琐事发生口角，王某受伤。": ["张某"],
    "被告人及其辩护人辩称，被告人的行为于2016年，被告人于当日归案，被告人方赔偿。": [],
    "被告人在某酒店，被告人将某公司，被告人系初犯，被告人": [],
    "": [],
}


@pytest.mark.parametrize("fact", PROPOSED)
def test_names_after_the_word_for_defendant(page: Any, fact: str) -> None:
    found = "fact => import('/defendants.js').then(({ defendantsIn }) => defendantsIn(fact))"
    assert page.evaluate(found, fact) == PROPOSED[fact]


def test_in_real_cases_the_names_are_found_and_few_others(page: Any, real_data: Path) -> None:
    cases = [line for _, line in read_lines(real_data / "drdz/dev.jsonl")]
    found = "facts => import('/defendants.js').then(({ defendantsIn }) => facts.map(defendantsIn))"
    proposed = page.evaluate(found, [case["fact"] for case in cases])
    called = called_found = total = right = equal = 0
    for case, some in zip(cases, proposed, strict=True):
        defendants = set(case["defendants"])
        named = {name for name in defendants if f"被告人{name}" in case["fact"]}
        called += len(named)
        called_found += len(named.intersection(some))
        total += len(some)
        right += len(defendants.intersection(some))
        equal += defendants == set(some)
    assert called_found / called > 0.99
    assert right / total > 0.97
    assert equal / len(cases) > 0.87


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
        for key in ("classifier", "confidence", "probabilities", "model", "answered_by"):
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
    page.fill("#fact", FACT.replace("被告人", ""))
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
