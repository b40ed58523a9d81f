"""Measures how good the h of a run is: would more draws, a fresher h or a larger batch help it?

  python scripts/curvature.py out/quickstart                             a run of Sophia-G: minutes on a CPU
  python scripts/curvature.py out/gpt2-small-adamw --sequences 100 --estimator hutchinson        the paper's Figure "lt"

It compares the checkpoint's h and update with those of a low-noise h, the mean of the squared gradients of single
sequences on labels drawn from the model. For a run without h, or with --estimator hutchinson, it only describes the
diagonal. The table has a row for each kind of tensor; the .csv has one for each tensor.

  positive          share of the diagonal's entries that are above 0
  cv_1, cv_n        standard deviation of one estimate over its mean, with 1 and n parts (--hessian_parts)
  agreement         correlation of the logarithms of two low-noise h, from different halves of the sequences
  same_sign         share of entries with the same sign in these two; 0.5 is noise
  log_corr, noise   correlation of log h of the run and of the low-noise h; the same if h had only its own noise
  scale             sum of h of the run, which begins at 0, over that of the low-noise h
  unclipped, _low   share of unclipped coordinates with h of the run, and with the low-noise h
"""

import math
import re
import sys
from pathlib import Path

import torch
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.arguments import at_least
from analysis.figures import argparser, figure, png_path, print_table, save
from analysis.load import MODEL_HELP, load, open_bins
from data.loader import Mixture, TrainLoader
from runtime import checkpoint
from sophia import clip_, hutchinson, precondition

SEED = 1  # of sequences, labels and vectors


def flat(tensors):
    """Return all entries of `tensors` as one float32 vector."""
    return torch.cat([t.detach().flatten().float() for t in tensors])


def log_correlation(a, b):
    """Return the correlation of log a and log b over the entries where both are positive."""
    both = (a > 0) & (b > 0)
    if both.sum() < 3:
        return math.nan
    return torch.corrcoef(torch.stack([a[both].log(), b[both].log()]))[0, 1].item()


def share(mask):
    """Return the share of true entries."""
    return mask.float().mean().item()


class Estimates:
    """The mean and variance of Algorithm 2's estimate on `size` sequences, squared in `parts` parts."""

    def __init__(self, size, parts, predictions):
        self.in_part, self.parts, self.B = size // parts, parts, size * predictions
        self.part = self.estimate = self.sum = self.sum_of_squares = 0
        self.sequences = self.count = 0

    def add(self, g):
        """Add the gradient `g` of the summed loss of the next sequence."""
        self.part = self.part + g
        self.sequences += 1
        if self.sequences % self.in_part == 0:
            self.estimate, self.part = self.estimate + self.part ** 2 / self.B, 0
        if self.sequences % (self.in_part * self.parts) == 0:
            self.sum, self.sum_of_squares = self.sum + self.estimate, self.sum_of_squares + self.estimate ** 2
            self.estimate, self.count = 0, self.count + 1

    def cv(self, coordinates=slice(None)):
        """Return the standard deviation over the mean, both as root mean squares over the coordinates."""
        n, mean = self.count, self.sum[coordinates] / self.count
        variance = (self.sum_of_squares[coordinates] / n - mean ** 2).mean() * n / (n - 1)
        squared_mean = (mean ** 2).mean()
        return (variance / (squared_mean - variance / n).clamp(min=squared_mean / n)).sqrt().item()


def draw_gradients(model, params, sequences):
    """Yield for each sequence (T + 1,) the gradients of its summed loss on sampled and on true labels, two vectors."""
    for tokens in sequences:
        logits = model(tokens[None, :-1], tokens[None, 1:])[0][0].float()
        sampled = torch.distributions.Categorical(logits=logits).sample()
        losses = [F.cross_entropy(logits, labels, reduction='sum') for labels in (sampled, tokens[1:])]
        yield [flat(torch.autograd.grad(loss, params, retain_graph=loss is losses[0], materialize_grads=True))
               for loss in losses]


