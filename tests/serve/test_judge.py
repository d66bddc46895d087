"""`/v1/judgments` over a real vLLM, and the same from Python: prompts and answers as offline."""

import asyncio
import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_lines
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.serve.ask import Asker
from panjue.serve.judge import load
from tests.served import PanjueServe

TASK = load_task("judgment")
FACT = "经审理查明：被告人张某甲、李某乙共同盗窃手机一部，价值人民币3000元。被告人张某甲系主犯。"
NAMES = ["张某甲", "李某乙"]
CASE: dict[str, Any] = {"fact": FACT, "defendants": NAMES}


def test_a_server_answers_as_generate_does(
    http: httpx.Client, answered: Path, workshop: Path, asker: Asker
) -> None:
    def rows(name: str) -> dict[Any, dict[str, Any]]:
        return {row["id"]: row for _, row in read_lines(answered / "answers/test" / name)}

    replies = rows("completions.jsonl")
    submitted = rows("submission.jsonl")
    confidence = rows("confidence.jsonl")
    cases = list(Reader(TASK).read(workshop / "demo/test.jsonl"))
    bodies = [{"fact": case.text, "defendants": list(case.names)} for case in cases]
    with ThreadPoolExecutor(8) as several:
        answers = list(several.map(lambda body: http.post("/v1/judgments", json=body), bodies))
    others = []
    for case, answer in zip(cases, answers, strict=True):
        online = answer.json()
        assert online["usage"]["prompt_tokens"] == replies[case.id]["prompt_tokens"]
        assert asker.advisor
        assert online["classifier"] == [one.answer for one in asker.advisor.opinions(case)]
        if online["judgments"] == submitted[case.id]["judgments"]:
            assert online["confidence"] == confidence[case.id]["confidence"]
        else:
            others.append(case.id)
    assert len(others) <= 1, "other than at two tokens that are equally likely"


def test_a_judgment_with_everything_that_comes_with_it(http: httpx.Client) -> None:
    told = http.post("/v1/judgments", json=CASE).json()
    assert told["defendants"] == [judgment["name"] for judgment in told["judgments"]] == NAMES
    parts = (told["answer"]["judgments"], told["confidence"], told["probabilities"])
    for judgment, words, sure, shares in zip(told["judgments"], *parts, strict=True):
        assert PENALTIES[judgment["penalty"]] == words["penalty"]
        assert set(sure) == {"charges", "articles", "penalty"}
        assert all(0 <= chance <= 1 for chance in sure.values())
        assert sum(shares["penalty"].values()) == pytest.approx(1)
    assert (told["repairs"], told["finish"], told["notes"]) == ([], "stop", [])
    usage = told["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    again = http.post("/v1/judgments", json={**CASE, "defendants": ["李某乙", "王五"]}).json()
    assert [judgment["name"] for judgment in again["judgments"]] == ["李某乙", "王五"]
    assert again["notes"] == ["the facts do not name 王五"]


def test_a_stream_grows_into_the_same_answer(http: httpx.Client) -> None:
    response = http.post("/v1/judgments", json={**CASE, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    kinds = re.findall("^event: (.*)$", response.text, re.MULTILINE)
    start, *deltas, result = map(
        json.loads, re.findall("^data: (.*)$", response.text, re.MULTILINE)
    )
    assert kinds == ["start", *("delta" for _ in deltas), "result"]
    assert start == {"defendants": NAMES}
    assert list(json.loads("".join(delta["text"] for delta in deltas))) == ["judgments"]
    assert result == http.post("/v1/judgments", json=CASE).json()


def test_labels_models_health_and_metrics(http: httpx.Client, server: PanjueServe) -> None:
    labels = http.get("/v1/labels").json()
    assert labels["task"] == "judgment"
    assert labels["labels"]["charges"]["盗窃罪"] > 0
    assert labels["demo"] is True
    assert http.get("/v1/labels?model=other").status_code == 404
    [model] = http.get("/v1/models").json()["data"]
    assert (model["id"], model["root"]) == ("panjue", "panjue"), "not where it lies on disk"
    for path in ("/health", "/readyz", "/"):  # no key needed
        assert httpx.get(server.url + path, timeout=60).status_code == 200
    assert "vllm:num_requests_running" in http.get("/metrics").text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fact": ...}, "fact: Field required"),
        ({"fact": " \n"}, "'fact' must be a text that is not empty"),
        ({"fact": 1}, "fact: Input should be a valid string"),
        ({"defendants": ...}, "defendants: Field required"),
        ({"defendants": []}, "'defendants' must list"),
        (
            {"defendants": NAMES, "facts": FACT, "fact": ...},
            "'facts' is unknown; allowed are: fact,",
        ),
        ({"schema": {"type": "string"}}, "'schema' is unknown"),
        ({"defendants": [f"被告人{n}" for n in range(201)]}, "at most 200 items"),
        ({"fact": FACT[5:20] + "出行" * 20_000}, "this case cannot be asked: the prompt needs"),
    ],
)
def test_cases_that_are_refused(http: httpx.Client, change: dict[str, Any], message: str) -> None:
    body = {**CASE, **change}
    given = {name: value for name, value in body.items() if value is not ...}
    answer = http.post("/v1/judgments", json=given)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert http.post("/v1/judgments", json=CASE).status_code == 200


def test_a_case_that_is_too_long_says_what_was_left_out(http: httpx.Client) -> None:
    told = http.post("/v1/judgments", json={**CASE, "fact": "当日天气晴朗。" * 2000 + FACT}).json()
    assert told["dropped_sentences"] > 1000
    assert told["defendants"] == NAMES


def test_python_gets_what_the_server_answers(
    trained: Path, small: dict[str, Any], http: httpx.Client
) -> None:
    handlers = logging.getLogger().handlers[:]
    method = logging.Logger.callHandlers
    cases = [{"fact": FACT, "defendants": [f"甲{i}"]} for i in range(40)]

    async def in_a_notebook() -> Any:
        with load(trained, {**small, "in_flight": 4}) as judge:
            one = judge(**CASE)
            assert judge(FACT, ["李某乙"])["judgments"][0]["name"] == "李某乙"
            with pytest.raises(UserError, match="defendants: Field required"):
                next(judge.many([{"fact": FACT}]))
            several = judge.many(iter(cases))
            assert next(several)["defendants"] == ["甲0"]
            names = [answer["defendants"] for answer in several]
            next(judge.many(iter(cases)))  # which nobody reads to the end
        with pytest.raises(UserError, match="within the `with` block"):
            judge(**CASE)
        return one, names

    one, names = asyncio.run(in_a_notebook())
    assert one == http.post("/v1/judgments", json=CASE).json()
    assert names == [[f"甲{i}"] for i in range(1, 40)], "in their order"
    assert (logging.getLogger().handlers, logging.Logger.callHandlers) == (handlers, method)


def test_the_reason_why_it_does_not_start_is_one_line(trained: Path) -> None:
    settings = {"engine": {"dtype": "nonsense"}}
    with pytest.raises(UserError, match=r"^engine: dtype"), load(trained, settings):
        pass
