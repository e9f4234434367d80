"""The gateway's counters for Prometheus. A registry of its own, so that several gateways can live side by
side; no label holds a key, an execution or a text."""

from __future__ import annotations

import prometheus_client as prom

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
CONTENT_TYPE = prom.CONTENT_TYPE_LATEST


class GatewayMetrics:
    """See GET /metrics for what each one means."""

    def __init__(self):
        self.registry = prom.CollectorRegistry()

        def make(kind, name, help_text, *labels, **options):
            return kind(f"gyre_gateway_{name}", help_text, labels, registry=self.registry, **options)

        self.requests = make(prom.Counter, "requests", "Requests answered", "dialect", "status")
        self.calls = make(prom.Counter, "calls", "Model calls ended", "role", "finish", "delivered")
        self.tokens = make(prom.Counter, "tokens", "Tokens of ended calls", "kind")
        self.retries = make(prom.Counter, "engine_retries", "Calls given to another engine after a failure")
        self.keep_alives = make(prom.Counter, "keep_alives", "Keep-alive events sent")
        self.running = make(prom.Gauge, "calls_running", "Model calls under way")
        self.executions = make(prom.Gauge, "executions_open", "Executions with a living key")
        self.call_s = make(prom.Histogram, "call_seconds", "Request to last byte", buckets=_SECONDS)
        self.first_token_s = make(prom.Histogram, "first_token_seconds", "Request to first token",
                                  buckets=_SECONDS)

    def page(self) -> bytes:
        """The body of GET /metrics."""
        return prom.generate_latest(self.registry)
