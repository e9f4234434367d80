"""RL algorithms, one module per published method; importing this package registers them all.

To add one, copy `forkme.py` and import it below.
"""

from gyre.algorithms import forkme, grpo, reinforce  # noqa: F401  (importing registers)
from gyre.algorithms.core import ALGORITHMS, Algorithm, make_algorithm

__all__ = ["ALGORITHMS", "Algorithm", "make_algorithm"]
