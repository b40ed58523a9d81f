"""analysis/significance.py, against values that are known."""

import math
from itertools import combinations
from statistics import mean

import numpy as np
import pytest

from analysis.significance import difference, expected_best, holm


def test_welch_needs_three_of_each():
    found = difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    assert found['df'] == pytest.approx(4) and found['p'] == pytest.approx(0.2879, abs=1e-4)
    assert found['plus_or_minus'] == pytest.approx(2.776445 * math.sqrt(2 / 3), rel=1e-6)  # of 4 degrees of freedom
    unequal = difference([1.0, 2.0, 3.0], [1.0, 3.0, 5.0])
    assert unequal['standard_error'] == pytest.approx(math.sqrt(5 / 3)) and unequal['df'] == pytest.approx(50 / 17)
    assert difference([1.0, 2.0], [2.0, 3.0, 4.0])['p'] is None


def test_the_cautious_test_has_the_degrees_of_freedom_of_the_shorter_side():
    found = difference([3.0, 3.2], [3.5, 3.9, 3.7], cautious=True)
    t = 0.6 / math.sqrt(0.02 / 2 + 0.04 / 3)
    assert found['df'] == 1 and found['p'] == pytest.approx(1 - 2 * math.atan(t) / math.pi)  # Cauchy's
    assert found['plus_or_minus'] == pytest.approx(12.7062047 * 0.6 / t)
    assert difference([3.0], [3.1, 3.2], cautious=True)['p'] is None


@pytest.mark.parametrize('n', [(2, 2), (2, 3), (2, 4), (3, 3), (3, 4), (4, 4)])
@pytest.mark.parametrize('ratio', [0.1, 1, 10])
def test_equal_sides_are_called_different_in_at_most_five_of_a_hundred_cases(n, ratio):
    """However unequal their noise is. The share's own standard deviation is 0.006."""
    rng = np.random.default_rng(0)
    found = [difference(rng.normal(0, 1, n[0]).tolist(), rng.normal(0, ratio, n[1]).tolist(), cautious=True)['p'] < 0.05
             for _ in range(1500)]
    assert mean(found) < 0.055


def test_fewer_seeds_give_no_smaller_p():
    """At the same means and standard deviations."""
    losses = {n: np.linspace(-1, 1, n) / np.std(np.linspace(-1, 1, n), ddof=1) for n in (2, 3, 4, 6)}
    ps = [difference((x + 4).tolist(), x.tolist(), cautious=True)['p'] for x in losses.values()]
    assert ps == sorted(ps, reverse=True) and ps[0] > 10 * ps[-1]


@pytest.mark.parametrize(('one', 'two'), [
    ([3.0] * 3, [3.0] * 3), ([3.0] * 3, [2.5] * 3), ([math.inf, 3.0, 3.1], [3.0, 3.1, 3.2])])
@pytest.mark.parametrize('cautious', [False, True])
def test_without_noise_there_is_no_test(one, two, cautious):
    assert difference(one, two, cautious)['p'] is None


def test_expected_best_is_the_mean_over_all_choices():
    losses = [3.0, 2.0, 5.0, 2.5]
    for n in range(1, 5):
        assert expected_best(losses, n) == pytest.approx(mean(map(min, combinations(losses, n))))


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([None, 0.01]) == pytest.approx([1, 0.02]) and holm([0.6, 0.7]) == [1, 1]
