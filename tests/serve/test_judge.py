"""`/v1/judgments` over a real vLLM, and the same from Python: prompts and answers as offline."""

import asyncio
import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.finetune.trained import open_trained
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_lines, write_json
from panjue.prompts.plumbing.records import WITH_LOGPROB, ConfidenceWeights
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.prompts.tasks.judgment.read import by_hand
from panjue.serve.ask import QuestionMaker, Request
from panjue.serve.endpoint import EndpointOutput, EndpointReply
from panjue.serve.judge import CaseFields, ServedRun, agreeing, checked_case, load
from panjue.serve.middleware import JUDGMENTS
from panjue.serve.settings import ServeConfig
from tests.serve.conftest import CASE, FACT, LONG_CASE
from tests.served import PanjueServe, until

TASK = load_task("judgment")
NAMES = ["张某甲", "李某乙"]
FIELDS = ("charges", "articles", "penalty")


def judge(http: httpx.Client, body: dict[str, Any]) -> Any:
    return http.post(JUDGMENTS, json=body).raise_for_status().json()


def test_a_server_answers_as_generate_does(
    http: httpx.Client, answered: Path, workshop: Path, question_maker: QuestionMaker
) -> None:
    def rows(name: str) -> dict[Any, dict[str, Any]]:
        return {row["id"]: row for _, row in read_lines(answered / "answers/test" / name)}

    replies = rows("completions.jsonl")
    submitted = rows("submission.jsonl")
    confidence = rows("confidence.jsonl")
    cases = list(Reader(TASK).read(workshop / "demo/test.jsonl"))
    lines = [line for _, line in read_lines(workshop / "demo/test.jsonl")]  # posted as they are
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(partial(judge, http), lines))
    others = []
    assert question_maker.advisor
    assert [online["id"] for online in answers] == [line["id"] for line in lines]
    for case, online in zip(cases, answers, strict=True):
        decoded = TASK.ask.decode(replies[case.id]["texts"][0], case, question_maker.labels)
        assert online["usage"]["prompt_tokens"] == replies[case.id]["prompt_tokens"]
        assert online["classifier"] == [one.answer for one in question_maker.advisor.opinions(case)]
        if online["judgments"] == submitted[case.id]["judgments"]:
            said = [{field: one[field] for field in FIELDS} for one in decoded.answer["judgments"]]
            assert online["model"] == said
            assert online["confidence"] == confidence[case.id]["confidence"]
        else:
            others.append(case.id)
    assert len(others) <= 1, "other than at two tokens that are equally likely"


