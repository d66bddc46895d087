"""Example -> chat messages -> token ids. Training and serving both come here."""

import re
from pathlib import Path
from typing import Any

from panjue.prompts.errors import UserError
from panjue.prompts.parts import SYNTAX, part_of_tokens
from panjue.prompts.task import Example, Messages

TEMPLATES = Path(__file__).parent / "templates"


def templates_of(task: str) -> list[Path]:
    """Return the templates of a task: its own, then one for each of its several calls."""
    return [TEMPLATES / f"{task}.md", *sorted(TEMPLATES.glob(f"{task}-*.md"))]


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


def render(task: str, example: Example) -> Messages:
    """Fill `templates/<task>.md` and return it as one user message, byte for byte.

    Raises:
        UserError: The template names a field that the example lacks.
    """
    template = (TEMPLATES / f"{task}.md").read_text("utf-8")
    fields = {"text": example.text, **example.inputs}
    try:
        content = template.format_map({key: neutralize(value) for key, value in fields.items()})
    except KeyError as error:
        have = ", ".join(fields)
        raise UserError(f"templates/{task}.md asks for {error}; the example has {have}") from None
    return [{"role": "user", "content": content}]


def prompt_ids(tokenizer: Any, messages: Messages) -> list[int]:
    """Return the token ids of the prompt, up to where the reply begins."""
    ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **TEMPLATE_ARGS
    )
    return ids


def reply_ids(tokenizer: Any, reply: str) -> list[int]:
    """Return the token ids of a reply with the end token that closes it."""
    ids: list[int] = tokenizer(reply, add_special_tokens=False).input_ids
    return [*ids, tokenizer.eos_token_id]


def reply_parts(tokenizer: Any, reply: str) -> list[str]:
    """Return for every token of `reply_ids` the field of the reply that it belongs to."""
    coded = tokenizer(reply, add_special_tokens=False, return_offsets_mapping=True)
    return [*part_of_tokens(reply, coded.offset_mapping), SYNTAX]