def draw_diagonals(model, params, sequences):
    """Yield for each sequence an estimate of the Hessian's diagonal by Algorithm 1, a vector."""
    for tokens in sequences:
        with sdpa_kernel(SDPBackend.MATH):  # flash attention has no derivative of its derivative
            yield flat(hutchinson(model(tokens[None, :-1], tokens[None, 1:])[1], params))


def curvature_along(model, sequences, u):
    """Return uᵀGu / ‖u‖² for the vector `u`, G the Gauss-Newton matrix on the sequences."""
    names, params = zip(*model.named_parameters())
    tangents = tuple(part.view_as(p) for part, p in zip(u.split([p.numel() for p in params]), params))
    total = 0
    for tokens in sequences:
        def logits(*values, X=tokens[None, :-1]):  # with targets: nanoGPT's forward returns all logits only then
            return functional_call(model, dict(zip(names, values)), (X, X))[0]

        with sdpa_kernel(SDPBackend.MATH):
            z, moved = torch.func.jvp(logits, tuple(p.detach() for p in params), tangents)
        p = z.softmax(-1)
        total += ((p * moved ** 2).sum(-1) - (p * moved).sum(-1) ** 2).mean().item()
    return total / len(sequences) / u.square().sum().item()


def state_of_run(loaded, names):
    """Return (h, m) of a checkpoint as vectors in the order of the parameters' `names`; (None, None) without h."""
    saved = checkpoint.load(loaded.path)[1].get('optimizer')
    if not saved or not any('hessian' in own for own in saved['state'].values()):
        return None, None
    if 'shapes' not in saved:
        raise SystemExit(f'{loaded.path}: its optimizer state has no names; resume the run, which saves them')
    device = next(loaded.model.parameters()).device
    return [flat(saved['state'][name][key] for name in names).to(device) for key in ('hessian', 'exp_avg')]


def update_of(m, h, config):
    """Return clip(m / max(γ·h, ε), 1), and which of its coordinates the clip leaves alone."""
    update, = precondition([m], [h], config['gamma'], config['eps'])
    unclipped = update.abs() < 1
    clip_([update], 1.0)
    return update, unclipped


def with_noise(h, cv):
    """Return `h` times random factors of mean 1 and standard deviation `cv`."""
    shape = torch.full_like(h, 1 / cv ** 2)
    return h * torch.distributions.Gamma(shape, shape).sample()


