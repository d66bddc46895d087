"""Cases that wait for the text classifier at the same time are looked at in one call."""

import asyncio
from collections.abc import Sequence

import pytest

from panjue.finetune.classifier.opinions import Opinion
from panjue.prompts.example import Example
from panjue.serve.together import AT_ONCE, Together

CASES = 3 * AT_ONCE


def opinion(example: Example) -> Opinion:
    return Opinion({}, {"charges": [example.text]})


class Look:
    """Looks at cases; `sizes` says at how many in each call. That of the text "bad" cannot be."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, examples: Sequence[Example]) -> list[list[Opinion]]:
        self.sizes.append(len(examples))
        if any(example.text == "bad" for example in examples):
            raise ValueError("bad")
        return [[opinion(example)] for example in examples]


def test_each_gets_its_own_opinions_and_few_calls_are_made() -> None:
    look = Look()
    together = Together(look)
    examples = [Example(number, f"案情{number}") for number in range(CASES)]

    async def ask_all() -> list[list[Opinion]]:
        return await asyncio.gather(*map(together.opinions, examples))

    for _ in range(2):  # an event loop of its own each time
        look.sizes.clear()
        assert asyncio.run(ask_all()) == [[opinion(example)] for example in examples]
        assert look.sizes == [AT_ONCE] * 3


def test_one_that_fails_or_has_gone_does_not_touch_the_others() -> None:
    look = Look()
    together = Together(look)

    async def ask_all() -> None:
        bad, gone, *others = (
            asyncio.create_task(together.opinions(Example(number, text)))
            for number, text in enumerate(["bad", "gone", "a", "b"])
        )
        await asyncio.sleep(0)  # all wait
        gone.cancel()
        assert await asyncio.gather(*others) == [[opinion(Example(0, text))] for text in "ab"]
        with pytest.raises(ValueError, match="bad"):
            await bad
        assert gone.cancelled()
        assert await together.opinions(Example(4, "c")) == [opinion(Example(4, "c"))]

    asyncio.run(ask_all())
