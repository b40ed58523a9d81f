"""analysis/significance.py, against values that are known."""

import math
from itertools import combinations
from statistics import mean

import pytest

from analysis.significance import difference, expected_best, holm, pooled_sd


def test_welch_needs_three_of_each():
    found = difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], (9.9, 1))
    assert found['test'] == 'Welch' and found['df'] == pytest.approx(4)
    assert found['p'] == pytest.approx(0.2879, abs=1e-4)
    assert found['plus_or_minus'] == pytest.approx(2.776445 * math.sqrt(2 / 3), rel=1e-6)  # of 4 degrees of freedom
    unequal = difference([1.0, 2.0, 3.0], [1.0, 3.0, 5.0])
    assert unequal['standard_error'] == pytest.approx(math.sqrt(5 / 3)) and unequal['df'] == pytest.approx(50 / 17)


def test_fewer_are_tested_against_the_pooled_noise_or_not_at_all():
    found = difference([3.0], [3.1, 3.3], (0.1, 2))
    t = 0.2 / 0.1 / math.sqrt(1.5)
    assert found['test'] == 'pooled σ' and found['standard_error'] == pytest.approx(0.1 * math.sqrt(1.5))
    assert found['p'] == pytest.approx(1 - t / math.sqrt(2 + t * t))  # the closed form for 2 degrees of freedom
    assert found['plus_or_minus'] == pytest.approx(4.302653 * found['standard_error'], rel=1e-6)
    assert difference([3.0], [3.1])['p'] is None


@pytest.mark.parametrize(('one', 'two', 'pooled'), [
    ([3.0] * 3, [3.0] * 3, (None, 0)), ([3.0] * 3, [2.5] * 3, (0.1, 9)), ([3.0], [3.1], (0.0, 4)),
    ([math.inf, 3.0, 3.1], [3.0, 3.1, 3.2], (0.1, 9))])
def test_without_noise_there_is_no_test(one, two, pooled):
    assert difference(one, two, pooled)['p'] is None


def test_pooled_sd_weighs_by_degrees_of_freedom():
    assert pooled_sd([[1.0], [1.0, 3.0], [0.0, 1.0, 2.0]]) == (pytest.approx(math.sqrt((2 + 2) / 3)), 3)
    assert pooled_sd([[1.0], [2.0]]) == (None, 0)


def test_expected_best_is_the_mean_over_all_choices():
    losses = [3.0, 2.0, 5.0, 2.5]
    for n in range(1, 5):
        assert expected_best(losses, n) == pytest.approx(mean(map(min, combinations(losses, n))))


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([None, 0.01]) == pytest.approx([1, 0.02])
