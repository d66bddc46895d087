"""Example -> chat messages -> token ids, for both training and serving."""

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
    """Return the templates of a task: `prompt.md`, then those of its further calls."""
    folder = task_folders()[task]
    return [folder / "prompt.md", *sorted(folder.glob("prompt-*.md"))]


RULES = "2"
"""Version of the rules that turn a text into a prompt: `fit`, `neutralize`, `shield`. Raise it when
one changes: cached tokens are then rebuilt, and a run that resumes reports the difference."""

TEMPLATE_ARGS = {"enable_thinking": False}
"""Arguments of every chat template, in training and serving: the reply starts with the JSON.
Qwen3's hybrid models then put an empty think block into the prompt; other templates ignore it."""

MARKUP = re.compile(r"<(?=[^>\s]{1,64}>)")


def neutralize(text: str) -> str:
    """Replace the `<` of every string that looks like a chat marker or tag by the full-width `＜`.

    After the chat template is applied, a `<|im_end|>` of the case looks like one of the template:
    both the trainer and an OpenAI-compatible endpoint would read it as a token. The rest of the
    text stays as it is.
    """
    return MARKUP.sub("＜", text)


CONTROL = re.compile(r"[<\[]\S+[>\]]")
"""The form of a control token that the tokenizer does not mark as special."""


def control_ids(tokenizer: Any) -> dict[str, int]:
    """Return the control tokens among the added tokens -> their ids.

    `all_special_tokens` has only tokens with a role, and not the `[INST]` of Mistral's tokenizers.
    Added tokens that are plain words or white space are left out.
    """
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and (token.special or CONTROL.fullmatch(token.content))
    }


@lru_cache(maxsize=8)
def _control_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    tokens = control_ids(tokenizer)
    # Some tokenizers change to lower case, or replace spaces by ▁, before they match tokens.
    words = sorted({*tokens, *(token.replace("▁", " ") for token in tokens)}, key=len)[::-1]
    return re.compile(_any_of(words), re.IGNORECASE) if words else None


def _any_of(words: Sequence[str]) -> str:
    """Return a pattern that matches any of the words; common prefixes are factored out.

    With a plain `|`, the thousand added tokens of some tokenizers take minutes on a hostile text.
    """
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[:1], []).append(word[1:])
    is_whole = by_first.pop("", None) is not None
    patterns = [re.escape(first) + _any_of(rest) for first, rest in by_first.items()]
    return f"(?:{'|'.join(patterns)}){'?' if is_whole else ''}" if patterns else ""


def shield(tokenizer: Any, text: str) -> str:
    """Replace the first character of every control token of this tokenizer in a text.

    The full-width form replaces it, as in `neutralize`: `[INST]` becomes `［INST]`.
    `load_tokenizer` has checked that this is enough.
    """
    pattern = _control_pattern(tokenizer)
    while pattern and pattern.search(text):
        text = pattern.sub(lambda match: _full_width(match[0][0]) + match[0][1:], text)
    return text


def _full_width(character: str) -> str:
    if "!" <= character <= "~":
        return chr(ord(character) + 0xFEE0)
    return "＊" if character == "＿" else "＿"


def shielded(tokenizer: Any, messages: Messages) -> Messages:
    """Return the chat messages with shielded contents."""
    return [{**message, "content": shield(tokenizer, message["content"])} for message in messages]


def render(task: str, example: Example, call: str = "") -> Messages:
    """Fill `tasks/<task>/prompt.md` and return it as one user message, byte for byte.

    Args:
        task: The name of the task.
        example: The example with the fields of the template.
        call: The name of one of several calls, whose template is `prompt-<call>.md`.

    Raises:
        UserError: The template names a field that the example lacks.
    """
    name = f"{task}/prompt{call and f'-{call}'}.md"
    path = next(path for root in tasks.__path__ if (path := Path(root) / name).exists())
    template = path.read_text("utf-8")
    fields = {"text": example.text, **example.inputs}
    try:
        content = template.format_map({key: neutralize(value) for key, value in fields.items()})
    except KeyError as error:
        known = ", ".join(fields)
        raise UserError(f"tasks/{name} asks for {error}; the example has {known}") from None
    return [{"role": "user", "content": content}]


def prompt_ids(tokenizer: Any, messages: Messages) -> list[int]:
    """Return the token ids of the prompt, up to the start of the reply."""
    ids: list[int] = tokenizer.apply_chat_template(
        shielded(tokenizer, messages),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **TEMPLATE_ARGS,
    )
    return ids


def reply_ids(tokenizer: Any, reply: str) -> list[int]:
    """Return the token ids of a reply, with the end token."""
    ids: list[int] = tokenizer(shield(tokenizer, reply), add_special_tokens=False).input_ids
    return [*ids, tokenizer.eos_token_id]


def reply_parts(tokenizer: Any, reply: str) -> list[str]:
    """Return the field of every token of `reply_ids`."""
    reply = shield(tokenizer, reply)
    encoded = tokenizer(reply, add_special_tokens=False, return_offsets_mapping=True)
    return [*part_of_tokens(reply, encoded.offset_mapping), SYNTAX]
