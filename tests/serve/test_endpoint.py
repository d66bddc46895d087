"""Any OpenAI-compatible endpoint: a server that answers, refuses, is busy, breaks off, is gone."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts import tasks
from panjue.prompts.example import call_key
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_lines, read_object, sha256
from panjue.prompts.render import TEMPLATE_ARGS
from panjue.prompts.task import load_task, task_folders
from panjue.serve.ask import Budget, Question, QuestionMaker, Request
from panjue.serve.endpoint import ENDPOINT_KEY, MAX_REFUSALS, Endpoint
from panjue.serve.settings import generate_settings
from tests.test_tasks import TOY, add_toy

TASK = load_task("dialogue")
SAMPLE = task_folders()["dialogue"] / "sample.folder"
LONGEST_S = 400

Panjue = Callable[..., subprocess.CompletedProcess[str]]


def instance(schema: dict[str, Any]) -> Any:
    """Return a value that a schema allows."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {name: instance(of) for name, of in schema["properties"].items()}
    if schema["type"] == "array":
        return [instance(of) for of in schema.get("prefixItems", [])]
    return "某"


class Server(ThreadingHTTPServer):
    """Answers chat completions; `behave` may answer (status, body) in their place."""

    daemon_threads = True
    request_queue_size = 512
    behave: Callable[[dict[str, Any]], tuple[int, Any] | None] = staticmethod(lambda _: None)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name = f"http://127.0.0.1:{self.server_port}/v1#m"
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.made: list[dict[str, Any]] = []

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that hang up."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.add(self.headers["Authorization"])
        status, content = self.server.behave(body) or (200, completion(body))
        if self.path != "/v1/chat/completions":
            status, content = 404, {"detail": "Not Found"}
        self.send_response(status)
        kind = "text/html" if isinstance(content, bytes) else "application/json"
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        pass


