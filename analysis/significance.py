"""Statistics of a few final losses: noise over seeds, tests of a difference, the expected best of n trials."""

import math
from statistics import mean, variance

from scipy import stats


def expected_best(losses, n):
    """The expected lowest of n of these losses, drawn without replacement: the result of n trials."""
    N = len(losses)
    return sum(loss * math.comb(N - 1 - i, n - 1) for i, loss in enumerate(sorted(losses))) / math.comb(N, n)


def pooled_sd(groups):
    """(σ, degrees of freedom) of the noise over seeds, from lists of losses that differ in their seed only.

    (None, 0) when no list has two.
    """
    df = sum(len(group) - 1 for group in groups)
    squares = sum((len(group) - 1) * variance(group) for group in groups if len(group) > 1)
    return (math.sqrt(squares / df), df) if df else (None, 0)


def difference(one, two, pooled=(None, 0)):
    """Tests whether mean(one) − mean(two) is more than noise.

    Welch's test if both lists have at least three losses; else Student's against the `pooled` σ, (σ, degrees of
    freedom), which takes the noise of all settings to be the same. There is no test where the noise is not known or 0,
    as for equal losses, or where a loss is infinite.

    Returns a dict: difference, standard_error, df, p (two-sided), plus_or_minus (half of the 95 % interval) and test,
    its name; None where there is no test.
    """
    found = dict(difference=mean(one) - mean(two), standard_error=None, df=None, p=None, plus_or_minus=None, test=None)
    if not math.isfinite(found['difference']):
        return found
    welch = min(len(one), len(two)) >= 3
    error = (math.sqrt(variance(one) / len(one) + variance(two) / len(two)) if welch
             else (pooled[0] or 0) * math.sqrt(1 / len(one) + 1 / len(two)))
    if not error:
        return found
    if welch:
        result = stats.ttest_ind(one, two, equal_var=False)
        interval = result.confidence_interval(0.95)
        return dict(found, standard_error=error, df=float(result.df), p=float(result.pvalue), test='Welch',
                    plus_or_minus=float(interval.high - interval.low) / 2)
    df = pooled[1]
    return dict(found, standard_error=error, df=df, p=2 * float(stats.t.sf(abs(found['difference']) / error, df)),
                plus_or_minus=float(stats.t.ppf(0.975, df)) * error, test='pooled σ')


def holm(ps):
    """Holm's correction: the adjusted p-values of several tests, in the order given."""
    order, adjusted, highest = sorted(range(len(ps)), key=ps.__getitem__), [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted
