"""Example -> chat messages -> token ids. Training and serving both come here."""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from panjue.prompts import tasks
from panjue.prompts.example import Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.parts import SYNTAX, part_of_tokens
from panjue.prompts.task import Messages, task_folders


def prompt_files(task: str) -> list[Path]:
    """Return the prompts of a task: its own, then one for each of its several calls."""
    folder = task_folders()[task]
    return [folder / "prompt.md", *sorted(folder.glob("prompt-*.md"))]


RULES = "2"
"""Which rules make a prompt of a text: `fit`, `neutralize`, `shield`. Raised where one changes, so
that tokens made by other rules are made anew, and a run that goes on says so."""

TEMPLATE_ARGS = {"enable_thinking": False}
"""Arguments of every chat template, in training and serving alike: the reply is the JSON at once.
Qwen3's hybrid models then put an empty think block into the prompt; other templates ignore it."""

MARKUP = re.compile(r"<(?=[^>\s]{1,64}>)")


def neutralize(text: str) -> str:
    """Replace the `<` of whatever looks like a chat marker or tag by the full-width `＜`.

    Once a chat template has made one string of the messages, nobody can tell a `<|im_end|>` of
    the case from one of the template: the trainer and any OpenAI-compatible endpoint alike would
    read it as a token. Nothing else is touched.
    """
    return MARKUP.sub("＜", text)


CONTROL = re.compile(r"[<\[]\S+[>\]]")
"""How an added token looks that steers a model though it is not called special."""


def control_ids(tokenizer: Any) -> dict[str, int]:
    """Return the added tokens that steer a model -> their ids.

    `all_special_tokens` has only those with a role, and not the `[INST]` of Mistral's tokenizers.
    Words and white space that were added for their own sake are left out.
    """
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and (token.special or CONTROL.fullmatch(token.content))
    }


@lru_cache(maxsize=8)
def _control_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    tokens = control_ids(tokenizer)
    # Some tokenizers lower cases, or write a space as ▁, before they look for their tokens.
    written = sorted({*tokens, *(token.replace("▁", " ") for token in tokens)}, key=len)[::-1]
    return re.compile(_one_of(written), re.IGNORECASE) if written else None


def _one_of(words: Sequence[str]) -> str:
    """Return a pattern of words that looks once at what many of them begin with.

    Joined by `|`, the thousand added tokens of some tokenizers take minutes for a hostile text.
    """
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[:1], []).append(word[1:])
    is_whole = by_first.pop("", None) is not None
    ways = [re.escape(first) + _one_of(rest) for first, rest in by_first.items()]
    return f"(?:{'|'.join(ways)}){'?' if is_whole else ''}" if ways else ""


def shield(tokenizer: Any, text: str) -> str:
    """Replace the first character of whatever this tokenizer would read as a control token.

    By its full-width twin, as `neutralize` does for markers of any model: `[INST]` is `［INST]`.
    `load_tokenizer` has seen to it that this suffices.
    """
    pattern = _control_pattern(tokenizer)
    while pattern and pattern.search(text):
        text = pattern.sub(lambda found: _full_width(found[0][0]) + found[0][1:], text)
    return text


def _full_width(sign: str) -> str:
    if "!" <= sign <= "~":
        return chr(ord(sign) + 0xFEE0)
    return "＊" if sign == "＿" else "＿"


def shielded(tokenizer: Any, messages: Messages) -> Messages:
    """Return chat messages in whose contents this tokenizer reads no control token."""
    return [{**said, "content": shield(tokenizer, said["content"])} for said in messages]


def render(task: str, example: Example, call: str = "") -> Messages:
    """Fill `tasks/<task>/prompt.md` and return it as one user message, byte for byte.

    Args:
        task: The folder's name.
        example: What fills it.
        call: Which of several calls is asked: it fills `prompt-<call>.md`.

    Raises:
        UserError: The template names a field that the example lacks.
    """
    name = f"{task}/prompt{call and f'-{call}'}.md"
    place = next(place for root in tasks.__path__ if (place := Path(root) / name).exists())
    template = place.read_text("utf-8")
    fields = {"text": example.text, **example.inputs}
    try:
        content = template.format_map({key: neutralize(value) for key, value in fields.items()})
    except KeyError as error:
        have = ", ".join(fields)
        raise UserError(f"tasks/{name} asks for {error}; the example has {have}") from None
    return [{"role": "user", "content": content}]


def prompt_ids(tokenizer: Any, messages: Messages) -> list[int]:
    """Return the token ids of the prompt, up to where the reply begins."""
    ids: list[int] = tokenizer.apply_chat_template(
        shielded(tokenizer, messages),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **TEMPLATE_ARGS,
    )
    return ids


def reply_ids(tokenizer: Any, reply: str) -> list[int]:
    """Return the token ids of a reply with the end token that closes it."""
    ids: list[int] = tokenizer(shield(tokenizer, reply), add_special_tokens=False).input_ids
    return [*ids, tokenizer.eos_token_id]


def reply_parts(tokenizer: Any, reply: str) -> list[str]:
    """Return for every token of `reply_ids` the field of the reply that it belongs to."""
    reply = shield(tokenizer, reply)
    coded = tokenizer(reply, add_special_tokens=False, return_offsets_mapping=True)
    return [*part_of_tokens(reply, coded.offset_mapping), SYNTAX]