def completion(body: dict[str, Any]) -> dict[str, Any]:
    form = body.get("response_format")
    text = json.dumps(instance(form["json_schema"]["schema"])) if form else "无"
    choices = [{"message": {"content": text}, "finish_reason": "stop"}] * body.get("n", 1)
    return {"choices": choices, "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


@pytest.fixture
def server(serving: Callable[[ThreadingHTTPServer], None]) -> Server:
    serving(server := Server())
    return server


Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def ask(server: Server, rows_of: Any) -> Ask:
    """Return what asks the server for dialogues of a sentence, and returns the rows."""

    def rows(count: int = 6, in_flight: int = 8, **sampling: Any) -> list[dict[str, Any]]:
        examples = []
        for number in range(1, count + 1):
            chat = [{"Holder": "甲", "sentence": f"第{number}句[1][/INST][MASK]。"}]
            examples.append(TASK.data.read({"id": str(number), "chat": chat}))
        question_maker = QuestionMaker(TASK, None, None, Budget())
        words = {"passes": [sampling], "finished": server.made}
        with closing(Endpoint(server.name)) as endpoint:
            rows_of(endpoint, question_maker, examples, in_flight, **words)
        return server.made

    return rows


def test_it_is_asked_as_openai_is(
    server: Server, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT_KEY, "secret")
    sampling = {"top_p": 0.5, "stop": ["。"], "max_tokens": 9}
    [made] = ask(count=1, **sampling)
    [asked] = server.asked
    assert asked.items() >= {"model": "m", "temperature": 0.0, **sampling}.items()
    assert server.keys == {"Bearer secret"}
    assert "第1句[1]［/INST][MASK]。" in asked["messages"][0]["content"]
    assert asked["response_format"]["json_schema"]["strict"] is True
    assert (made["prompt_tokens"], made["completion_tokens"]) == (7, 3)


def test_a_refused_request_costs_its_call_only(server: Server, ask: Ask) -> None:
    def behave(body: dict[str, Any]) -> Any:
        return (400, "too long") if "第3句" in body["messages"][0]["content"] else None

    server.behave = behave
    made = ask()
    [refused] = [row for row in made if "refused" in row]
    assert (refused["question"], refused["refused"]) == ("3/1", 'the endpoint said 400: "too long"')
    assert all(row is refused or row.keys() >= {"texts", "finish"} for row in made)


def test_a_server_that_refuses_a_field_of_vllm_is_asked_without_it(server: Server) -> None:
    name = "chat_template_kwargs"
    server.behave = lambda body: (400, f"Unrecognized argument: {name}") if name in body else None
    messages = [{"role": "user", "content": "甲"}]
    question = Question([1], None, 0, 0, messages, template=TEMPLATE_ARGS)
    with closing(Endpoint(server.name)) as endpoint:
        for key in (1, 2):
            assert endpoint.runner.run(endpoint.ask(Request(key, question, {}))).outputs
    assert [name in body for body in server.asked] == [True, False, False]
    server.asked.clear()
    server.behave = lambda body: (422, f"too long: {list(body)}")  # it repeats what it was sent
    with closing(Endpoint(server.name)) as endpoint:
        for key in (1, 2):
            assert not endpoint.runner.run(endpoint.ask(Request(key, question, {}))).outputs
    assert [name in body for body in server.asked] == [True, False, True, False]


@pytest.mark.parametrize(
    "refusal",
    [
        (400, "Logprobs are not enabled"),
        (400, "unsupported parameter"),
        (403, "You are not allowed to request logprobs from this model"),
        (404, "no such feature"),
        (200, {"error": {"message": "log probabilities are not supported"}}),
    ],
)
def test_a_server_without_log_probabilities_is_asked_for_none(server: Server, refusal: Any) -> None:
    server.behave = lambda body: refusal if "logprobs" in body else None
    question = Question([], None, 0, 0, [{"role": "user", "content": "甲"}])
    with closing(Endpoint(server.name)) as endpoint:
        for key in (1, 2):
            request = Request(key, question, {}, with_logprobs=True)
            [reply] = endpoint.runner.run(endpoint.ask(request)).outputs
            assert reply.logprobs is None
    assert [body.get("logprobs") for body in server.asked] == [True, None, None]


def test_a_server_that_gave_log_probabilities_is_asked_for_them_again(server: Server) -> None:
    def behave(body: dict[str, Any]) -> Any:
        return (400, "too long") if "乙" in body["messages"][0]["content"] else None

    server.behave = behave
    with closing(Endpoint(server.name)) as endpoint:
        for key, text in enumerate("甲乙甲"):
            question = Question([], None, 0, 0, [{"role": "user", "content": text}])
            endpoint.runner.run(endpoint.ask(Request(key, question, {}, with_logprobs=True)))
    assert [body.get("logprobs") for body in server.asked] == [True, True, True]


def test_a_row_has_the_log_probabilities_that_a_server_sends(server: Server, rows_of: Any) -> None:
    task = load_task("severity")
    example = task.data.read({"id": 1, "fact": "甲盗窃。"})

    def behave(body: dict[str, Any]) -> Any:
        answer = completion(body)
        [choice] = answer["choices"]
        pieces = ['{"label": "', choice["message"]["content"][11:-2], '"}', "<end>"]
        content = [{"token": text, "logprob": -0.5, "bytes": None} for text in pieces]
        return 200, {**answer, "choices": [{**choice, "logprobs": {"content": content}}]}

    server.behave = behave
    with closing(Endpoint(server.name)) as endpoint:
        rows_of(
            endpoint, QuestionMaker(task, None, None, Budget()), [example], 1, finished=server.made
        )
    [made] = server.made
    # The class, and the end of the reply after it; not its key.
    assert made["logprobs"] == [{"label": [-1.0]}]


def test_requests_in_flight_are_asked_again_too(server: Server) -> None:
    name = "chat_template_kwargs"
    together = threading.Barrier(8)

    def behave(body: dict[str, Any]) -> Any:
        if name not in body:
            return None
        together.wait(LONGEST_S)  # all were sent before the first refusal
        return 400, f"Unrecognized argument: {name}"

    server.behave = behave
    messages = [{"role": "user", "content": "甲"}]
    question = Question([1], None, 0, 0, messages, template=TEMPLATE_ARGS)

    async def ask_all(endpoint: Endpoint) -> list[Any]:
        asked = [endpoint.ask(Request(key, question, {})) for key in range(8)]
        return await asyncio.gather(*asked)

    with closing(Endpoint(server.name)) as endpoint:
        outputs = endpoint.runner.run(ask_all(endpoint))
    assert all(output.outputs for output in outputs)


def test_half_a_character_or_no_count_of_tokens_costs_no_reply(server: Server, ask: Ask) -> None:
    reply = {"message": {"content": "甲\ud83d"}, "finish_reason": "length"}
    server.behave = lambda _: (200, {"choices": [reply], "usage": {}})
    [made] = ask(count=1)
    assert (made["texts"], made["completion_tokens"]) == (["甲?"], 0)


def test_further_fields_are_sent_and_others_left_out(server: Server, ask: Ask) -> None:
    def behave(body: dict[str, Any]) -> Any:
        given = body.get("enable_thinking") is False and "temperature" not in body
        return None if given else (400, {"error": {"message": "no"}})

    server.behave = behave
    extra = {"enable_thinking": False, "chat_template_kwargs": {"x": 1}}
    [made] = ask(count=1, temperature=None, extra_body=extra)
    assert made["finish"] == ["stop"]
    assert server.asked[0]["chat_template_kwargs"] == {"x": 1}


def test_a_template_that_refuses_our_argument_is_sent_none(server: Server) -> None:
    question = Question([1], None, 0, 0, [{"role": "user", "content": "甲"}])
    with closing(Endpoint(server.name)) as endpoint:
        endpoint.runner.run(endpoint.ask(Request(1, question, {})))
    assert "chat_template_kwargs" not in server.asked[0]


def test_a_field_of_vllm_is_sent_beside_those_of_the_user(server: Server) -> None:
    messages = [{"role": "user", "content": "甲"}]
    question = Question([1], None, 0, 0, messages, template=TEMPLATE_ARGS)
    sampling = {"extra_body": {"chat_template_kwargs": {"x": 1}, "top_k": 3}}
    server.behave = lambda body: (400, "chat_template_kwargs: x")
    with closing(Endpoint(server.name)) as endpoint:
        endpoint.runner.run(endpoint.ask(Request(1, question, sampling)))
    with_ours, without = server.asked
    assert with_ours["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}
    assert without["chat_template_kwargs"] == {"x": 1}
    assert with_ours["top_k"] == 3


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("parameter.enable_thinking must be false", r"sampling\.extra_body\.enable_thinking=VALUE"),
        ("参数enable_thinking必须为false", r"sampling\.extra_body\.enable_thinking=VALUE"),
        ("'temperature' does not support 0.0", r"sampling\.temperature=null"),
        ("'max_tokens': use 'max_completion_tokens'", r"sampling\.max_tokens=null"),
        ("This response_format type is unavailable now", "it takes no schema: set constrained=fa"),
        ("Invalid schema", "it takes no schema: set constrained=false"),
        ("No.", "if it takes no schema, set constrained=false"),
    ],
)
def test_the_hint_follows_what_the_server_says(
    message: str, hint: str, server: Server, ask: Ask
) -> None:
    error = {"error": {"type": "invalid_request_error", "message": message, "param": None}}
    server.behave = lambda _: (400, error)
    with pytest.raises(UserError, match=rf"{hint}.* and another answers=NAME$"):
        ask(count=20)


