"""Speed metrics: step_ms, hessian_ms, tokens_per_sec, mfu, memory_gb."""

import statistics
from collections import deque

from runtime.device import peak_flops, peak_memory


class Speed:
    """Times of the iterations since the last metrics, and of the latest 50 with and 50 without a Hessian estimate."""

    def __init__(self, flops_per_token, world):
        self.flops_per_token, self.device = flops_per_token, world.device
        self.peak = (peak_flops(world.device) or 0) * world.size
        self.since_metrics, self.tokens = [], 0
        self.recent = {estimated: deque(maxlen=50) for estimated in (True, False)}

    def add(self, seconds, tokens, estimated):
        """Count an iteration of `tokens` tokens, over all devices."""
        self.since_metrics.append(seconds)
        self.tokens += tokens
        self.recent[estimated].append(seconds)

    def metrics(self):
        """Return the metrics of the iterations since the last call."""
        found = dict(step_ms=1e3 * statistics.mean(self.since_metrics))
        if self.recent[True] and self.recent[False]:
            extra = statistics.median(self.recent[True]) - statistics.median(self.recent[False])
            found['hessian_ms'] = 1e3 * max(0.0, extra)  # few times are noisy
        found['tokens_per_sec'] = self.tokens / sum(self.since_metrics)
        if self.peak:
            found['mfu'] = found['tokens_per_sec'] * self.flops_per_token / self.peak
        found['memory_gb'] = peak_memory(self.device) / 1e9
        self.since_metrics.clear()
        self.tokens = 0
        return found
