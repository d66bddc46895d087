"""`/v1/judgments` over a real vLLM, and the same from Python: prompts and answers as offline."""

import asyncio
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from panjue.eval.opinions import load_advisor
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_lines
from panjue.prompts.plumbing.run import Run
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.serve.ask import Asker
from panjue.serve.judge import ServedRun, case_request, load
from panjue.serve.settings import ServeConfig
from tests.serve.conftest import Running

TASK = load_task("judgment")
FACT = "经审理查明：被告人张某甲、李某乙共同盗窃手机一部，价值人民币3000元。被告人张某甲系主犯。"
CASE: dict[str, Any] = {"fact": FACT, "defendants": ["张某甲", "李某乙"]}


def events(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    parts = response.text.strip().split("\n\n")
    found = [part.split("\n", 1) for part in parts]
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in found
    ]


def test_a_server_answers_as_generate_does(
    http: httpx.Client, answered: Path, workshop: Path, asker: Asker
) -> None:
    files = ("completions.jsonl", "submission.jsonl", "confidence.jsonl")
    offline = [[row for _, row in read_lines(answered / "answers/test" / file)] for file in files]
    by_id = [{row["id"]: row for row in rows} for rows in offline]
    advisor = load_advisor(answered / "adapter", TASK, asker.labels)
    assert advisor
    cases = list(Reader(TASK).read(workshop / "demo/test.jsonl"))
    with ThreadPoolExecutor(8) as several:
        bodies = [{"fact": case.text, "defendants": list(case.names)} for case in cases]
        answers = list(several.map(lambda body: http.post("/v1/judgments", json=body), bodies))
    others = []
    for case, online in zip(cases, (answer.json() for answer in answers), strict=True):
        reply, submitted, confidence = (rows[case.id] for rows in by_id)
        assert online["usage"]["prompt_tokens"] == reply["prompt_tokens"]
        assert online["classifier"] == [one.answer for one in advisor.opinions(case)]
        if online["judgments"] == submitted["judgments"]:
            assert online["confidence"] == confidence["confidence"]
        else:
            others.append(case.id)
    assert len(others) <= 1, "other than at two tokens that are equally likely"


def test_a_judgment_with_everything_that_comes_with_it(http: httpx.Client) -> None:
    answer = http.post("/v1/judgments", json=CASE)
    assert answer.status_code == 200
    told = answer.json()
    assert told["defendants"] == CASE["defendants"]
    assert [j["name"] for j in told["judgments"]] == ["张某甲", "李某乙"]
    parts = (told["answer"]["judgments"], told["confidence"], told["probabilities"])
    for judgment, words, sure, shares in zip(told["judgments"], *parts, strict=True):
        assert PENALTIES[judgment["penalty"]] == words["penalty"]
        assert set(sure) == {"charges", "articles", "penalty"}
        assert all(0 <= p <= 1 for p in sure.values())
        assert sum(shares["penalty"].values()) == pytest.approx(1)
    assert told["repairs"] == []
    assert told["finish"] == "stop"
    assert told["usage"]["completion_tokens"] > 0
    assert told["notes"] == []
    others = {**CASE, "defendants": ["李某乙", "王五"]}
    again = http.post("/v1/judgments", json=others).json()
    assert [j["name"] for j in again["judgments"]] == ["李某乙", "王五"]
    assert again["notes"] == ["the facts do not name 王五"]


def test_the_classifier_thinks_beside_the_event_loop(
    trained: Path, merged: Path, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noting(function: Any) -> Any:
        def noted(*words: Any) -> Any:
            threads.append(threading.current_thread())
            return function(*words)

        return noted

    for name in ("_question", "_judgments"):
        monkeypatch.setattr(ServedRun, name, noting(getattr(ServedRun, name)))
    run = ServedRun(Run(trained), ServeConfig.model_validate({"max_tokens": 3072}))
    asked = llm.runner.run(run.question(case_request(CASE)))
    llm.runner.run(run.answer(llm, *asked))
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_a_stream_grows_into_the_same_answer(http: httpx.Client) -> None:
    streamed = events(http.post("/v1/judgments", json={**CASE, "stream": True}))
    kinds = [kind for kind, _ in streamed]
    assert kinds[0] == "start"
    assert kinds[-1] == "result"
    assert set(kinds[1:-1]) == {"delta"}
    assert streamed[0][1] == {"defendants": ["张某甲", "李某乙"]}
    text = "".join(data["text"] for kind, data in streamed if kind == "delta")
    assert list(json.loads(text)) == ["judgments"]
    assert streamed[-1][1] == http.post("/v1/judgments", json=CASE).json()


def test_labels_models_health_and_metrics(http: httpx.Client, server: Running) -> None:
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


BAD_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no facts": ({"fact": ...}, "fact"),
    "empty facts": ({"fact": " \n"}, "'fact' must be a text that is not empty"),
    "no defendants": ({"defendants": ...}, "defendants: Field required"),
    "nobody listed": ({"defendants": []}, "'defendants' must list"),
    "a field that is none": ({"task": "judgment"}, "'task' is unknown"),
    "a schema of the client's": ({"schema": {"type": "string"}}, "'schema' is unknown"),
    "a thousand defendants": (
        {"defendants": [f"被告人{n}" for n in range(1000)]},
        "at most 200 items",
    ),
    "a sentence that never ends": ({"fact": FACT[5:20] + "出行" * 20_000}, "cannot be asked"),
}


@pytest.mark.parametrize("what", BAD_CASES)
def test_cases_that_are_refused(http: httpx.Client, what: str) -> None:
    change, message = BAD_CASES[what]
    body = {k: v for k, v in {**CASE, **change}.items() if v is not ...}
    answer = http.post("/v1/judgments", json=body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert http.post("/v1/judgments", json=CASE).status_code == 200


def test_a_case_that_is_too_long_says_what_was_left_out(http: httpx.Client) -> None:
    told = http.post("/v1/judgments", json={**CASE, "fact": "当日天气晴朗。" * 2000 + FACT}).json()
    assert told["dropped_sentences"] > 1000
    assert told["defendants"] == ["张某甲", "李某乙"]


def test_python_gets_what_the_server_answers(
    trained: Path, small: dict[str, Any], http: httpx.Client
) -> None:
    handlers, method = logging.getLogger().handlers[:], logging.Logger.callHandlers
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
            left = judge.many(iter(cases))  # which nobody reads to the end
            next(left)
            with pytest.raises(UserError, match="'facts' is unknown"):
                next(judge.many([{"facts": FACT}]))
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