def test_cases_refused_for_their_content_do_not_end_the_run(server: Server, ask: Ask) -> None:
    refused = {"error": {"code": "data_inspection_failed", "message": "inappropriate content"}}
    server.behave = lambda body: (
        None if "第20句" in body["messages"][0]["content"] else (400, refused)
    )
    assert len(ask(count=20)) == 20


NO_TEXT = {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}
NO = {"choices": [{"message": {"content": None, "refusal": "No."}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ((400, "x"), '400: "x"'),
        ((200, NO_TEXT), "nothing .content: null., finish_reason: length"),
        ((200, NO), "the model refuses: No."),
    ],
)
def test_an_endpoint_that_answers_nothing_ends_the_run(
    reply: Any, why: str, server: Server, ask: Ask
) -> None:
    server.behave = lambda _: reply
    with pytest.raises(UserError, match=f"refuses all requests .{why}.*constrained=false"):
        ask(count=20)
    assert len(server.made) < MAX_REFUSALS


@pytest.mark.parametrize("changed", [lambda each: each[:1], lambda each: [*each, *each]])
def test_a_row_has_as_many_replies_as_it_was_asked_for(changed: Any, server: Server) -> None:
    def behave(body: dict[str, Any]) -> Any:
        told = completion(body)
        return 200, {**told, "choices": changed(told["choices"])}

    server.behave = behave
    question = Question([], None, 0, 0, [{"role": "user", "content": "甲"}])
    request = Request(1, question, {"n": 3, "temperature": 1.0})
    with closing(Endpoint(server.name)) as endpoint:
        found = endpoint.runner.run(endpoint.ask(request))
    assert len(found.outputs) == 3
    assert found.prompt_tokens == 7 * len(server.asked)


def test_rows_are_kept_and_no_more_is_asked_when_one_fails(server: Server, ask: Ask) -> None:
    failed = threading.Event()

    def behave(body: dict[str, Any]) -> Any:
        if "第2句" in body["messages"][0]["content"]:
            failed.set()
            return 404, "gone"
        failed.wait(LONGEST_S)
        return None

    server.behave = behave
    with pytest.raises(UserError, match=r"404 \"gone\"; finished rows are kept, run the same"):
        ask()
    kept = {row["question"] for row in server.made}
    assert kept == {f"{n}/1" for n in (1, 3, 4, 5, 6)}
    assert len(server.asked) == 6


def test_as_many_are_in_flight_as_is_said(server: Server, ask: Ask) -> None:
    together = threading.Barrier(150)

    def behave(_: dict[str, Any]) -> Any:
        together.wait(LONGEST_S)  # breaks where fewer come

    server.behave = behave
    assert len(ask(count=150, in_flight=200)) == 150


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        ({"choices": []}, 'not in OpenAI\'s format: {"choices":'),
        ({"choices": [{"message": {"content": [{}]}}]}, 'not in OpenAI\'s format: {"choices"'),
        ({"code": "1113", "message": "账户余额不足"}, "账户余额不足"),
        ({"choices": None, "error": {"message": "offline until 18:00"}}, "offline until 18:00"),
        ([], "not in OpenAI's format: .*"),
        (b"", "not in OpenAI's format: nothing"),
        (b"<!DOCTYPE html><title>Campus login</title>", "a web page .*login.*Campus login"),
        (b'data: {"choices": []}\n\ndata: [DONE]', "a stream, for which nobody asked"),
        ({"choices": [{"message": {"content": ""}, "finish_reason": "abort"}]}, "aborted"),
    ],
)
def test_a_reply_that_is_none_ends_the_run(
    reply: Any, named: str, server: Server, ask: Ask
) -> None:
    server.behave = lambda _: (200, reply)
    with pytest.raises(UserError, match=f"{named}.*; .*run the same command to resume"):
        ask()


