"""Turn an example into chat messages, and these into token ids, for training and serving."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from panjue.prompts import tasks
from panjue.prompts.example import Example
from panjue.prompts.plumbing.errors import UserError, first_line
from panjue.prompts.task import Messages


def prompt_file(task: str) -> Path:
    """Return the `prompt.md` of a task."""
    places = [Path(root) / task / "prompt.md" for root in tasks.__path__]
    for place in places:
        if place.exists():
            return place
    raise UserError(f"{places[-1]}: is missing; write the prompt of the task there")


OPINIONS = "{opinions}"
"""Field of a template for the text classifier's opinions (`finetune.classifier.opinions`)."""

TEMPLATE_ARGS = {"enable_thinking": False}
"""Arguments of chat templates, in training and serving, so that the reply starts with the JSON
object. Templates of Qwen3's hybrid models then put an empty think block into the prompt. Most
others ignore the argument; some refuse it, see `template_args`."""

MARKUP = re.compile(r"<(?=[^>\s]{1,64}>)")
"""Pattern of the `<` of a string that looks like a chat marker or tag: `<|im_end|>`, `<b>`."""


def neutralize(text: str) -> str:
    """Replace every `<` that `MARKUP` matches by the full-width `＜`.

    Otherwise the trainer, or an OpenAI-compatible endpoint, would read a `<|im_end|>` in the text
    of a case as a control token of the chat template. The rest of the text does not change.
    """
    return MARKUP.sub("＜", text)


CONTROL = re.compile(r"[<\[]\S+[>\]]")
"""Pattern of a control token that the tokenizer does not mark as special."""

CONTROL_WORD = re.compile(r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_\w+|THINK|IMG)\]")
"""Pattern of control tokens of Mistral's tokenizers that `MARKUP` does not match."""


def control_ids(tokenizer: Any) -> dict[str, int]:
    """Return control token -> its id, for a tokenizer.

    They are the added tokens without plain words and white space. `all_special_tokens` would not be
    enough, since it lacks the `[INST]` of Mistral's tokenizers.
    """
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and (token.special or CONTROL.fullmatch(token.content))
    }


