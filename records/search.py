"""How the studies look for the best settings of an arm: grids that grow while the best is at the edge."""

SEARCH_SEED = 1337  # chooses settings, and takes part in no test


def rate_at(k):
    """Return the k-th learning rate of a grid a factor of √2 apart, 0.004 at k = 0."""
    return float(f'{4e-3 * 2 ** (k / 2):.2g}')


def gammas(middle):
    """Return ('gamma', function k → γ), a factor of 3 apart."""
    return 'gamma', lambda k: float(f'{middle * 3 ** k:.2g}')


def around(middle, find, score, width=1):
    """Return {k: find(k)} of the integers up to `width` from `middle`, and of more while the one with the lowest
    score(find(k)) is at the edge; None while a find(k) is None."""
    found = {k: find(k) for k in sorted(range(middle - width, middle + width + 1), key=lambda k: abs(k - middle))}
    while None not in found.values():
        best = min(found, key=lambda k: score(found[k]))
        if min(found) < best < max(found):
            return found
        k = best - 1 if best == min(found) else best + 1
        found[k] = find(k)
    return None


class Search:
    """Looks for the best settings of an arm with the seed 1337.

    place: of its runs in the order, as (stage, arm).
    """

    def __init__(self, study, place, part, optimizer, settings):
        self.study, self.place, self.part, self.optimizer = study, place, part, optimizer
        self.settings, self.runs = settings, 0

    def result(self, seed=SEARCH_SEED, **settings):
        """Return a run's `Result`, or None. The arms of a stage take turns: first the first run of each."""
        self.runs += 1
        stage, arm = self.place
        place = (stage, seed != SEARCH_SEED, self.runs, arm)
        return self.study.result(place, self.part, self.optimizer, **self.settings, **settings, seed=seed)

    def tune(self, middle, tuned, values, width):
        """Tune the setting `tuned` at the learning rate rate_at(middle), 2·`width` + 1 of its `values`, k → value, and
        more while the best is at the edge; then the learning rate, three. Return (loss, settings) of the best; None
        while runs are missing."""
        def loss(result):
            return result.loss

        found = around(0, lambda k: self.result(**{tuned: values(k)}, learning_rate=rate_at(middle)), loss, width)
        if not found:
            return None
        best = {tuned: values(min(found, key=lambda k: found[k].loss))}
        found = around(middle, lambda k: self.result(**best, learning_rate=rate_at(k)), loss)
        if not found:
            return None
        k = min(found, key=lambda k: found[k].loss)
        return found[k].loss, best | dict(learning_rate=rate_at(k))
