"""Which texts mean the same, for the metrics: cosines and a judge."""

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
"""Gold event, found event -> whether they are one."""

AGREE = "agree"
"""The built-in judge: it agrees with every pair it is asked about."""

KEY = "PANJUE_JUDGE_KEY"
"""Environment variable with the key that a judge's endpoint wants."""

ROOM = 1024
"""Tokens of a judge's reply, its thinking among them."""

QUESTION = "下面两个名称说的是同一件事吗？只回答“是”或“否”。\n一：{gold}\n二：{found}"


@dataclass(frozen=True)
class Matching:
    """What decides whether two texts mean the same.

    Attributes:
        name: Which it is, for the tables: numbers under different ones cannot be compared.
        similar: Cosines of texts.
        judge: Asked about two events whose names are alike enough.
    """

    name: str
    similar: Similarity
    judge: Judge


def make_matching(embeddings: str = BUILT_IN, judge: str = AGREE) -> Matching:
    """Return what these names say.

    Args:
        embeddings: As for `panjue.prompts.tasks.dialogue.similarity.similarity`.
        judge: `agree`, or `URL#MODEL` of an OpenAI-compatible endpoint.

    Raises:
        UserError: A name means nothing.
    """
    cosines = "character 1-2-grams" if embeddings == BUILT_IN else embeddings
    built_in = " (built in)" if (embeddings, judge) == (BUILT_IN, AGREE) else ""
    asked: Judge = (lambda _gold, _found: True) if judge == AGREE else _endpoint(judge)
    name = f"cosine: {cosines}, judge: {judge}{built_in}"
    return Matching(name, similarity(embeddings), asked)


def verdict(reply: str, judge: str) -> bool:
    """Return the last yes or no that a judge's reply says, its thinking left out.

    Raises:
        UserError: It says neither, or has not come to the end of its thinking; names `judge`.
    """
    said = re.findall(r"是否|不是|是|否|\byes\b|\bno\b", after_thinking(reply).lower())
    told = [word for word in said if word != "是否"]
    if not told or ("<think>" in reply and "</think>" not in reply):
        raise UserError(f"{judge}: answers {reply[:80]!r}, neither 是 nor 否; take another judge")
    return told[-1] in {"是", "yes"}


def _endpoint(name: str) -> Judge:
    found = named(name)
    if found is None:
        raise UserError(f"judge: {name!r} is neither {AGREE} nor URL#MODEL")
    place, model = f"{found[0]}/chat/completions", found[1]

    @cache
    def judge(gold: str, found: str) -> bool:
        question = QUESTION.format(gold=gold, found=found)
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": ROOM,  # a model that thinks first must come to its end
        }
        reply, ended = post(place, asked, KEY, _told)
        if ended == "length":
            raise UserError(
                f"judge {model}: is cut off before it comes to an end; take another judge"
            )
        return verdict(reply, f"judge {model}")

    return judge


def _told(answer: Any) -> tuple[str, Any]:
    choice = answer["choices"][0]
    return content(choice), choice.get("finish_reason")
