"""The CPU as virtual devices, and the cache of compiled programs. Must be used before jax is imported."""

import math
import os
import pathlib


def set_up_devices(config) -> None:
    """Splits the CPU into the virtual devices of the config's cells; caches compiled programs.

    Must run before jax is imported. What the user has set stays.
    """
    devices = config.cells.count * math.prod(config.cells.shape)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = (f"{os.environ.get('XLA_FLAGS', '')} "
                                   f"--xla_force_host_platform_device_count={devices}").strip()
    cache = pathlib.Path(os.environ.get("GYRE_CACHE", "~/.cache/gyre")).expanduser() / "jax"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
