"""The grammar of a case takes its gold reply and nothing that is wrong: by two readers of it."""

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, collect
from panjue.prompts.plumbing.files import dump
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.prompts.tasks.judgment.repair import decode
from panjue.prompts.tasks.judgment.task import schema, target
from tests.prompts.tasks.judgment.test_repair import answered

# No control characters: no name has them, and DEL llguidance takes only in its escaped form.
NAME = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    str.strip
)
NASTY = st.text(st.sampled_from("\"\\/{}[]<>|'张😀\u3000 :,\u2028"), min_size=1, max_size=8).filter(
    str.strip
)
NAMES = st.lists(NAME | NASTY, min_size=1, max_size=6, unique=True)


def matches(rules: dict[str, Any], reply: str) -> bool:
    """Say whether llguidance lets a model write `reply`, byte by byte, and end there."""
    llguidance = pytest.importorskip("llguidance")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(rules), defaults={"whitespace_flexible": False}
    )
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.get_error()
    tokens = tokenizer.tokenize_str(reply)
    assert len(tokens) == len(reply.encode())  # one token a byte: nothing is jumped over
    return bool(
        matcher.try_consume_tokens(tokens) == len(tokens)
        and not matcher.get_error()
        and (matcher.is_accepting() or matcher.is_stopped())
    )


def accepts(rules: dict[str, Any], reply: str) -> bool:
    return Draft202012Validator(rules).is_valid(json.loads(reply))


@settings(max_examples=60)
@given(answered(NAMES))
def test_every_gold_reply_is_taken(labels: Labels, example: Example) -> None:
    rules = schema(example, labels)
    Draft202012Validator.check_schema(rules)
    assert accepts(rules, target(example))
    assert matches(rules, target(example))


def test_names_that_a_tokenizer_normalizes_are_written_as_it_writes_them(labels: Labels) -> None:
    """Qwen's tokenizers turn U+F9E1 into U+674E, and e with U+0301 into one character."""
    names = ("\uf9e1某", "Jose\u0301", "<\uf9e1>")
    own = {"charges": ["盗窃罪"], "articles": ["264"], "penalty": PENALTIES[2]}
    judgments = [{"name": name, **own} for name in names]
    example = Example(1, "事实", names, answer={"judgments": judgments})
    reply = unicodedata.normalize("NFC", target(example))
    assert accepts(schema(example, labels), reply)
    decoded = decode(reply, example, labels)
    assert (decoded.answer, decoded.repairs) == (example.answer, ())
    assert decode(f"答：{reply}", example, labels).answer == example.answer


def first(case: Example, **fields: object) -> str:
    """Return the gold reply with other fields of the first judgment."""
    reply = json.loads(target(case))
    reply["judgments"][0] |= fields
    return dump(reply)


WRONG: dict[str, dict[str, object]] = {
    "wrong name": {"name": "王某"},
    "a name not neutralized": {"name": "<张某甲>"},
    "unknown charge": {"charges": ["抢劫罪"]},
    "charge without 罪": {"charges": ["盗窃"]},
    "no charge": {"charges": []},
    "too many charges": {"charges": ["盗窃罪"] * 3},
    "an article among the charges": {"charges": ["264"]},
    "a class as a number": {"penalty": 12},
    "half a class": {"penalty": "有期徒刑六个月"},
    "an extra key": {"reason": "因"},
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused(case: Example, labels: Labels, what: str) -> None:
    reply = first(case, **WRONG[what])
    assert not accepts(schema(case, labels), reply)
    assert not matches(schema(case, labels), reply)


@pytest.mark.parametrize("missing", ["judgments", "judgment", "charges"])
def test_what_lacks_something_is_refused(case: Example, labels: Labels, missing: str) -> None:
    reply = json.loads(target(case))
    if missing == "judgments":
        del reply["judgments"]
    elif missing == "judgment":
        del reply["judgments"][1]
    else:
        del reply["judgments"][0]["charges"]
    assert not accepts(schema(case, labels), dump(reply))
    assert not matches(schema(case, labels), dump(reply))


def test_sixty_three_defendants_and_all_labels_make_a_grammar() -> None:
    """With the enums inline instead of in `$defs` this is refused."""
    charges = [f"第{n}号犯罪罪" for n in range(321)]
    articles = [f"{n // 4 + 102}-{n % 4}" if n % 4 else str(n // 4 + 102) for n in range(1404)]
    pairs = zip(charges * 5, articles, strict=False)
    labels = collect([{"charges": [c], "articles": [a], "penalty": ["拘役"]} for c, a in pairs])
    own = {"charges": charges[-1:], "articles": articles[-1:], "penalty": "拘役"}
    names = tuple(f"被告人{n}" for n in range(63))
    answer = {"judgments": [{"name": name, **own} for name in names]}
    example = Example(1, "事实", names, answer=answer)
    rules = schema(example, labels)
    assert json.dumps(rules).count(json.dumps(charges[7])) == 1
    assert matches(rules, target(example))
    assert not matches(rules, target(example).replace(charges[-1], "第322号犯罪罪", 1))
