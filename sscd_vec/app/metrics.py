"""What the server counts, for ``/metrics``."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCH = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counters and histograms in a registry of their own.

    Attributes:
        requests: Requests answered, by path and status.
        refused: Requests and connections refused by a limit, by reason.
        images: Images encoded.
        verdicts: Searches, by the verdict on the best match.
        seconds: Time from first byte to answer, by path.
        batches: Images per micro-batch.
    """

    def __init__(self) -> None:
        """Start at zero."""
        self._registry = registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self.requests = Counter(
            "sscd_vec_requests", "Requests answered.", ["path", "status"], registry=registry
        )
        self.refused = Counter(
            "sscd_vec_refused", "Refused by a limit.", ["reason"], registry=registry
        )
        self.images = Counter("sscd_vec_images", "Images encoded.", registry=registry)
        self.verdicts = Counter(
            "sscd_vec_verdicts", "Searches, by the best verdict.", ["verdict"], registry=registry
        )
        self.seconds = Histogram(
            "sscd_vec_request_seconds",
            "Time from first byte to answer.",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.batches = Histogram(
            "sscd_vec_batch_images", "Images per micro-batch.", buckets=BATCH, registry=registry
        )

    def refuse(self, reason: str) -> None:
        """Count a refusal."""
        self.refused.labels(reason=reason).inc()

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Show the value ``read`` returns when asked; the last one of a name counts."""
        known = self._gauges.get(name)
        gauge = known or Gauge(name, help_text, registry=self._registry)
        gauge.set_function(read)
        self._gauges[name] = gauge

    def render(self) -> bytes:
        """All of it in the text format Prometheus reads."""
        return generate_latest(self._registry)
