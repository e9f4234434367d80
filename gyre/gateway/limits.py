"""What the gateway grants a client: sizes, times and numbers, each with a default that suits long agents."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GatewayLimits:
    """All must be positive, but for the retries.

    Attributes:
      body_bytes: larger requests get 413.
      header_bytes: larger header lines get 400.
      body_timeout_s: for a request's body; a slower client gets 408.
      write_timeout_s: for a client to take what was written; it then counts as gone.
      idle_timeout_s: for the next (or first) request line and headers on an open connection.
      calls_per_execution: concurrent calls of one execution; more get 429.
      calls: concurrent calls of all executions; more get 429.
      engine_timeout_s: how long a call waits for an engine before it gets 503.
      engine_retries: how often a call that an engine failed is given to another, unseen by the client.
      keep_alive_s: silence in a stream after which an event that says nothing is sent.
      retry_after_s: what 429 and 503 ask for.

    Raises:
      ValueError: a limit that is not positive.
    """

    body_bytes: int = 32 * 2**20
    header_bytes: int = 16 * 2**10
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    calls_per_execution: int = 64
    calls: int = 4096
    engine_timeout_s: float = 600.0
    engine_retries: int = 2
    keep_alive_s: float = 15.0
    retry_after_s: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0 and not (value == 0 and field.name == "engine_retries"):
                raise ValueError(f"{field.name} must be positive, got {value}")
