"""Very long texts, which must keep nobody waiting: one at a time, and no more than needed."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.finetune.trained import open_trained
from panjue.prompts.example import Example
from panjue.prompts.tasks.judgment.read import by_hand
from panjue.serve.ask import Question, QuestionMaker, Refusal
from panjue.serve.judge import LONG, BadCase, CaseRequest, ServedRun
from panjue.serve.settings import ServeConfig

CLAUSE = "被告人张某甲在超市内窃取他人财物后逃离现场，"


@pytest.fixture(scope="module")
def served(trained: Path, merged: Path) -> ServedRun:
    return ServedRun(open_trained(trained), ServeConfig.model_validate({"answer": "model"}))


@given(
    count=st.integers(1, 400), end=st.sampled_from("，。"), other=st.sampled_from(["", "他走了。"])
)
def test_only_what_could_not_be_asked_is_hopeless(
    question_maker: QuestionMaker, count: int, end: str, other: str
) -> None:
    example = by_hand((CLAUSE[:-1] + end + other) * count, ["张某甲"])
    try:
        question_maker.refuse_hopeless(example)
    except Refusal:
        with pytest.raises(Refusal, match="the prompt needs"):
            question_maker.question(example)


def test_a_long_text_without_a_full_stop_is_refused_before_it_is_looked_at(
    served: ServedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*_: object) -> None:
        raise AssertionError("classifier or tokenizer looked at all of it")

    monkeypatch.setattr(QuestionMaker, "question", look)
    monkeypatch.setattr(QuestionMaker, "opinions_on", look)
    case = CaseRequest(fact=CLAUSE * 4000, defendants=["张某甲"])
    with pytest.raises(BadCase, match=r"cannot be asked: the sentences that must stay need more"):
        asyncio.run(served.question(case))


def test_a_long_text_is_asked_as_any_other(served: ServedRun) -> None:
    fact = CLAUSE + "他走了。" + "天气很好。" * LONG
    _, question = asyncio.run(served.question(CaseRequest(fact=fact, defendants=["张某甲"])))
    same = served.question_maker.question(by_hand(fact, ["张某甲"]))
    assert (question.prompt, question.opinions) == (same.prompt, same.opinions)


def test_long_texts_are_looked_at_one_at_a_time_and_others_beside_them(
    served: ServedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()
    release = threading.Event()
    running = 0
    most = 0

    def look(maker: QuestionMaker, example: Example) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        started.set()
        release.wait(60)
        time.sleep(0.01)  # a second thread, if there were one, would begin meanwhile
        running -= 1

    monkeypatch.setattr(QuestionMaker, "refuse_hopeless", look)

    async def ask(fact: str) -> Question:
        _, question = await served.question(CaseRequest(fact=fact, defendants=["张某甲"]))
        return question

    async def ask_all() -> None:
        fact = CLAUSE + "天气很好。" * LONG
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(ask(fact))
            await asyncio.to_thread(started.wait, 60)
            await ask(CLAUSE)
            release.set()

    asyncio.run(ask_all())
    assert most == 1
