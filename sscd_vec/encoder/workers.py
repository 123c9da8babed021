"""Threads that do what they are given, and survive a Ctrl-C at any moment."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias, TypeVar

T = TypeVar("T")
_Outcome: TypeAlias = tuple[T] | BaseException


class Workers:
    """A few threads with one queue of work.

    A thread pool of the standard library can deadlock on Ctrl-C: its semaphore is written in
    Python, and an interrupt in the middle of it leaves a lock taken that the workers wait for. All
    that is shared here is ``SimpleQueue``, which is written in C and cannot be interrupted
    half-way.
    """

    def __init__(self, number: int, name: str, begin: Callable[[], object] = lambda: None) -> None:
        """Start ``number`` threads; each has called ``begin`` when this returns."""
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._dropping = False
        begun: SimpleQueue[_Outcome[object]] = SimpleQueue()

        def serve() -> None:
            begun.put(_outcome(begin))
            while (work := self._work.get()) is not None:
                if not self._dropping:
                    work()
                del work  # or all it worked on stays alive until the next one comes

        self._threads = [
            Thread(target=serve, name=f"sscd-vec-{name}_{index}", daemon=True)
            for index in range(number)
        ]
        try:
            for thread in self._threads:
                thread.start()
            for _ in self._threads:
                _result(begun.get())
        except BaseException:  # also Ctrl-C: nobody would ever end these threads
            self.stop()
            raise

    def __len__(self) -> int:
        """Return the number of threads."""
        return len(self._threads)

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        """Have ``work`` done by a thread; what is returned waits for its result, once."""
        answer: SimpleQueue[_Outcome[T]] = SimpleQueue()
        self._work.put(lambda: answer.put(_outcome(work)))
        return lambda: _result(answer.get())

    def stop(self) -> None:
        """Let the threads end when all they were given is done, without waiting for them."""
        for _ in self._threads:
            self._work.put(None)

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Drop what has not begun, which nobody may wait for any more; wait for what has."""
        self._dropping = True
        self.stop()
        self.join()


def _outcome(work: Callable[[], T]) -> _Outcome[T]:
    try:
        return (work(),)
    except BaseException as error:  # handed to the thread that waits
        return error


def _result(outcome: _Outcome[T]) -> T:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome[0]
