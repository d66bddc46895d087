"""Read the replies of models. All functions accept any text, in time linear in its length."""

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

from panjue.prompts.plumbing.files import EACH_KEY_ONCE


def load_json(reply: str) -> Any:
    """Return the value of `reply` as JSON; None if it is invalid, or an object repeats a key."""
    try:
        return EACH_KEY_ONCE.decode(reply)
    except (ValueError, RecursionError):
        return None


INVISIBLE = re.compile(r"[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]+")


def visible(text: str) -> str:
    """Return a text without invisible characters: zero-width ones, marks, soft hyphens."""
    if text.isprintable():  # the usual case, and ten times faster
        return text
    return INVISIBLE.sub("", text)


def flatten_forms(text: str) -> str:
    """Convert full-width digits, letters and brackets to plain ones; drop invisible characters."""
    return unicodedata.normalize("NFKC", visible(text))


BLOCK = re.compile(
    r"(?P<open><\|?|\[(?=/?think)|◁)(?:(?P<end>/|end_)|start_)?"
    r"(?P<name>(?:\w{1,20}:)?(?:think(?:ing)?|thoughts?|reason(?:ing)?|analysis|reflection))"
    r"(?:\|?>|\]|▷)"
    r"|<\|channel\|>\s?(?:(?P<final>final)|[a-z]+)\b[^{}\n]{0,60}?<\|message\|>"
    r"|(?P<plain>assistantfinal(?=\s*+[{\[`]))",
    re.IGNORECASE,
)
"""Pattern of the start or end of a think block: `<think>`, `[/THINK]`, `◁think▷`, `<seed:think>`,
`<|END_THINKING|>`, but no heading such as `[Analysis]`. For gpt-oss, it matches the start of each
channel. The channel `final` is the answer, written `assistantfinal` without special tokens."""


def after_thinking(reply: str) -> str:
    """Drop all think blocks: `<think>…</think>{"a": 1}` -> `{"a": 1}`.

    A block without an end extends to the end of the reply. If the prompt has begun a block, the
    reply has only its end, and all text before this end is dropped. Within a block, only the end
    with the same brackets and name counts.
    """
    kept: list[str] = []
    place = 0  # start of the text that is neither kept nor dropped yet
    block = None  # brackets and name of the block that has begun
    for tag in BLOCK.finditer(reply):
        kind = (tag["open"], (tag["name"] or "").lower())
        # The group `end` is the `/` of `</think>`. For gpt-oss, thinking ends where the answer
        # begins: `<|channel|>final<|message|>` (`final`) or `assistantfinal` (`plain`).
        is_end = bool(tag["end"] or tag["final"] or tag["plain"])
        if block and not (is_end and kind == block):
            continue
        if not is_end:
            kept.append(reply[place : tag.start()])
            block = kind
        elif block:
            block = None
        else:  # the prompt has begun this block: what was kept so far is a part of it
            kept.clear()
        place = tag.end()
    if not block:
        kept.append(reply[place:])
    return "".join(kept)


class Found(NamedTuple):
    """An object of a reply; empty if it has two values for a key."""

    value: dict[str, Any]
    is_whole: bool  # False if the reply ends within it


class _Parsed(NamedTuple):
    """An object of a text, with the objects within it."""

    values: list[dict[str, Any]]  # those that have ended; inner ones come first
    end: int  # end of the outer object, or where it stops being JSON
    is_valid: bool  # False if the outer object does not end, or stops being JSON


MAX_PARTS = 1000
"""Most places of a reply at which reading an object is tried; no answer has so many."""


def json_objects(reply: str) -> list[Found]:
    """Return all objects of a reply that are valid JSON; inner ones come first.

    The text around them does not matter. Numbers become texts. If the reply ends within an object,
    the object has only what is certain, without a string or number at the very end, which may be
    cut. MAX_PARTS objects or more, not counting inner ones, give an empty list: the last one, which
    counts as the answer, might not be in it.
    """
    found: list[Found] = []
    start = reply.find("{")
    for _ in range(MAX_PARTS):
        if start < 0:
            return found
        parsed = _parse(reply, start)
        following = reply.find("{", parsed.end)
        # The reply can end within this object only if no other one begins after the error.
        may_be_cut = not parsed.is_valid and following < 0
        cut = _parse_cut(reply[start:]) if may_be_cut else []
        found += cut or [Found(value, is_whole=True) for value in parsed.values]
        start = following
    return []


def _parse(text: str, start: int = 0) -> _Parsed:
    """Parse the object at `start`, as far as it is JSON, and return it with all inner objects.

    Numbers become texts as they are written, since labels are texts: `[264]` -> `["264"]`.
    """
    values: list[dict[str, Any]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Add an object to `values`; the decoder calls this at the end of an object."""
        value: dict[str, Any] = {}
        for key, item in pairs:
            if value.setdefault(key, item) != item:  # two answers: none counts
                value = {}
                break
        values.append(value)
        return value

    decoder = json.JSONDecoder(
        object_pairs_hook=keep, parse_int=str, parse_float=str, parse_constant=str, strict=False
    )
    try:
        _, end = decoder.raw_decode(text, start)
    except json.JSONDecodeError as error:
        # A string without an end extends to the end of the text. Only escaped quotes can follow in
        # it, so no object with a key.
        is_in_string = error.msg.startswith("Unterminated string")
        end = len(text) if is_in_string else max(error.pos, start + 1)
        return _Parsed(values, end, is_valid=False)
    except RecursionError:
        return _Parsed(values, len(text), is_valid=False)
    return _Parsed(values, end, is_valid=True)


JSON_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+(?P<closing_quote>")?|[\[\]{},]', re.DOTALL)
BRACKETS = {"{": "}", "[": "]"}


def _parse_cut(text: str) -> list[Found]:
    """Return the objects of a text that ends within an object: `{"a":[1,2` -> `{"a":["1"]}`.

    The text is cut back to what is certain, here `{"a":[1`, and its open brackets are closed.
    Numbers become texts, as in `_parse`. A complete string at the very end is also certain, unless
    it is a key: then closing the brackets gives no JSON.
    """
    open_brackets: list[str] = []  # the closing sign of each open bracket, the outermost first
    after_string = certain = 0
    for token in JSON_TOKEN.finditer(text):
        sign = token[0]
        if token["closing_quote"]:
            after_string = token.end()
        elif sign in BRACKETS:
            open_brackets.append(BRACKETS[sign])
            certain = token.end()
        elif sign == ",":
            certain = token.start()
        elif open_brackets and sign in "]}":
            open_brackets.pop()
            certain = token.end()
    closing = "".join(reversed(open_brackets))
    ends_in_string = not text[after_string:].strip()
    for end in (after_string, certain) if ends_in_string else (certain,):
        parsed = _parse(text[:end] + closing)
        if parsed.is_valid:
            # An object is in `values` when it ends. So those that `closing` ended are the last.
            n_whole = len(parsed.values) - closing.count("}")
            return [Found(value, i < n_whole) for i, value in enumerate(parsed.values)]
    return []


def last_object(reply: str, keys: Sequence[str]) -> Found:
    """Return the last whole object with all these keys, else the last with any, else none."""
    with_all = None
    with_any = Found({}, is_whole=False)
    for found in json_objects(reply):
        if not found.value.keys().isdisjoint(keys):
            with_any = found
        if found.is_whole and found.value.keys() >= set(keys):
            with_all = found
    return with_all or with_any


def strings_in(value: Any) -> list[str]:
    """Return a list with a string, or with the strings of a list."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, str)]
