"""Statistics of a few final losses: tests of a difference, the expected best of n trials."""

import math
from statistics import mean, variance

from scipy import stats


def expected_best(losses, n):
    """Return the expected minimum of n of these losses, drawn without replacement, as the result of n trials."""
    N = len(losses)
    return sum(loss * math.comb(N - 1 - i, n - 1) for i, loss in enumerate(sorted(losses))) / math.comb(N, n)


def difference(one, two, cautious=False):
    """Test with Welch's t whether mean(one) − mean(two) is more than noise. Variances may differ.

    cautious: use the degrees of freedom of the smaller group (Hsu's test), so that at most 5 % of equal groups have
    p < 0.05, however unequal their noise. With Welch's estimate up to 6 % do, with three or four losses per group.

    Returns a dict; plus_or_minus is half of the 95 % interval. Without noise, with an infinite loss, or with fewer than
    three losses in a list (two if `cautious`) there is no test, and all values but the difference are None.
    """
    found = dict(difference=mean(one) - mean(two), standard_error=None, df=None, p=None, plus_or_minus=None)
    n = min(len(one), len(two))
    if not math.isfinite(found['difference']) or n < (2 if cautious else 3):
        return found
    error = math.sqrt(variance(one) / len(one) + variance(two) / len(two))
    if not error:
        return found
    df = n - 1 if cautious else float(stats.ttest_ind(one, two, equal_var=False).df)
    return dict(found, standard_error=error, df=df, p=2 * float(stats.t.sf(abs(found['difference']) / error, df)),
                plus_or_minus=float(stats.t.ppf(0.975, df)) * error)


def holm(ps):
    """Return the p-values of several tests, adjusted by Holm's correction. None (not tested) counts as 1."""
    ps = [1.0 if p is None else p for p in ps]
    order, adjusted, highest = sorted(range(len(ps)), key=ps.__getitem__), [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted
