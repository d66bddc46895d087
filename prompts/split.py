"""The split of a cases file into training and held-out examples, the same for every stage."""

import hashlib

from panjue.prompts.task import Example


def is_held_out(example: Example) -> bool:
    """Choose a tenth of all examples by the hash of their text, whatever file they stand in."""
    return int(text_hash(example)[:8], 16) % 10 == 0


def text_hash(example: Example) -> str:
    """Return what every choice among examples goes by: no id, no order, no label."""
    return hashlib.sha256(example.text.encode()).hexdigest()
