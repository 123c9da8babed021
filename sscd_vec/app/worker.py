"""One thread that alone touches the encoder and the index, fed in micro-batches.

Requests that arrive while it works wait in a bounded queue; it then takes what is there, up to
``batch`` images (after at most ``patience`` seconds for a first companion), and answers them with
one forward pass and one index search. A network costs less per image in a batch, so throughput
grows with the load; a lone request waits no more than ``patience``.
"""

import asyncio
import queue
import threading
import time
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
    kind: str
    item: T
    done: "Future[R]" = field(default_factory=Future)


class Worker:
    """Runs jobs of a kind together. Jobs of different kinds keep their order.

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
        self._jobs: queue.Queue[_Job[Any, Any] | None] = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._run, name="sscd-vec-worker", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Jobs that wait."""
        return self._jobs.qsize()

    async def ask(self, kind: str, item: object) -> Any:  # noqa: ANN401 - the handler's own type
        """Hand in one item and wait for its result.

        Raises:
            Refused: 503 when the queue is full.
        """
        job: _Job[Any, Any] = _Job(kind, item)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self.metrics.refuse("queue")
            raise Refused(503, "too many images are waiting; try again in a second") from None
        return await asyncio.wrap_future(job.done)

    def close(self, timeout: float = 10.0) -> None:
        """Finish what waits and stop."""
        self._jobs.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        held: _Job[Any, Any] | None = None
        while True:
            first = held or self._jobs.get()
            held = None
            if first is None:
                return
            jobs = [first]
            deadline = time.monotonic() + self.patience
            while len(jobs) < self.batch:
                try:
                    job = self._jobs.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    break
                if job is None:
                    self._jobs.put(None)
                    break
                if job.kind != first.kind:
                    held = job
                    break
                jobs.append(job)
            self._work(first.kind, jobs)

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
