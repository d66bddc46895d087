"""For the metrics: decide by cosine similarity and a judge whether two texts mean the same."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from panjue.prompts.plumbing.decode import after_thinking
from panjue.prompts.plumbing.endpoint import asking, parse_endpoint
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.tasks.dialogue.similarity import BUILT_IN, Similarity, similarity

Judge = Callable[[str, str], bool]
"""Gold event, predicted event -> whether they are the same event."""

AGREE = "agree"
"""Name of the built-in judge, which answers yes to every pair."""

KEY = "PANJUE_JUDGE_KEY"
"""Environment variable that has the API key of a judge's endpoint."""

MAX_REPLY_TOKENS = 1024
"""Maximum number of tokens in a judge's reply, including its think block."""

QUESTION = "下面两个名称说的是同一件事吗？只回答“是”或“否”。\n一：{gold}\n二：{predicted}"


@dataclass(frozen=True)
class Matching:
    """Decides whether two texts mean the same; scores with different names differ in kind."""

    name: str
    similar: Similarity
    judge: Judge


def make_matching(embeddings: str = BUILT_IN, judge: str = AGREE) -> Matching:
    """Return the `Matching` by this `similarity` and this judge: `agree`, or `URL#MODEL`."""
    cosines = "character 1-2-grams" if embeddings == BUILT_IN else embeddings
    built_in = " (built in)" if (embeddings, judge) == (BUILT_IN, AGREE) else ""
    decide: Judge = (lambda _gold, _predicted: True) if judge == AGREE else _endpoint_judge(judge)
    name = f"cosine: {cosines}, judge: {judge}{built_in}"
    return Matching(name, similarity(embeddings), decide)


def says_yes(reply: str, judge: str) -> bool:
    """Return whether a judge's reply is a yes: its last 是, 否, yes or no decides."""
    words = re.findall(r"是否|不是|是|否|\byes\b|\bno\b", after_thinking(reply).lower())
    verdicts = [word for word in words if word != "是否"]
    if not verdicts or ("<think>" in reply and "</think>" not in reply):
        raise UserError(f"{judge}: answers {reply[:80]!r}, neither 是 nor 否; set another judge")
    return verdicts[-1] in {"是", "yes"}


def _endpoint_judge(name: str) -> Judge:
    endpoint = parse_endpoint(name)
    if endpoint is None:
        raise UserError(f"judge: {name!r} is neither {AGREE} nor URL#MODEL")
    url, model = endpoint

    @cache
    def judge(gold: str, predicted: str) -> bool:
        question = QUESTION.format(gold=gold, predicted=predicted)
        with asking(url, KEY) as client:
            reply = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=MAX_REPLY_TOKENS,  # enough for a think block
            )
            choice = reply.choices[0]
            text, finish_reason = choice.message.content or "", choice.finish_reason
        if finish_reason == "length":
            raise UserError(
                f"judge {model}: reply cut off at {MAX_REPLY_TOKENS} tokens; set another judge"
            )
        return says_yes(text, f"judge {model}")

    return judge
