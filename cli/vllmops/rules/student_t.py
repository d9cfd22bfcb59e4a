"""Student's t for whole degrees of freedom: SciPy would add 200 MB to the install."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

ENOUGH = 1e-13
MOST_STEPS = 50


@lru_cache(4096)
def compute_t_quantile(confidence: float, degrees_of_freedom: int) -> float:
    """The two-sided quantile of Student's t distribution.

    Args:
        confidence: the probability that a variable lies between -t and t; between 0 and 1.
        degrees_of_freedom: degrees of freedom, 1 or more.
    """
    # Newton's method on t = sqrt(freedom) * tan(angle). The probability grows ever more slowly with
    # the angle, and the start, the normal quantile, is too small: so no step goes too far.
    angle = math.atan(NormalDist().inv_cdf((1 + confidence) / 2) / math.sqrt(degrees_of_freedom))
    slope = 2 / math.sqrt(math.pi)
    slope *= math.exp(
        math.lgamma((degrees_of_freedom + 1) / 2) - math.lgamma(degrees_of_freedom / 2)
    )
    for _ in range(MOST_STEPS):
        missing = confidence - compute_t_probability(angle, degrees_of_freedom)
        step = missing / (slope * math.cos(angle) ** (degrees_of_freedom - 1))
        angle += step
        if abs(step) < ENOUGH:
            break
    return math.sqrt(degrees_of_freedom) * math.tan(angle)


def compute_t_probability(angle: float, degrees_of_freedom: int) -> float:
    """That a variable lies within the angle's t: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees_of_freedom % 2
    term, total = cosine if odd else 1.0, 0.0
    for order in range(odd, degrees_of_freedom - 1, 2):
        total += term
        term *= cosine * cosine * (order + 1) / (order + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
