"""analysis/significance.py, against values that are known."""

import math
from itertools import combinations
from statistics import NormalDist, mean

import pytest

from analysis.significance import difference, expected_best, pooled_sd, seeds_needed, student_p


@pytest.mark.parametrize('t', [0.0, 0.3, 1.0, 2.5, 40.0])
def test_students_p_has_its_closed_forms(t):
    assert student_p(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), abs=1e-12)
    assert student_p(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12)
    assert student_p(t, 1e7) == pytest.approx(2 * NormalDist().cdf(-t), abs=1e-7)
    assert student_p(-t, 5) == student_p(t, 5)


@pytest.mark.parametrize(('df', 't'), [(4, 2.776445105), (10, 2.228138852), (30, 2.042272456)])
def test_students_p_is_five_percent_at_the_tables_values(df, t):
    assert student_p(t, df) == pytest.approx(0.05, abs=1e-8)


def test_welch_where_there_are_three_of_each_else_pooled():
    found = difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], (9.9, 1))
    assert found['test'] == 'Welch'
    assert found['df'] == pytest.approx(4) and found['p'] == pytest.approx(0.2879, abs=1e-4)
    unequal = difference([1.0, 2.0, 3.0], [1.0, 3.0, 5.0])
    assert unequal['standard_error'] == pytest.approx(math.sqrt(5 / 3)) and unequal['df'] == pytest.approx(50 / 17)
    found = difference([3.0], [3.1, 3.3], (0.1, 4))
    assert found['test'] == 'pooled σ' and found['standard_error'] == pytest.approx(0.1 * math.sqrt(1.5))
    assert found['p'] == pytest.approx(student_p(0.2 / 0.1 / math.sqrt(1.5), 4))
    assert difference([3.0], [3.1])['p'] is None
    assert difference([3.0] * 3, [3.0] * 3)['p'] == 1 and difference([3.0] * 3, [3.1] * 3)['p'] == 0


def test_pooled_sd_weighs_by_degrees_of_freedom():
    assert pooled_sd([[1.0], [1.0, 3.0], [0.0, 1.0, 2.0]]) == (pytest.approx(math.sqrt((2 + 2) / 3)), 3)
    assert pooled_sd([[1.0], [2.0]]) == (None, 0)


def test_expected_best_is_the_mean_over_all_choices():
    losses = [3.0, 2.0, 5.0, 2.5]
    for n in range(1, 5):
        assert expected_best(losses, n) == pytest.approx(mean(map(min, combinations(losses, n))))


def test_seeds_needed_agrees_with_a_power_table():
    # Two-sided 5 %, power 80 %: 17 per group for a difference of one standard deviation, 64 for a half.
    assert seeds_needed(1.0, 1.0) == 17 and seeds_needed(0.5, 1.0) == 64
    assert seeds_needed(4.16, 1.0) == 3 and seeds_needed(2.8, 1.0) == 4  # exactly: power 0.96 and 0.91, 0.59 with 2
    assert seeds_needed(-1.0, 1e-6) == 2 and seeds_needed(0.0, 1.0) is None