def test_a_judgment_with_everything_that_comes_with_it(http: httpx.Client) -> None:
    told = judge(http, CASE)
    assert told["defendants"] == [judgment["name"] for judgment in told["judgments"]] == NAMES
    parts = (told["answer"]["judgments"], told["confidence"], told["probabilities"])
    for judgment, words, sure, shares in zip(told["judgments"], *parts, strict=True):
        assert PENALTIES[judgment["penalty"]] == words["penalty"]
        assert set(sure) == {"charges", "articles", "penalty"}
        assert all(0 <= chance <= 1 for chance in sure.values())
        assert sum(shares["penalty"].values()) == pytest.approx(1)
        assert shares["penalty"][words["penalty"]] == sure["penalty"]
    assert (told["finish"], told["notes"]) == ("stop", [])
    # The schema allows nothing that would have to be repaired, except a label that comes twice.
    assert all(repair.endswith(" repeated") for repair in told["repairs"])
    usage = told["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    other = judge(http, {**CASE, "defendants": ["李某乙", "王五"]})
    assert [judgment["name"] for judgment in other["judgments"]] == ["李某乙", "王五"]
    assert other["notes"] == ["the facts do not name 王五"]


def test_what_each_sentence_names_comes_with_an_answer(http: httpx.Client) -> None:
    texts = ["被告人乙贩卖甲基苯丙胺。", "乙醚一桶被扣押；", "丙未到案。"]
    told = judge(http, {"fact": "".join(texts), "defendants": ["甲", "乙", "丙"]})
    assert [sentence["text"] for sentence in told["sentences"]] == texts
    assert [sentence["defendants"] for sentence in told["sentences"]] == [[1], [], [2]]
    assert told["notes"] == ["the facts do not name 甲"]


def test_a_stream_grows_into_the_same_answer(
    http: httpx.Client, question_maker: QuestionMaker
) -> None:
    response = http.post(JUDGMENTS, json={**CASE, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [event.partition("\n") for event in response.text.strip().split("\n\n")]
    kinds = [kind.removeprefix("event: ") for kind, _, _ in events]
    start, *deltas, result = [json.loads(data.removeprefix("data: ")) for _, _, data in events]
    assert kinds == ["start", *("delta" for _ in deltas), "result"]
    assert start == {"defendants": NAMES}
    reply = "".join(delta["text"] for delta in deltas)
    assert list(json.loads(reply)) == ["judgments"]
    decoded = TASK.ask.decode(reply, by_hand(FACT, NAMES), question_maker.labels)
    assert (result["answer"], result["repairs"]) == (decoded.answer, list(decoded.repairs))
    assert result == judge(http, CASE)


def test_labels_health_and_metrics(http: httpx.Client, server: PanjueServe) -> None:
    labels = http.get("/v1/labels").json()
    assert labels["task"] == "judgment"
    assert labels["labels"]["charges"]["盗窃罪"] > 0
    assert labels["demo"] is True
    assert http.get("/v1/labels?model=other").status_code == 404
    for path in ("/health", "/readyz", "/"):  # no key needed
        whole = httpx.get(server.url + path, timeout=60)
        head = httpx.head(server.url + path, timeout=60)
        assert (whole.status_code, head.status_code, head.content) == (200, 200, b"")
    assert "vllm:num_requests_running" in http.get("/metrics").text


KNOWN = "fact, defendants, id, outcomes, model, stream"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fact": ...}, "fact: Field required"),
        ({"fact": " \n"}, "'fact' must be a text that is not empty"),
        ({"fact": 1}, "fact: Input should be a valid string"),
        ({"defendants": ...}, "defendants: Field required"),
        ({"defendants": []}, "'defendants' must list"),
        ({"facts": FACT, "fact": ...}, f"facts: no such field; a case has {KNOWN}; fact: Field"),
        ({"metadata": {}, "tags": 1}, f"metadata, tags: no such field; a case has {KNOWN}"),
        ({"id": True}, "id: Input should be a valid integer"),
        ({"defendants": ["甲", 1]}, "defendants.1: Input should be a valid string"),
        ({"defendants": [f"被告人{n}" for n in range(201)]}, "at most 200 items"),
        ({"fact": FACT[5:20] + "出行" * 20_000}, "need more than 3072 tokens, the limit on prompt"),
    ],
)
def test_cases_that_are_refused(http: httpx.Client, change: dict[str, Any], message: str) -> None:
    body = {**CASE, **change}
    given = {name: value for name, value in body.items() if value is not ...}
    answer = http.post(JUDGMENTS, json=given)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_a_case_that_is_too_long_says_what_was_left_out(http: httpx.Client) -> None:
    told = judge(http, {**CASE, "fact": "当日天气晴朗。" * 2000 + FACT})
    assert told["dropped_sentences"] > 1000
    assert told["defendants"] == NAMES


def test_python_gets_what_the_server_answers(
    trained: Path, small: dict[str, Any], http: httpx.Client
) -> None:
    handlers = logging.getLogger().handlers[:]
    method = logging.Logger.callHandlers
    cases = [{"id": i, "fact": FACT, "defendants": [f"甲{i}"]} for i in range(40)]

    async def in_a_notebook() -> None:
        with load(trained, {**small, "in_flight": 4, "answer": "model"}) as judge_case:
            assert judge_case(**CASE) == judge(http, CASE)
            with pytest.raises(UserError, match="defendants: Field required"):
                next(judge_case.many([{"fact": FACT}]))
            with pytest.raises(UserError, match=r"stream: .* has fact, defendants, id, outcomes$"):
                next(judge_case.many([{**CASE, "stream": False}]))
            several = list(judge_case.many(iter(cases)))
            assert [answer["id"] for answer in several] == list(range(40))
            assert [answer["defendants"] for answer in several] == [[f"甲{i}"] for i in range(40)]
            next(judge_case.many(iter(cases)))  # which nobody reads to the end
        with pytest.raises(UserError, match="within the `with` block"):
            judge_case(**CASE)

    asyncio.run(in_a_notebook())
    assert (logging.getLogger().handlers, logging.Logger.callHandlers) == (handlers, method)


def served(trained: Path, *of_classifier: str) -> ServedRun:
    """Return a run of which the classifier answers these fields; no engine is started."""
    run = ServedRun(open_trained(trained), ServeConfig.model_validate({"answer": "model"}))
    advisor = run.question_maker.advisor
    assert advisor
    run.question_maker.advisor = replace(advisor, answers=of_classifier)
    return run


def body_of(run: ServedRun, case: dict[str, Any], reply: str, finish: str = "stop") -> Any:
    fields = checked_case(CaseFields, case)
    row: Any = {"texts": [reply], "finish": [finish], "dropped_sentences": 0}
    row |= {"prompt_tokens": 1, "completion_tokens": 1}
    return run._body(fields, by_hand(fields.fact, fields.defendants), row)


def test_what_the_model_said_comes_beside_the_classifier_s_answer(
    trained: Path, merged: Path
) -> None:
    said = [
        {"name": name, "charges": ["盗窃罪"], "articles": ["264"], "penalty": "有期徒刑十年以上"}
        for name in NAMES
    ]
    said[1]["charges"] = ["抢劫罪"]
    run = served(trained, "charges", "penalty")
    for one in said:
        one["penalty"] = run.question_maker.labels.names("penalty")[0]
    body = body_of(run, CASE, json.dumps({"judgments": said}))
    assert body["answered_by"]["charges"] == "classifier"
    assert body["model"] == [{field: one[field] for field in FIELDS} for one in said]
    for answered, own, told in zip(
        body["answer"]["judgments"], body["classifier"], body["model"], strict=True
    ):
        assert answered["charges"] == own["charges"]
        assert answered["articles"] == told["articles"]
        assert answered["penalty"] == own["penalty"]


@pytest.mark.parametrize("reply", ["", '{"judgments": [{"name": "张某甲", "charges": ["盗窃罪"'])
def test_what_the_reply_does_not_have_the_model_did_not_say(
    trained: Path, merged: Path, reply: str
) -> None:
    body = body_of(served(trained), CASE, reply, "length")
    assert body["model"][1] == dict.fromkeys(FIELDS)
    assert body["model"][0]["penalty"] is None
    assert body["answer"]["judgments"][0]["penalty"] == body["classifier"][0]["penalty"]


@pytest.mark.parametrize("key", [0, 7, "2024-刑初-1"])
def test_a_line_of_a_file_gets_its_id_and_gold_is_not_looked_at(
    trained: Path, merged: Path, key: int | str
) -> None:
    run = served(trained)
    body = body_of(run, {**CASE, "id": key}, "")
    assert (next(iter(body)), body["id"], body["notes"]) == ("id", key, [])
    gold = [{"name": "王五", "charges": 1}]
    body = body_of(run, {**CASE, "id": key, "outcomes": gold}, "")
    assert body["notes"] == ["outcomes: not looked at; the facts alone are judged"]
    assert "id" not in body_of(run, CASE, "")
    twice = body_of(run, {**CASE, "defendants": ["张某甲", "张某甲"]}, "")
    [note] = twice["notes"]
    assert "2 defendants are called '张某甲'" in note


@dataclass
class Asked:
    """Stands for an engine: keeps what it is asked, and answers nothing."""

    requests: list[Request] = field(default_factory=list)

    async def ask(self, request: Request) -> EndpointOutput:
        self.requests.append(request)
        return EndpointOutput([EndpointReply("", "length", range(0))])


@pytest.mark.parametrize("of_classifier", [(), ("penalty",), ("charges", "penalty")])
@pytest.mark.parametrize("weighed", [(), ("charges",), ("penalty",), ("charges", "penalty")])
def test_log_probabilities_are_asked_for_where_a_confidence_counts_them(
    trained: Path, merged: Path, of_classifier: tuple[str, ...], weighed: tuple[str, ...]
) -> None:
    run = served(trained, *of_classifier)
    assert run.question_maker.advisor
    weights = ConfidenceWeights(classifier=1, model=1, shift=0)
    groups = {"agree": weights}
    calibration = dict.fromkeys(FIELDS, groups)
    calibration |= {name: {**groups, f"agree{WITH_LOGPROB}": weights} for name in weighed}
    run.question_maker.advisor = replace(run.question_maker.advisor, calibration=calibration)
    engine: Any = Asked()

    async def judged() -> None:
        case = checked_case(CaseFields, CASE)
        await run.answer(engine, case, *await run.question(case))

    asyncio.run(judged())
    [request] = engine.requests
    assert request.with_logprobs == bool(set(weighed) - set(of_classifier))


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0, 1), min_size=1), st.floats(0, 1))
def test_the_probabilities_of_classes_agree_with_the_confidence(
    chances: dict[str, float], confidence: float
) -> None:
    answered = min(chances)
    found = agreeing(chances, answered, confidence)
    assert list(found) == list(chances)
    assert found[answered] == confidence
    others = {label: chance for label, chance in chances.items() if label != answered}
    if any(chance > 1e-9 for chance in others.values()):
        assert sum(found.values()) == pytest.approx(1)
    total = sum(chances.values())
    if total > 1e-9:
        same = {label: chance / total for label, chance in chances.items()}
        assert agreeing(same, answered, same[answered]) == pytest.approx(same)
    assert agreeing({"a": 1.0}, "b", 0.5) == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize("constrained", [None, False])