@lru_cache(maxsize=8)
def _control_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of every control token of a tokenizer; None if there is none.

    The tokenizer of an endpoint is unknown (None). Then the pattern is that of Mistral's tokens.
    """
    if tokenizer is None:
        return CONTROL_WORD
    words = set(control_ids(tokenizer))
    # Before they match tokens, some tokenizers convert to lower case or replace spaces by ▁.
    words |= {token.replace("▁", " ") for token in words}
    return re.compile(_any_of(sorted(words)), re.IGNORECASE) if words else None


def _any_of(words: Sequence[str]) -> str:
    """Return a pattern that matches any of the words: `a(?:b|c)` for `ab` and `ac`.

    Some tokenizers have a thousand added tokens. A plain `|` of them would take minutes for a text
    that was written to attack it.
    """
    rests_of_first: dict[str, list[str]] = {}
    for word in words:
        rests_of_first.setdefault(word[:1], []).append(word[1:])
    may_end_here = rests_of_first.pop("", None) is not None
    if not rests_of_first:
        return ""
    branches = [re.escape(first) + _any_of(rests) for first, rests in rests_of_first.items()]
    pattern = f"(?:{'|'.join(branches)})"
    return f"{pattern}?" if may_end_here else pattern


def neutralize_tokens(tokenizer: Any, text: str) -> str:
    """Replace the first character of every control token of this tokenizer in a text.

    The new character is the full-width form, as in `neutralize`: `[INST]` becomes `［INST]`.
    `load_tokenizer` checks that the tokenizer then finds no control token.
    """
    pattern = _control_pattern(tokenizer)
    while pattern and pattern.search(text):
        text = pattern.sub(_with_full_width, text)
    return text


FULL_WIDTH = 0xFEE0
"""Difference of code points between an ASCII character and its full-width form."""


def _with_full_width(token: re.Match[str]) -> str:
    """Return a token with another first character: the full-width form, or `＿`.

    The character always changes, or `neutralize_tokens` would never end; so `＿` becomes `＊`.
    """
    first = token[0][0]
    rest = token[0][1:]
    if "!" <= first <= "~":
        return chr(ord(first) + FULL_WIDTH) + rest
    if first == "＿":
        return "＊" + rest
    return "＿" + rest


def neutralize_messages(tokenizer: Any, messages: Messages) -> Messages:
    """Apply `neutralize_tokens` to the content of every chat message."""
    return [
        {**message, "content": neutralize_tokens(tokenizer, message["content"])}
        for message in messages
    ]


def names_opinions(task: str) -> bool:
    """Say whether a task's prompt has a field for the text classifier's opinions."""
    return OPINIONS in prompt_file(task).read_text("utf-8")


def without_opinions(template: str) -> str:
    """Return a template without the paragraph that contains `{opinions}`."""
    end = "\n" if template.endswith("\n") else ""
    kept = []
    for paragraph in template.removesuffix(end).split("\n\n"):
        if OPINIONS not in paragraph:
            kept.append(paragraph)
        elif "{text}" in paragraph:
            raise UserError(f"prompt.md: {OPINIONS} needs a paragraph of its own, without {{text}}")
    return "\n\n".join(kept) + end


def render(task: str, example: Example) -> Messages:
    """Fill a task's `prompt.md` and return one user message.

    If an example has no opinions, the paragraph that contains `{opinions}` is left out.
    """
    path = prompt_file(task)
    template = path.read_text("utf-8")
    fields = {"text": example.text, **example.inputs}
    if OPINIONS in template and "opinions" not in fields:
        template = without_opinions(template)
    try:
        content = template.format_map({key: neutralize(value) for key, value in fields.items()})
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        problem = f"there is no field {error}" if isinstance(error, KeyError) else error
        known = ", ".join(f"{{{field}}}" for field in fields)
        raise UserError(
            f"{path}: {problem}; the fields are {known}; a brace that is text is written twice: "
            "{{ or }}"
        ) from None
    if "{text}" not in template:
        raise UserError(f"{path}: has no {{text}}, so that the model would not see the case")
    return [{"role": "user", "content": content}]


DATE = "26 Jul 2024"
"""The date for templates that ask for today's date, since a prompt must be the same tomorrow."""

SAME_DAY = f"{{% macro strftime_now(form) %}}{DATE}{{% endmacro %}}"
"""What stands before a template, to give it this date. As an argument, transformers 5.24 turns a
function into text."""


def prompt_ids(tokenizer: Any, messages: Messages) -> list[int]:
    """Return the token ids of the prompt, up to the start of the reply."""
    safe = neutralize_messages(tokenizer, messages)
    return _templated(tokenizer, safe, template_args(tokenizer))


@lru_cache(maxsize=8)
def template_args(tokenizer: Any) -> Mapping[str, Any]:
    """Return the arguments that the chat template of a tokenizer always gets.

    They are `TEMPLATE_ARGS`; none if the template refuses them, because its model always thinks.
    """
    from jinja2 import TemplateError  # noqa: PLC0415  # scoring needs no template

    trial = [{"role": "user", "content": "甲"}]
    said = ""
    for arguments in (TEMPLATE_ARGS, {}):
        try:
            _templated(tokenizer, trial, arguments)
        except TemplateError as error:
            said = first_line(error)
        else:
            return arguments
    problem = f"its chat template refuses a message of a user ({said})"
    raise UserError(f"{tokenizer.name_or_path}: {problem}; take another base")


def _templated(tokenizer: Any, messages: Messages, arguments: Mapping[str, Any]) -> list[int]:
    """Return the token ids of messages in the tokenizer's chat template.

    Some templates print today's date. `SAME_DAY` lets them print a fixed one, so that the prompt is
    the same in training and on every later day.
    """
    ids: list[int] = tokenizer.apply_chat_template(
        messages,
        chat_template=SAME_DAY + tokenizer.get_chat_template(),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **arguments,
    )
    return ids


def reply_ids(tokenizer: Any, reply: str) -> list[int]:
    """Return the token ids of a reply, with the end token."""
    text = neutralize_tokens(tokenizer, reply)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return [*ids, tokenizer.eos_token_id]
