"""How fast a run is: the metrics step_ms, hessian_ms, tokens_per_sec, mfu and memory_gb."""

import statistics
from collections import deque

from runtime.device import peak_flops, peak_memory


class Speed:
    """Times iterations: all since the last line of metrics, and the latest 50 with and without a Hessian estimate.

    Args:
        flops_per_iter, tokens_per_iter: of one iteration over all devices.
        world: the ranks, for their number and this rank's device.
    """

    def __init__(self, flops_per_iter, tokens_per_iter, world):
        self.flops_per_iter, self.tokens_per_iter, self.device = flops_per_iter, tokens_per_iter, world.device
        self.peak = (peak_flops(world.device) or 0) * world.size
        self.since_metrics = []
        self.recent = {estimated: deque(maxlen=50) for estimated in (True, False)}

    def add(self, seconds, estimated):
        """Counts an iteration."""
        self.since_metrics.append(seconds)
        self.recent[estimated].append(seconds)

    def metrics(self):
        """The metrics of the iterations since the last call. hessian_ms: what an estimate adds to an iteration."""
        mean = statistics.mean(self.since_metrics)
        found = dict(step_ms=1e3 * mean)
        if self.recent[True] and self.recent[False]:
            found['hessian_ms'] = 1e3 * (statistics.median(self.recent[True]) - statistics.median(self.recent[False]))
        found['tokens_per_sec'] = self.tokens_per_iter / mean
        if self.peak:
            found['mfu'] = self.flops_per_iter / mean / self.peak
        found['memory_gb'] = peak_memory(self.device) / 1e9
        self.since_metrics.clear()
        return found
