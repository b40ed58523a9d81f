"""Statistics of a few final losses: noise over seeds, tests of a difference, the expected best of n trials."""

import math
from statistics import mean, variance

from scipy import stats


def expected_best(losses, n):
    """Return the expected lowest of n of these losses, drawn without replacement: the result of n trials."""
    N = len(losses)
    return sum(loss * math.comb(N - 1 - i, n - 1) for i, loss in enumerate(sorted(losses))) / math.comb(N, n)


def pooled_sd(groups):
    """Return (σ, degrees of freedom) of the noise over seeds, from lists of losses that differ in their seed only.

    (None, 0) when no list has two.
    """
    df = sum(len(group) - 1 for group in groups)
    squares = sum((len(group) - 1) * variance(group) for group in groups if len(group) > 1)
    return (math.sqrt(squares / df), df) if df else (None, 0)


def difference(one, two, pooled=(None, 0)):
    """Test whether mean(one) − mean(two) is more than noise.

    Welch's test if both lists have at least three losses, else Student's with the `pooled` (σ, degrees of freedom).
    Returns a dict; plus_or_minus is half of the 95 % interval. Without noise, or with an infinite loss, there is no
    test, and all but the difference are None.
    """
    found = dict(difference=mean(one) - mean(two), standard_error=None, df=None, p=None, plus_or_minus=None, test=None)
    if not math.isfinite(found['difference']):
        return found
    welch = min(len(one), len(two)) >= 3
    error = (math.sqrt(variance(one) / len(one) + variance(two) / len(two)) if welch
             else (pooled[0] or 0) * math.sqrt(1 / len(one) + 1 / len(two)))
    if not error:
        return found
    df = float(stats.ttest_ind(one, two, equal_var=False).df) if welch else pooled[1]
    return dict(found, standard_error=error, df=df, p=2 * float(stats.t.sf(abs(found['difference']) / error, df)),
                plus_or_minus=float(stats.t.ppf(0.975, df)) * error, test='Welch' if welch else 'pooled σ')


def holm(ps):
    """Return the p-values of several tests adjusted by Holm's correction, in the order given. None, of a `difference`
    without a test, counts as 1."""
    ps = [1.0 if p is None else p for p in ps]
    order, adjusted, highest = sorted(range(len(ps)), key=ps.__getitem__), [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted
