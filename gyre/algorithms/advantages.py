"""Group-relative advantages: pure numpy functions of the scores that are in a group's baseline.

All take scores f64[m], m >= 2, and return f64[m].
"""

from __future__ import annotations

import numpy as np


def has_signal(scores: np.ndarray, tolerance: float) -> bool:
    """Whether two scores at least differ by more than `tolerance`."""
    return len(scores) >= 2 and float(np.ptp(scores)) > tolerance


def centred(scores: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean(r)."""
    return scores - scores.mean()


def standardised(scores: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean(r)) / std(r), std over the m scores (denominator m). They must differ."""
    return centred(scores) / scores.std()


def leave_one_out(scores: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean of the other scores = m / (m - 1) * (r_i - mean(r))."""
    return centred(scores) * (len(scores) / (len(scores) - 1))
