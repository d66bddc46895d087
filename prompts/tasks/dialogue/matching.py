"""Decide which texts mean the same, for the metrics: by cosines and a judge."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from panjue.prompts.plumbing.decode import after_thinking
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.openai import content, named, post
from panjue.prompts.tasks.dialogue.similarity import BUILT_IN, Similarity, similarity

Judge = Callable[[str, str], bool]
"""Gold event, predicted event -> whether they are the same event."""

AGREE = "agree"
"""The built-in judge: it agrees with every pair."""

KEY = "PANJUE_JUDGE_KEY"
"""Environment variable with the key of a judge's endpoint."""

MAX_REPLY_TOKENS = 1024
"""Maximum tokens of a judge's reply, with its think block."""

QUESTION = "下面两个名称说的是同一件事吗？只回答“是”或“否”。\n一：{gold}\n二：{predicted}"


@dataclass(frozen=True)
class Matching:
    """The functions that decide whether two texts mean the same.

    Attributes:
        name: Its name in the tables: scores with different names cannot be compared.
        similar: Cosines of texts.
        judge: Decides on two events with similar names.
    """

    name: str
    similar: Similarity
    judge: Judge


def make_matching(embeddings: str = BUILT_IN, judge: str = AGREE) -> Matching:
    """Return the matching of these names.

    Args:
        embeddings: As for `panjue.prompts.tasks.dialogue.similarity.similarity`.
        judge: `agree`, or `URL#MODEL` of an OpenAI-compatible endpoint.

    Raises:
        UserError: A name is invalid.
    """
    cosines = "character 1-2-grams" if embeddings == BUILT_IN else embeddings
    built_in = " (built in)" if (embeddings, judge) == (BUILT_IN, AGREE) else ""
    decide: Judge = (lambda _gold, _predicted: True) if judge == AGREE else _endpoint(judge)
    name = f"cosine: {cosines}, judge: {judge}{built_in}"
    return Matching(name, similarity(embeddings), decide)


def verdict(reply: str, judge: str) -> bool:
    """Return whether the last yes or no of a judge's reply, after its think block, is a yes.

    Raises:
        UserError: The reply has neither, or its think block has no end; names `judge`.
    """
    words = re.findall(r"是否|不是|是|否|\byes\b|\bno\b", after_thinking(reply).lower())
    verdicts = [word for word in words if word != "是否"]
    if not verdicts or ("<think>" in reply and "</think>" not in reply):
        raise UserError(f"{judge}: answers {reply[:80]!r}, neither 是 nor 否; take another judge")
    return verdicts[-1] in {"是", "yes"}


def _endpoint(name: str) -> Judge:
    endpoint = named(name)
    if endpoint is None:
        raise UserError(f"judge: {name!r} is neither {AGREE} nor URL#MODEL")
    url, model = f"{endpoint[0]}/chat/completions", endpoint[1]

    @cache
    def judge(gold: str, predicted: str) -> bool:
        question = QUESTION.format(gold=gold, predicted=predicted)
        request = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MAX_REPLY_TOKENS,  # enough for a think block
        }
        reply, finish_reason = post(url, request, KEY, _read_reply)
        if finish_reason == "length":
            raise UserError(
                f"judge {model}: reply cut off at {MAX_REPLY_TOKENS} tokens; take another judge"
            )
        return verdict(reply, f"judge {model}")

    return judge


def _read_reply(response: Any) -> tuple[str, Any]:
    choice = response["choices"][0]
    return content(choice), choice.get("finish_reason")