class Gradients:
    """Gradients of single sequences at a checkpoint.

    halves: low-noise h from half of the sequences each; their sum is the low-noise h. by_parts: {n: `Estimates`} on as
    many sequences as the run's. signal, noise: ‖E g‖² and E‖g − E g‖² of the gradient g of a sequence's summed loss;
    sampled: the latter with labels drawn from the model.
    """

    def __init__(self, model, params, sequences, config):
        N, T = len(sequences), sequences.size(1) - 1
        self.size = min(config.get('hessian_batch_size') or 16, N // 8)
        self.parts = min(config.get('hessian_parts') or 1, self.size)
        self.by_parts = {n: Estimates(self.size, n, T) for n in sorted({1, self.parts, self.size})}
        self.halves, gradient, square, self.sampled = [0, 0], 0, 0.0, 0.0
        for i, (g, true) in enumerate(draw_gradients(model, params, sequences)):
            self.halves[i % 2] = self.halves[i % 2] + g ** 2 / (T * N)
            for estimates in self.by_parts.values():
                estimates.add(g)
            gradient, square = gradient + true, square + true.square().sum().item() / N
            self.sampled += g.square().sum().item() / N
        self.signal = max(1e-30, (gradient.square().sum().item() / N - square) / (N - 1))  # without bias
        self.noise = square - self.signal

    def batches(self, config):
        """Return for some mini-batches the gradient's signal, and empirical Fisher over Gauss-Newton-Bartlett."""
        sizes = sorted({1, self.size, config.get('total_batch_size') or self.size, 480})
        return [dict(sequences=b, signal_over_noise=b * self.signal / self.noise,
                     empirical_fisher_over_gnb=(self.noise + b * self.signal) / self.sampled) for b in sizes]


def weights_of(iterations, interval, beta2):
    """Return how much h has of its level, which starts at 0, and the number and the mean age of the estimates in it.

    h is an EMA of estimates at iterations 0, `interval`, …; the number is the one of equally weighted estimates that
    has as much noise. Ages are in iterations.
    """
    made = torch.arange(0, iterations, interval, dtype=torch.float64)
    weights = (1 - beta2) * beta2 ** torch.arange(len(made) - 1, -1, -1, dtype=torch.float64)
    total = weights.sum()
    age = (weights * (iterations - made)).sum() / total
    return [number.item() for number in (total, total ** 2 / weights.square().sum(), age)]


def compare(h, low, m, config, estimates, places, iterations):
    """Compare a run's h with the low-noise one: return columns of the table, updates by name, and facts about h.

    estimates: `Estimates` like the run's. places: {tensor: slice of its coordinates}. iterations: of the run so far.
    """
    (update, unclipped), (update_low, unclipped_low) = update_of(m, h, config), update_of(m, low, config)
    # The estimates are nearly independent, and their mean changes slowly.
    level, averaged, age = weights_of(iterations, config['hessian_interval'], config['beta2'])
    noisy = torch.cat([with_noise(low[at], max(1e-3, estimates.cv(at) / averaged ** 0.5)) for at in places.values()])
    columns = dict(log_corr=lambda at: log_correlation(h[at], low[at]),
                   noise=lambda at: log_correlation(noisy[at], low[at]),
                   scale=lambda at: (h[at].sum() / low[at].sum()).item(),
                   unclipped=lambda at: share(unclipped[at]), unclipped_low=lambda at: share(unclipped_low[at]))
    return (columns, dict(sign=m.sign(), run=update, low_noise=update_low),
            dict(level=level, averaged=averaged, noise_of_h=estimates.cv() / averaged ** 0.5, mean_age=age))


def answers(total, size, config, facts, curvature, cosine):
    """Return sentences for a run, from the table's last row, the estimate's size, and what `compare` has found."""
    stale = total['log_corr'] < total['noise'] - 0.1
    return [
        f'More draws: the noise of an estimate is {total["cv_1"]:.2f} of its mean, and {total[f"cv_{size}"]:.2f} with '
        f'{size} parts. h averages about {facts["averaged"]:.0f} estimates and has {facts["noise_of_h"]:.2f}: more '
        f'parts alone would {"help" if facts["noise_of_h"] > 0.3 else "hardly help"}.',
        f'A fresher h: log h and the log of the low-noise h correlate by {total["log_corr"]:.2f}; noise alone would '
        f'leave {total["noise"]:.2f}. ' + (
            f'h is stale, {facts["mean_age"]:.0f} iterations old on average, '
            f'{facts["mean_age"] / config["max_iters"]:.0%} of the run: lower β2, with more parts.'
            if stale else 'It is fresh enough.') + f' It has reached {facts["level"]:.0%} of its level.',
        f'The update: {total["unclipped"]:.0%} is unclipped; its cosine with sign momentum is {cosine["sign"]:.2f}. '
        f'The curvature along it is {curvature["run"] / curvature["sign"]:.2f} of that along sign momentum, and would '
        f'be {curvature["low_noise"] / curvature["sign"]:.2f} of it with the low-noise h.']


def draw(low, h, title, correlation):
    """Return a figure: the histogram of the diagonal (Figure "lt"), and a run's h against the low-noise one."""
    positive = low[low > 0].sort().values
    edges = torch.logspace(positive[len(positive) // 100].log10() - 1, positive[-1].log10(), 101).numpy()
    fig, axes = figure(1 if h is None else 2)
    axes[0].hist(positive.numpy(), edges)
    axes[0].set(xscale='log', xlabel="positive entries of the Hessian's diagonal", ylabel='parameters', title=title)
    if h is not None:
        both = (h > 0) & (low > 0)
        axes[1].hexbin(low[both].numpy(), h[both].numpy(), xscale='log', yscale='log', bins='log', cmap='Blues')
        axes[1].set(xlabel='low-noise h', ylabel='h of the run', title=f'log correlation {correlation:.2f}')
    return fig


def main(argv=None):
    parser = argparser(__doc__, 'curvature.png', '.csv and .json')
    parser.set_defaults(output=None)  # beside the checkpoint
    parser.add_argument('checkpoint', help=MODEL_HELP)
    parser.add_argument('--estimator', choices=['gnb', 'hutchinson'], default='gnb', help='default: gnb')
    parser.add_argument('--sequences', type=at_least(32), default=512, help='training sequences (default: 512)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args(argv)
    loaded = load(args.checkpoint, args.device)
    model, config = loaded.model, loaded.state.get('config', {})
    torch.manual_seed(SEED)
    loader = TrainLoader(Mixture(open_bins(loaded, None, 'train')), SEED, args.sequences, model.config.block_size, 0, 1,
                         args.device)
    sequences = next(loader)
    loader.close()

    names, params = zip(*model.named_parameters())
    ends = torch.tensor([p.numel() for p in params]).cumsum(0).tolist()
    places = {name: slice(end - p.numel(), end) for name, p, end in zip(names, params, ends)}
    summary = dict(checkpoint=loaded.name, iteration=loaded.state.get('iter_num'), estimator=args.estimator,
                   sequences=args.sequences, parameters=ends[-1])
    h, updates, columns = None, {}, {}
    if args.estimator == 'gnb':
        gradients = Gradients(model, params, sequences, config)
        halves, summary['batches'] = gradients.halves, gradients.batches(config)
        columns = {f'cv_{n}': estimates.cv for n, estimates in gradients.by_parts.items()}
        h, m = state_of_run(loaded, names)
    else:
        halves = [0, 0]
        for i, h_hat in enumerate(draw_diagonals(model, params, sequences)):
            halves[i % 2] = halves[i % 2] + h_hat / len(sequences)
        columns = dict(same_sign=lambda at: share((halves[0] * halves[1] > 0)[at]))
    low = halves[0] + halves[1]
    if h is not None:
        of_run, updates, facts = compare(h, low, m, config, gradients.by_parts[gradients.parts], places,
                                          loaded.state['iter_num'])
        columns |= of_run
    columns = dict(parameters=lambda at: len(low[at]), positive=lambda at: share(low[at] > 0),
                   agreement=lambda at: log_correlation(halves[0][at], halves[1][at])) | columns

    def describe(tensor, at):
        return dict(tensor=tensor, **{name: column(at) for name, column in columns.items()})

    index, kinds = torch.arange(ends[-1], device=low.device), {}
    for name in names:
        kinds.setdefault(re.sub(r'\.\d+\.', '.*.', name).removesuffix('.weight'), []).append(index[places[name]])
    table = [describe(kind, torch.cat(found)) for kind, found in kinds.items()] + [describe('all', slice(None))]
    print_table(table)
    if args.estimator == 'gnb':
        print(f'A larger batch: signal over noise of the gradient is {gradients.signal / gradients.noise:.2g} for one '
              f'sequence and grows with their number; it is 1 at {gradients.noise / gradients.signal:.1f} sequences.')
    if updates:
        found = dict(curvature={name: curvature_along(model, sequences[:32], u) for name, u in updates.items()},
                     cosine={name: F.cosine_similarity(updates['run'], u, dim=0).item() for name, u in updates.items()})
        print('\n'.join(answers(table[-1], gradients.size, config, facts, **found)))
        summary |= found | facts
    fig = draw(low.cpu(), h if h is None else h.cpu(), f'{loaded.name}, {args.estimator}, {args.sequences} sequences',
               table[-1].get('log_corr'))
    output = args.output or png_path((loaded.path.parent if loaded.state else Path('out')) / 'curvature.png')
    save(output, fig, [describe(name, at) for name, at in places.items()], **summary, table=table)


if __name__ == '__main__':
    main()
