"""Judging from Python: the answers of the server, without a server."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from panjue.prompts.plumbing.errors import UserError
from panjue.serve.judge import load

FACT = "经审理查明：被告人张某甲、李某乙共同盗窃手机一部，价值人民币3000元。被告人张某甲系主犯。"


def test_python_gets_what_the_server_answers(
    trained: Path, small: dict[str, Any], http: httpx.Client
) -> None:
    handlers, method = logging.getLogger().handlers[:], logging.Logger.callHandlers
    cases = [{"fact": FACT, "defendants": [f"甲{i}"]} for i in range(40)]

    async def in_a_notebook() -> Any:
        with load(trained, {**small, "in_flight": 4}) as judge:
            one = judge(FACT)
            assert judge(FACT, ["李某乙"], samples=2)["judgments"][0]["name"] == "李某乙"
            with pytest.raises(UserError, match="list them in 'defendants'"):
                judge("某日天气晴朗。")
            several = judge.many(iter(cases))
            assert next(several)["defendants"] == ["甲0"]
            names = [answer["defendants"] for answer in several]
            with pytest.raises(UserError, match="'facts' is unknown"):
                next(judge.many([{"facts": FACT}]))
        with pytest.raises(UserError, match="within the `with` block"):
            judge(FACT)
        return one, names

    one, names = asyncio.run(in_a_notebook())
    assert one == http.post("/v1/judgments", json={"fact": FACT}).json()
    assert names == [[f"甲{i}"] for i in range(1, 40)], "in their order"
    assert (logging.getLogger().handlers, logging.Logger.callHandlers) == (handlers, method)


def test_the_reason_why_it_does_not_start_is_one_line(trained: Path, tmp_path: Path) -> None:
    for run, settings, message in (
        (tmp_path, {}, "nothing trained is there"),
        (trained, {"nothing": 1}, "no setting 'nothing'"),
        (trained, {"engine": {"dtype": "nonsense"}}, r"^engine: dtype"),
    ):
        with pytest.raises(UserError, match=message), load(run, settings):
            pass
