"""gyre: elastic online reinforcement learning for hours-long agent executions, in JAX."""

__version__ = "0.1.0"
