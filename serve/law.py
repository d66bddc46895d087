"""Texts of law articles, to show with an article's number."""

from pathlib import Path

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json


def read_law(path: Path) -> dict[str, str]:
    """Return article -> text; the paragraphs of article 264 are `264-1`, `264-2` and so on.

    Raises:
        UserError: The file is missing or has another form.
    """
    texts = {}
    try:
        for article, entry in read_json(path).items():
            texts[article] = str(entry["text"])
            for number, paragraph in enumerate(entry.get("paragraphs", ()), 1):
                texts[f"{article}-{number}"] = str(paragraph)
    except (AttributeError, TypeError, KeyError):
        form = '{"264": {"text": "…", "paragraphs": ["…"]}, …}'
        raise UserError(f"{path}: expected {form}") from None
    return texts
