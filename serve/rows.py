"""The replies to one call -> its row of `completions.jsonl`, with what else was likely."""

from collections.abc import Sequence
from functools import lru_cache
from math import exp
from typing import Any

from panjue.serve.ask import Request

ALTERNATIVES = 10  # most likely tokens that are read at each position of a reply
CERTAIN = 0.999  # a position whose token is likelier than this has no alternatives
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes an incomplete character to

NEAR_TIE = 1e-4
"""Two tokens whose log-probabilities differ by less count as equally likely (float32)."""

Row = dict[str, Any]  # a row of `completions.jsonl`


def row(
    passes: Sequence[tuple[Request, Any]], tokenizer: Any, *, with_alternatives: bool = False
) -> Row:
    """Return the row of one call, from the outputs of its requests; the first reply comes first.

    With `with_alternatives` it has the alternatives of each reply too.
    """
    request, first = passes[0]
    refused = next((o.refused for _, o in passes if getattr(o, "refused", "")), "")
    if refused:
        return {"refused": refused}
    replies = [reply for _, output in passes for reply in output.outputs]
    if replies[0].finish_reason == "error" and not replies[0].text:
        return {"refused": "the engine failed on this request"}
    replies = replies[:1] + [reply for reply in replies[1:] if reply.finish_reason != "error"]
    # An endpoint returns no log-probabilities.
    with_alternatives = with_alternatives and replies[0].logprobs is not None
    return {
        "texts": [reply.text for reply in replies],
        "finish": [reply.finish_reason for reply in replies],
        "alternatives": [alternatives(reply, tokenizer) for reply in replies]
        if with_alternatives
        else [],
        "prompt_tokens": sum(_prompt_tokens(*pair) for pair in passes),
        "cached_tokens": sum(output.num_cached_tokens or 0 for _, output in passes),
        "completion_tokens": sum(len(reply.token_ids) for reply in replies),
        "dropped_sentences": request.question.dropped,
        "near_ties": near_ties(first.outputs[0]) if request.is_greedy else [],
    }


def _prompt_tokens(request: Request, output: Any) -> int:
    """Return the count that an endpoint reports, or that of our own prompt."""
    return getattr(output, "prompt_tokens", len(request.question.prompt))


def near_ties(reply: Any) -> list[int]:
    """Return the positions of a greedy reply where the two best tokens differ by under `NEAR_TIE`.

    Only there may another batch or machine choose another token: sums of floats depend on their
    order.
    """
    best_two = (sorted(t.logprob for t in top.values())[-2:] for top in reply.logprobs or ())
    return [i for i, two in enumerate(best_two) if len(two) == 2 and two[1] - two[0] < NEAR_TIE]


def alternatives(reply: Any, tokenizer: Any) -> list[tuple[int, list[tuple[str, float]]]]:
    """Return where a reply could likely have continued differently: `eval.beliefs.Alternatives`.

    Its log-probabilities obey the schema: vLLM masks forbidden tokens before it computes them.
    """
    positions = []
    tokens = list(reply.token_ids)
    for i, (chosen, top) in enumerate(zip(tokens, reply.logprobs or (), strict=False)):
        probability = exp(top[chosen].logprob)
        prefix = tokenizer.decode(tokens[:i]) if probability < CERTAIN else UNFINISHED
        if prefix.endswith(UNFINISHED):  # certain, or inside a character of several tokens
            continue
        others = ((exp(top[token].logprob), token) for token in top if token != chosen)
        rest = sorted(others, reverse=True)
        likely = [(probability, chosen), *((p, token) for p, token in rest if p > 1 - CERTAIN)]
        texts = [(_text(tokenizer, token), round(max(p, 1e-4), 4)) for p, token in likely]
        readable = [option for option in texts[1:] if UNFINISHED not in option[0]]
        if readable and UNFINISHED not in texts[0][0]:
            positions.append((len(prefix), [texts[0], *readable]))
    return positions


@lru_cache(maxsize=4096)
def _text(tokenizer: Any, token: int) -> str:
    """Return a token's text; cached, since few tokens make up most positions."""
    text: str = tokenizer.decode([token])
    return text
