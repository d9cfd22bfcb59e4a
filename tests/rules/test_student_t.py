"""Student's t, against SciPy's."""

import pytest

from vllmops.rules.student_t import compute_t_quantile


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.9, 0.95, 0.99, 0.999])
def test_it_is_what_scipy_says(confidence: float) -> None:
    from scipy.special import stdtrit

    for freedom in range(1, 1001):
        known = float(stdtrit(freedom, (1 + confidence) / 2))
        assert compute_t_quantile(confidence, freedom) == pytest.approx(known, rel=1e-9)