def test_what_a_server_sends_otherwise_is_read(server: Server, ask: Ask) -> None:
    parts = [{"type": "text", "text": "甲"}, {"type": "reasoning"}, {"type": "text", "text": "乙"}]
    reply = {"message": {"content": parts}, "finish_reason": None}
    server.behave = lambda _: (200, {"choices": [reply], "usage": None})
    [made] = ask(count=1)
    assert (made["texts"], made["finish"]) == (["甲乙"], ["unknown"])
    assert server.asked[0]["stream"] is False


def test_an_error_in_a_reply_costs_its_case_if_it_is_of_the_case(server: Server, ask: Ask) -> None:
    error = {"choices": None, "error": {"message": "context length exceeded: 9000 > 8192"}}

    def behave(body: dict[str, Any]) -> Any:
        return (200, error) if "第3句" in body["messages"][0]["content"] else None

    server.behave = behave
    [refused] = [row["refused"] for row in ask() if "refused" in row]
    assert refused.startswith("the endpoint said ")
    assert "context length exceeded: 9000 > 8192" in refused


@pytest.mark.parametrize(
    ("key", "status", "said"),
    [
        ("", 401, "401 .*no key.*; set PANJUE_ENDPOINT_KEY; "),
        ("k", 401, "401 .*no key.*; it does not take the key in PANJUE_ENDPOINT_KEY; "),
        ("", 402, "402 .*no key.*resume$"),
    ],
)
def test_an_error_of_all_requests_says_what_to_set(
    key: str, status: int, said: str, server: Server, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT_KEY, key)
    server.behave = lambda _: (status, {"error": {"message": "no key"}})
    with pytest.raises(UserError, match=said):
        ask(count=1)


def test_an_address_that_ends_elsewhere_is_named(server: Server, ask: Ask) -> None:
    whole = server.name.replace("#m", "/chat/completions#m")
    with pytest.raises(UserError, match=rf"without its end: {server.name}$"):
        Endpoint(whole)
    server.name = server.name.replace("/v1", "")
    with pytest.raises(
        UserError, match=r"404 .*; if its address ends in /v1, say endpoint=http.*/v1#m; "
    ):
        ask(count=1)


