"""The driver of a generation in a Ray cluster: it shares out cases and collects their rows.

It stands on Ray's actors and not on Ray Data, whose streamed rows were lost or doubled when a
worker was killed (ray#35768): here every row comes to the one process that knows what is missing.
"""

import logging
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError

from panjue.prompts.plumbing.errors import UserError, first_line
from panjue.serve.source import POLL_S
from panjue.serve.work import Batch, Row, Step

RESTARTS = 3
"""How often Ray starts the process of a replica again, on any machine of the cluster."""

OPEN_BATCHES = 2
"""Batches that a replica has: one that it answers, and one that waits behind it."""

WAYS_OUT = {
    "Could not find any running Ray instance": (
        "`.venv/bin/ray start --head` starts a cluster here, with --address=HOST:6379 it joins "
        "one; ray=local needs no cluster"
    ),
    "Found multiple active Ray instances": "set RAY_ADDRESS=HOST:6379 to one of them",
    "token": "set RAY_AUTH_MODE=token and copy the cluster's ~/.ray/auth_token to this machine",
}
"""Words of Ray's message -> what to do."""

ONE_MACHINE = ("VLLM_HOST_IP", "VLLM_PORT", "VLLM_API_KEY")
"""Variables of vLLM that are not for other machines."""


@contextmanager
def cluster(address: Literal["auto", "local"]) -> Iterator[None]:
    """Connect to a Ray cluster; at the end of the block all replicas have ended.

    Raises:
        UserError: This machine belongs to none, or Ray cannot start or connect.
    """
    variables = {
        key: value
        for key, value in os.environ.items()
        if key.startswith("VLLM_") and key not in ONE_MACHINE
    }
    words: dict[str, Any] = {"runtime_env": {"env_vars": variables}, "logging_level": logging.ERROR}
    if address == "local":  # its ports are open to the network; Ray asks for ~/.ray/auth_token
        words |= {"include_dashboard": False}
        make_token()
    try:
        ray.init(address, **words)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise UserError(f"ray={address}: {reason_of(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def make_token() -> None:
    """Make the token of this user's clusters if there is none; Ray's own would be readable by all.

    Here and not at `ray.init`, whose processes would keep the file mode mask for all their files.
    """
    if not (Path.home() / ".ray/auth_token").exists():
        words = [str(Path(sys.executable).with_name("ray")), "get-auth-token", "--generate"]
        subprocess.run(words, umask=0o077, check=False, capture_output=True)


def reason_of(error: Exception) -> str:
    """Return Ray's message in one line, with the way out where it is known."""
    message = " ".join(str(error).split())
    for words, way_out in WAYS_OUT.items():
        if words in message:
            # What follows the first sentence names options of Ray's own.
            return f"{message.split('. ')[0].rstrip('.')}; {way_out}"
    return message


class Fleet:
    """The replicas, what each is doing, and what must be asked again.

    Attributes:
        again: Number of examples that were given out again since their replica had ended.
    """

    def __init__(
        self,
        replicas: list[Any],
        batches: Iterator[Batch],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the engines of all replicas; `check` is called twice a second and may raise."""
        self.again = self._solved = self._calls = self._tokens = 0
        self._count, self._batches, self._check = len(replicas), batches, check
        self._alive: list[Any] = []
        self._have_run: set[Any] = set()
        self._reason = ""
        self._returned: deque[Batch] = deque()
        self._starting: dict[Any, Any] = {}
        self._answering: dict[Any, tuple[Any, Batch]] = {}
        self._in_flight: dict[Any, int] = {}
        for replica in replicas:
            self._start(replica)

    def wait_for_first(self) -> None:
        """Wait until the engine of a replica is running.

        Raises:
            UserError: A replica cannot start, or all have ended for good.
        """
        while not self._alive:
            self._next()

    def steps(self) -> Iterator[Step]:
        """Yield what has been finished since the last time, at least twice a second, to the end.

        Raises:
            UserError: A replica cannot start, or all have ended for good.
        """
        self._share_out()
        while self._answering or self._returned:
            rows = self._next()
            self._share_out()
            yield self._step(rows)

    def _step(self, new: list[Row]) -> Step:
        replicas = f"{len(self._alive)} of {self._count} replicas"
        again = f", {self.again} cases given out again" if self.again else ""
        in_flight = sum(self._in_flight.values())
        return Step(new, self._solved, self._calls, self._tokens, in_flight, replicas + again)

    def _start(self, replica: Any) -> None:
        """Start the engine of a replica; it may be in a new process."""
        # Ray tries again, also while it looks for a machine; it gives up after `RESTARTS`.
        started = replica.start.options(max_task_retries=-1).remote()
        self._starting[started] = replica

    def _share_out(self) -> None:
        """Give batches to replicas, first to those that have none."""
        have = Counter(replica for replica, _ in self._answering.values())
        for depth in range(OPEN_BATCHES):
            for replica in (each for each in self._alive if have[each] <= depth):
                batch = self._returned.popleft() if self._returned else next(self._batches, None)
                if batch is None:
                    return
                answer = replica.answer.options(num_returns="streaming")
                self._answering[answer.remote(batch.examples, batch.rows)] = (replica, batch)
                have[replica] += 1

    def _next(self) -> list[Row]:
        """Wait for an outcome, at most `POLL_S`; take all that are there and return the new rows.

        Raises:
            UserError: A replica cannot start, or all have ended for good.
        """
        self._check()
        waiting = [*self._starting, *self._answering]
        if not self._starting and not self._alive:
            raise UserError(
                f"ray: all replicas have ended for good: {self._reason}; see debug.log in the run "
                "folder, or Ray's logs; finished rows are kept, run the same command to resume"
            )
        ray.wait(waiting, timeout=POLL_S, fetch_local=False)
        ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)
        return [row for outcome in ready for row in self._take(outcome)]

    def _take(self, outcome: Any) -> list[Row]:
        """Take an engine that has started, or the next step of a batch; return its rows."""
        try:
            if outcome in self._starting:
                ray.get(outcome)
                replica = self._starting.pop(outcome)
                self._alive.append(replica)
                self._have_run.add(replica)
                return []
            step: Step = ray.get(next(outcome))
        except StopIteration:
            del self._answering[outcome]
            self._in_flight.pop(outcome, None)
            return []
        except RayTaskError as error:
            if not isinstance(error.cause, UserError):
                raise
            if self._starting.get(outcome) not in self._have_run:
                raise error.cause from None
            return self._lose(outcome, error.cause)  # say, its GPU has failed
        except RayError as error:  # the process of the replica, its machine, or rows there
            return self._lose(outcome, error)
        _, batch = self._answering[outcome]
        for row in step.rows:
            batch.add(row)
            self._tokens += row.get("completion_tokens", 0)
        self._calls += len(step.rows)
        # A batch that is asked again counts its solved examples again.
        self._solved += max(0, step.solved - batch.solved)
        batch.solved = max(step.solved, batch.solved)
        self._in_flight[outcome] = step.in_flight
        return step.rows

    def _lose(self, outcome: Any, error: Exception) -> list[Row]:
        """Have what a replica left asked again, and its engine started again; there are no rows."""
        self._reason = first_line(error).rstrip(".")
        if outcome in self._starting:  # it cannot be started again
            del self._starting[outcome]
            return []
        replica, batch = self._answering.pop(outcome)
        self._in_flight.pop(outcome, None)
        left = batch.again()
        self._returned.append(left)
        self.again += len(left.examples) - left.solved
        if replica in self._alive:
            self._alive.remove(replica)
            self._start(replica)
        return []