def test_where_nobody_has_decided_who_answers_a_server_does_not_start(
    constrained: bool | None, trained: Path, tmp_path: Path
) -> None:
    """Nor where it was decided by replies without a schema, which the server's always have."""
    run = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("answers"))
    model = {"metrics": {}, "sha256": model_sha256(run / "adapter")}
    choice = {"candidates": {"model": model}, "best": {}, "cases": 1, "counted": 1}
    if constrained is not None:
        choices = [{**choice, "asked": {"constrained": constrained}}]
        write_json(run / "adapter/choice.json", {"choices": choices})
    with pytest.raises(UserError, match=r"run: nobody has decided who answers.* answer=model$"):
        ServedRun(open_trained(run), ServeConfig.model_validate({}))
    served = ServedRun(open_trained(run), ServeConfig.model_validate({"answer": "model"}))
    assert served.who_answers == "the model"


def test_the_reason_why_it_does_not_start_is_one_line(trained: Path) -> None:
    settings = {"engine": {"dtype": "nonsense"}, "answer": "model"}
    with pytest.raises(UserError, match=r"^engine: dtype"), load(trained, settings):
        pass
    with pytest.raises(UserError, match="there is no '𠮷'"), load(trained, {"adapter": "𠮷"}):
        pass


SAY = [{"role": "user", "content": "你好"}]
LONG: dict[str, dict[str, Any]] = {
    JUDGMENTS: LONG_CASE,
    "/v1/chat/completions": {"messages": SAY, "max_tokens": 2500, "ignore_eos": True},
}
"""Path -> a request whose reply has several hundred tokens."""


@pytest.mark.parametrize("path", LONG)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_is_aborted_in_the_engine(
    server: PanjueServe, http: httpx.Client, path: str, stream: bool
) -> None:
    def is_running() -> bool:
        name = "vllm:num_requests_running"
        lines = http.get("/metrics").text.splitlines()
        return any(float(line.split()[-1]) for line in lines if line.startswith(name))

    async def hang_up() -> None:
        async with httpx.AsyncClient(base_url=server.url, headers=http.headers) as client:
            asking = asyncio.create_task(client.post(path, json={**LONG[path], "stream": stream}))
            while not is_running():
                assert not asking.done()
                await asyncio.sleep(0.01)
            asking.cancel()

    asyncio.run(hang_up())
    until(lambda: not is_running(), seconds=10)
    judge(http, CASE)