def test_what_a_server_refused_is_asked_again_when_it_is_mended(
    server: Server, tmp_path: Path, panjue: Panjue
) -> None:
    server.behave = lambda body: (
        (400, {"error": {"message": "maintenance"}}) if len(server.asked) == 2 else None
    )
    first = panjue(*command(server, tmp_path))
    assert first.returncode == 0, first.stderr
    assert "without a reply: 1, " in first.stdout
    assert 'the endpoint said 400: {"error":{"message":"maintenance"}}' in first.stdout
    assert "1 refused by the endpoint: the same `panjue generate` asks again" in first.stdout
    assert "longer context" not in first.stdout
    server.behave = lambda _: None
    again = panjue(*command(server, tmp_path))
    assert "continuing: 1 of 2 are answered already" in again.stdout
    assert "5 first replies valid as they came" in again.stdout
    assert "without a reply" not in again.stdout


def test_an_endpoint_that_is_not_there_is_named(
    server: Server, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panjue.serve.endpoint.MAX_RETRIES", 0)
    server.name = "http://127.0.0.1:9/v1#m"
    with pytest.raises(UserError, match=r"^http://127.0.0.1:9/v1: Connection error.*resume$"):
        ask()


@pytest.mark.parametrize("proxy", ["socks://127.0.0.1:1080", "http://a:b"])
@pytest.mark.usefixtures("without_proxies")
def test_a_proxy_that_no_client_can_be_made_with_is_named(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(UserError, match=r"^ALL_PROXY: (Unknown scheme|Invalid port)"):
        Endpoint("https://example.invalid/v1#m")


@pytest.mark.parametrize(
    "name",
    ["127.0.0.1:9", "http://x/v1", "http://[::1/v1#m", "http://x:port#m", "http://xn--a#m", "#m"],
)
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="is not URL#MODEL"):
        Endpoint(name)


def command(server: Server, run: Path) -> list[str]:
    start = ["generate", str(run), str(SAMPLE), "task=dialogue", f"endpoint={server.name}"]
    return [*start, "solve.window=2"]


def test_a_run_that_is_killed_resumes_within_a_dialogue(
    server: Server, tmp_path: Path, panjue: Panjue
) -> None:
    whole = tmp_path / "whole"
    done = panjue(*command(server, whole))
    assert done.returncode == 0, done.stderr
    assert "2 examples in 5 calls: 5 first replies valid as they came" in done.stdout
    assert len(server.asked) == 5

    killed = shutil.copytree(whole, tmp_path / "killed")
    answers = killed / "answers" / SAMPLE.stem
    completions = answers / "completions.jsonl"
    kept = completions.read_bytes().splitlines(keepends=True)[0]
    completions.write_bytes(kept + b'{"id"')
    shutil.rmtree(answers / "submission")
    again = panjue(*command(server, killed))
    assert again.returncode == 0, again.stderr
    assert "continuing: 0 of 2 are answered already" in again.stdout
    assert completions.read_bytes().startswith(kept)
    keys = [call_key(row) for _, row in read_lines(completions)]
    assert len(keys) == len(set(keys)) == 5
    submission = whole / "answers" / SAMPLE.stem / "submission"
    assert sha256(answers / "submission") == sha256(submission)
    other = panjue(*command(server, killed), "solve.window=3")
    assert "has answers made with other settings (solve.window:" in other.stderr


def test_a_run_that_is_stopped_ends_before_its_replies_come(server: Server, tmp_path: Path) -> None:
    asked = threading.Event()
    release = threading.Event()

    def behave(_: dict[str, Any]) -> None:
        asked.set()
        release.wait(4 * LONGEST_S)

    server.behave = behave
    words = [str(Path(sys.executable).with_name("panjue")), *command(server, tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
        assert asked.wait(LONGEST_S)
        running.send_signal(signal.SIGTERM)
        _, printed = running.communicate(timeout=LONGEST_S)
    release.set()
    assert running.returncode == 128 + signal.SIGTERM
    assert printed.decode().endswith("run the same command to resume\n")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["task=judgment"], r"the labels of 'judgment' \(charges, articles\) come from a training"),
        (["model=m"], r"^model=m: no setting 'model': .* endpoint=URL#MODEL"),
        (["task=cloze"], r"the labels of 'cloze' come from a training: run `panjue sft` first"),
        (["task=dialogue", "sampling.top_k=3"], "sampling: no setting 'top_k'"),
        (["task=dialogue", "sampling.extra_body=3"], "sampling.extra_body: give fields, e.g."),
        (["task=dialogue", "sampling.extra_body.top_p=1"], "sampling.extra_body: 'top_p' is set"),
        (["task=dialogue", "sampling.extra_body.response_format=x"], "extra_body: 'response_form"),
        (["--temperature", "1"], "^--temperature: is written sampling.temperature=1 here"),
        ([], "task: set it, e.g. task=dialogue"),
    ],
)
def test_without_a_training_a_task_without_labels_is_needed(
    tmp_path: Path, words: list[str], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        generate_settings(tmp_path, None, ["endpoint=http://127.0.0.1:9/v1#x", *words])


def test_without_a_training_an_endpoint_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing trained is there; .* endpoint=URL#MODEL$"):
        generate_settings(tmp_path, None, ["task=severity"])


def test_an_endpoint_without_its_model_makes_no_folder(tmp_path: Path, panjue: Panjue) -> None:
    words = ["task=dialogue", "endpoint=http://127.0.0.1:9/v1"]
    done = panjue("generate", tmp_path / "run", SAMPLE, *words)
    assert "is not URL#MODEL, e.g. http://" in done.stderr
    assert not (tmp_path / "run/answers").exists()


def asked(server: Server, task: str, sample: Path, run: Path) -> list[str]:
    return ["generate", str(run), str(sample), f"task={task}", f"endpoint={server.name}"]


def test_the_labels_of_a_task_of_ones_own_come_from_its_code(
    server: Server, tmp_path: Path, panjue: Panjue, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = add_toy(tmp_path / "tasks", monkeypatch)
    run = tmp_path / "run"
    done = panjue(*asked(server, "toy", sample, run))
    assert done.returncode == 0, done.stderr
    assert "2 examples: 2 first replies valid as they came" in done.stdout
    folder = run / "answers/sample"
    assert read_object(folder / "labels.json")["counts"] == {"kind": {"no": 0, "yes": 0}}
    submission = (folder / "submission.jsonl").read_text("utf-8")
    assert submission == '{"id":1,"kind":"no"}\n{"id":2,"kind":"no"}\n'
    assert panjue("decode", run).returncode == 0
    assert (folder / "submission.jsonl").read_text("utf-8") == submission
    assert panjue("check", run, "--cases", sample).stdout == f"{folder}: clean\n"
    scored = panjue("score", sample, run)
    assert "accuracy │ 0.5000" in scored.stdout
    assert panjue("report", run).returncode == 0
    assert read_object(folder / "scores.json")["accuracy"] == 0.5

    other = TOY.replace('["no", "yes"]', '["no", "so so", "yes"]')
    add_toy(tmp_path / "others", monkeypatch, other)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__[:-2], str(tmp_path / "others")])
    again = panjue(*asked(server, "toy", sample, run))
    assert "has answers made with other settings (labels_sha256: " in again.stderr


@pytest.mark.parametrize(("task", "first"), [("severity", 0), ("ecthr", [])])
def test_without_a_training_no_label_is_called_the_commonest(
    task: str, first: Any, server: Server, tmp_path: Path, panjue: Panjue
) -> None:
    message = {"choices": [{"message": {"content": "?"}, "finish_reason": "stop"}], "usage": None}
    server.behave = lambda _: (200, message)
    sample = task_folders()[task] / "sample.jsonl"
    done = panjue(*asked(server, task, sample, tmp_path))
    assert done.returncode == 0, done.stderr
    assert "what replies lack is answered by: first label of the task's list\n" in done.stdout
    [key] = load_task(task).answer.fields
    for _, row in read_lines(tmp_path / "answers/sample/submission.jsonl"):
        assert row[key] == first
    assert panjue("check", tmp_path, "--cases", sample).stdout.endswith("clean\n")
    scored = panjue("score", sample, tmp_path)
    assert scored.returncode == 0, scored.stderr
    assert "commonest" not in scored.stdout
    assert panjue("report", tmp_path).returncode == 0
    page = (tmp_path / "answers/sample/report.html").read_text("utf-8")
    assert "always the commonest class" not in page.partition("<script")[0]
