"""Errors that gyre raises on purpose. Each message says what was got, what is expected, what to do."""


class GyreError(Exception):
    """Base of all deliberate errors."""


class ConfigError(GyreError, ValueError):
    """A configuration that cannot work; raised before any device work."""


class WorkdirError(GyreError):
    """A workdir that is foreign or corrupt; it is refused, never overwritten."""


class ContextOverflowError(GyreError):
    """A prompt does not fit the model's context."""

    def __init__(self, prompt_tokens: int, max_context_tokens: int):
        self.prompt_tokens = prompt_tokens
        self.max_context_tokens = max_context_tokens
        super().__init__(
            f"This model's maximum context length is {max_context_tokens} tokens, but the request "
            f"has {prompt_tokens} tokens. Please shorten the messages.")


class EngineError(GyreError):
    """An engine could not serve a call."""


class NoEngineError(EngineError):
    """No engine took a call for a long time; another try would wait as long again."""


class StalledError(GyreError):
    """No progress for a bounded time; the message lists the state of every cell."""
