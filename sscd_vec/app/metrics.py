"""Counters for ``/metrics``, in the text format Prometheus reads."""

from collections.abc import Callable, Iterator
from threading import Lock

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

Labels = tuple[tuple[str, str], ...]


class Counter:
    """A number per set of labels that only grows."""

    def __init__(self, name: str, help_text: str) -> None:
        """Name it as Prometheus should show it."""
        self.name = name
        self.help = help_text
        self._values: dict[Labels, float] = {}
        self._lock = Lock()

    def add(self, amount: float = 1, **labels: str) -> None:
        """Count."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def lines(self) -> Iterator[str]:
        """The exposition lines."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} counter"
        for labels, value in sorted(self._values.items()):
            yield f"{self.name}{_text(labels)} {value:g}"


class Histogram:
    """How observations are spread over fixed buckets, per set of labels."""

    def __init__(self, name: str, help_text: str, buckets: tuple[float, ...]) -> None:
        """Name it; ``buckets`` are upper bounds, ascending."""
        self.name = name
        self.help = help_text
        self.buckets = buckets
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        self._lock = Lock()

    def observe(self, value: float, **labels: str) -> None:
        """Count one observation."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            counts = self._counts.setdefault(key, [0] * (len(self.buckets) + 1))
            for place, bound in enumerate(self.buckets):
                counts[place] += value <= bound
            counts[-1] += 1
            self._sums[key] = self._sums.get(key, 0.0) + value

    def lines(self) -> Iterator[str]:
        """The exposition lines."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} histogram"
        for labels, counts in sorted(self._counts.items()):
            bounds = [*(f"{bound:g}" for bound in self.buckets), "+Inf"]
            for bound, count in zip(bounds, counts, strict=True):
                yield f"{self.name}_bucket{_text((*labels, ('le', bound)))} {count}"
            yield f"{self.name}_sum{_text(labels)} {self._sums[labels]:g}"
            yield f"{self.name}_count{_text(labels)} {counts[-1]}"


class Metrics:
    """What the server counts."""

    def __init__(self) -> None:
        """Start at zero."""
        self.requests = Counter("sscd_vec_requests_total", "Requests answered.")
        self.refused = Counter("sscd_vec_refused_total", "Requests refused by a limit.")
        self.images = Counter("sscd_vec_images_total", "Images encoded.")
        self.seconds = Histogram(
            "sscd_vec_request_seconds", "Time from first byte to answer.", SECONDS
        )
        self.batches = Histogram("sscd_vec_batch_images", "Images per micro-batch.", BATCH)
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Show the value ``read`` returns when asked."""
        self._gauges[name] = (help_text, read)

    def render(self) -> str:
        """All of it as text."""
        lines: list[str] = []
        for series in (self.requests, self.refused, self.images, self.seconds, self.batches):
            lines += series.lines()
        for name, (help_text, read) in self._gauges.items():
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge", f"{name} {read():g}"]
        return "\n".join(lines) + "\n"


def _text(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = (
        '{}="{}"'.format(key, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for key, value in labels
    )
    return "{" + ",".join(escaped) + "}"
