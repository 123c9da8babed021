"""One thread that alone touches the encoder and the index, fed in micro-batches.

Requests that arrive while it works wait in a bounded queue; it then takes what is there, up to
``batch`` images (after at most ``patience`` seconds for a first companion), and answers them with
one forward pass and one index search. A network costs less per image in a batch, so throughput
grows with the load; a lone request waits no more than ``patience``.

Kinds of work take turns, and what is slow (adding large images) comes in small batches: a search
waits for one batch of each other kind at most, however many of those wait.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sscd_vec.app.limits import Refused
from sscd_vec.app.metrics import Metrics

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Job(Generic[T, R]):
    item: T
    weight: float
    done: "Future[R]" = field(default_factory=Future)


class Worker:
    """Runs jobs of a kind together, in their order; kinds take turns.

    A batch ends with the job that brings its weight to 1.

    Attributes:
        handlers: For each kind, a function from items to as many results. A result that is an
            exception is raised to its own caller only. If the function itself raises, every item
            is tried again alone.
    """

    def __init__(
        self,
        handlers: dict[str, Callable[[Sequence[Any]], Sequence[Any]]],
        metrics: Metrics,
        *,
        batch: int = 16,
        patience: float = 0.004,
        waiting: int = 256,
    ) -> None:
        """Start the thread."""
        self.handlers = handlers
        self.metrics = metrics
        self.batch = batch
        self.patience = patience
        self.waiting = waiting
        self._changed = threading.Condition()
        # The kind whose turn comes next is first.
        self._jobs: dict[str, deque[_Job[Any, Any]]] = {kind: deque() for kind in handlers}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="sscd-vec-worker", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Jobs that wait."""
        return sum(map(len, self._jobs.values()))

    async def ask(self, kind: str, item: object, weight: float = 0.0) -> Any:  # noqa: ANN401 - the handler's own type
        """Hand in one item and wait for its result.

        Args:
            kind: Which handler it is for.
            item: What it gets.
            weight: The part of a batch that it may fill; 1 for what is best done alone.

        Raises:
            Refused: 503 when the queue is full.
        """
        job: _Job[Any, Any] = _Job(item, weight)
        with self._changed:
            if self.depth >= self.waiting:
                self.metrics.refuse("queue")
                raise Refused(503, "too many images are waiting; try again in a second")
            self._jobs[kind].append(job)
            self._changed.notify()
        return await asyncio.wrap_future(job.done)

    def close(self, timeout: float = 10.0) -> None:
        """Finish what waits and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            self._work(*turn)

    def _next(self) -> "tuple[str, list[_Job[Any, Any]]] | None":
        """The next batch and its kind; None when all is done and the worker was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.depth)
            kind = next((kind for kind, jobs in self._jobs.items() if jobs), None)
            if kind is None:
                return None
            if self.depth == 1 and not self._closed:  # a companion may be on its way
                self._changed.wait(self.patience)
            jobs = self._jobs[kind]
            batch, weight = [jobs.popleft()], 0.0
            while jobs and len(batch) < self.batch and (weight := weight + batch[-1].weight) < 1:
                batch.append(jobs.popleft())
            self._jobs[kind] = self._jobs.pop(kind)  # the last to have a turn again
            return kind, batch

    def _work(self, kind: str, jobs: list[_Job[Any, Any]]) -> None:
        # A caller that gave up (its request timed out) costs nothing more.
        jobs = [job for job in jobs if job.done.set_running_or_notify_cancel()]
        if not jobs:
            return
        self.metrics.batches.observe(len(jobs))
        for job, result in zip(jobs, self._results(kind, jobs), strict=True):
            if isinstance(result, Exception):
                job.done.set_exception(result)
            else:
                job.done.set_result(result)

    def _results(self, kind: str, jobs: list[_Job[Any, Any]]) -> list[Any]:
        """A result or an exception for each job; a batch that fails is worked on one by one."""
        try:
            return list(self.handlers[kind]([job.item for job in jobs]))
        except Exception as error:  # handed to the callers; the thread lives on
            if len(jobs) == 1:
                return [error]
            return [result for job in jobs for result in self._results(kind, [job])]
