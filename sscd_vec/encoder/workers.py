"""Threads that do what they are given, and survive a Ctrl-C at any moment."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


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
        self._closed = False
        begun: SimpleQueue[object] = SimpleQueue()

        def serve() -> None:
            begun.put(begin())
            while (work := self._work.get()) is not None:
                if not self._closed:
                    work()
                del work  # or all it worked on stays alive until the next one comes

        self._threads = [
            Thread(target=serve, name=f"sscd-vec-{name}_{index}", daemon=True)
            for index in range(number)
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            begun.get()

    def __len__(self) -> int:
        """Return the number of threads."""
        return len(self._threads)

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        """Have ``work`` done by a thread; what is returned waits for its result."""
        answer: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()

        def serve() -> None:
            try:
                answer.put((work(),))
            except BaseException as error:  # handed to the thread that waits for the answer
                answer.put(error)

        def result() -> T:
            found = answer.get()
            if isinstance(found, BaseException):
                raise found
            return found[0]

        self._work.put(serve)
        return result

    def stop(self) -> None:
        """Let the threads end, without waiting for them; what has not begun is dropped."""
        self._closed = True
        for _ in self._threads:
            self._work.put(None)

    def close(self) -> None:
        """Drop what has not begun and wait for what has."""
        self.stop()
        for thread in self._threads:
            thread.join()
