"""Ctrl-C and SIGTERM as a wish the loop reads between two steps."""

import signal
import threading
from types import FrameType, TracebackType


class Interruption:
    """Within ``with``, a first signal is remembered; a second one interrupts at once."""

    def __init__(self) -> None:
        """Not asked yet."""
        self.asked = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interruption":
        """Listen, if this is the main thread (others cannot)."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() returned

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
