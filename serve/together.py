"""Ask the text classifier about all waiting cases at the same time, with one call."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from panjue.finetune.classifier.opinions import Opinion
from panjue.prompts.example import Example

AT_ONCE = 64
"""Number of cases that are looked at together; more would keep the first ones waiting."""

Waiting = tuple[Example, asyncio.Future[list[Opinion]]]


@dataclass
class Together:
    """Looks at the cases of one event loop in a thread. Cases that come meanwhile are next."""

    look: Callable[[Sequence[Example]], list[list[Opinion]]]  # asks the text classifier
    _waiting: list[Waiting] = field(default_factory=list)
    _looking: asyncio.Task[None] | None = None  # kept, since the loop has only a weak reference

    async def opinions(self, example: Example) -> list[Opinion]:
        """Return the opinion on every item of an example's answer."""
        found: asyncio.Future[list[Opinion]] = asyncio.get_running_loop().create_future()
        self._waiting.append((example, found))
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return await found

    async def _look(self) -> None:
        """Look at the waiting cases, in batches, until none waits."""
        while self._waiting:
            batch = self._waiting[:AT_ONCE]
            del self._waiting[:AT_ONCE]
            await self._look_at(batch)

    async def _look_at(self, batch: Sequence[Waiting]) -> None:
        """Ask the text classifier about a batch in a thread; hand out its opinions, or its error.

        A case that fails must not fail the others: after an error, each is looked at alone.
        """
        (_, found), *others = batch
        try:
            opinions = await asyncio.to_thread(self.look, [example for example, _ in batch])
            for (_, waiting), of_case in zip(batch, opinions, strict=True):
                if not waiting.done():  # nobody may wait for it any more
                    waiting.set_result(of_case)
        except Exception as error:
            if others:
                for one in batch:
                    await self._look_at([one])
            elif not found.done():
                found.set_exception(error)
