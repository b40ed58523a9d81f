"""Results of this study, from runs.jsonl in this directory.

  python records/dissection/results.py tables                                            the tables of README.md
  python records/dissection/results.py trials --output records/dissection/trials.csv    every run
  python records/dissection/results.py curves --output records/dissection/curves.png    loss over 9,600 steps
  python records/dissection/results.py gamma --output records/dissection/dissection.png  final loss against γ
"""

import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure, legend, optimizer_label, styles
from analysis.runs import averaged, find_runs
from analysis.significance import difference, holm
from records.studies import SEARCH_SEED, interval, losses, markdown, mean_sd, part_of, show_results, texts

# The seeds of part A's tests. Sophia-G's best γ was chosen with TESTED, so Sophia-G is tested with seeds of its own.
TESTED = range(1338, 1341)
OF_BEST_GAMMA = range(1341, 1344)
SIX = range(1338, 1344)  # seeds of part C


def read():
    return find_runs([HERE])


def settings_of(run):
    """Return the settings that tell the runs of an arm apart."""
    return run.learning_rate, run.beta1, run.warmup_iters, run.weight_decay


def arms_of(runs, part):
    """Return {(optimizer, γ): arm} of a part. An arm is a dict: search, {settings: run with the search's seed}; best,
    the settings with the lowest loss among these; runs, {seed: run} with the best settings."""
    arms = {}
    for run in runs:
        if part_of(run) == part:
            arms.setdefault((run.optimizer_name, run.gamma), []).append(run)
    for key, mine in arms.items():
        search = {settings_of(run): run for run in mine if run.seed == SEARCH_SEED}
        best = min(search, key=lambda settings: search[settings].final_loss)
        arms[key] = dict(search=search, best=best, runs={run.seed: run for run in mine if settings_of(run) == best})
    return arms


def fresh_runs(arms, name, seeds):
    """Return the runs with these seeds of the arm of an optimizer that has them."""
    found = [arm['runs'] for (optimizer, _), arm in arms.items()
             if optimizer == name and set(seeds) <= arm['runs'].keys()]
    return [found[0][seed] for seed in seeds]


def tests(runs):
    """Return a row for each test: part A's four against Sophia-G, corrected by Holm; part C's primary and secondary
    test; and what was added, the secondary test with the runs of parts F and G, the primary one with part H's."""
    A, C = arms_of(runs, 'A'), arms_of(runs, 'C')
    reference = losses(fresh_runs(A, 'sophiag', OF_BEST_GAMMA))
    rows = [{'comparison': f'A: {optimizer_label(name)} minus Sophia-G', 'n': '3, 3',
             **difference(losses(fresh_runs(A, name, TESTED)), reference)}
            for name in ('signum', 'gnb_mean', 'ef_clip', 'sophiah')]
    for row, p in zip(rows, holm([row['p'] for row in rows])):
        row['p, Holm'] = p
    sophia = losses(fresh_runs(C, 'sophiag', SIX))
    others = {f'C, {what}: Sophia-G minus {optimizer_label(name)}': losses(fresh_runs(C, name, SIX))
              for name, what in (('adamw', 'primary'), ('signum', 'secondary'))}
    for part, what in ('F', 'Sign momentum, same warm-up'), ('G', 'GNB, mean of h'):
        others[f'{part}, added: Sophia-G minus {what}'] = losses(run for run in runs if part_of(run) == part)
    rows += [{'comparison': what, 'n': '6, 6', **difference(sophia, other)} for what, other in others.items()]
    shorter = [losses(fresh_runs(arms_of(runs, 'H'), name, TESTED)) for name in ('sophiag', 'adamw')]
    return [*rows, {'comparison': 'H, added: Sophia-G minus AdamW, warm-up 1,200', 'n': '3, 3', **difference(*shorter)}]


def long_horizon(runs):
    """Return a row for each side of part C, with its difference to AdamW, the lowest loss first."""
    C = arms_of(runs, 'C')
    sides = {name: losses(fresh_runs(C, name, SIX)) for name in ('sophiag', 'adamw', 'signum')}
    return [dict(optimizer=optimizer_label(name), mean=statistics.mean(side), sd=statistics.stdev(side),
                 **difference(side, sides['adamw']))
            for name, side in sorted(sides.items(), key=lambda item: statistics.mean(item[1]))]


def tables(runs):
    """Return the tables of README.md, in its order."""
    six = [{'six fresh seeds': row['optimizer'], 'loss': mean_sd(row['mean'], row['sd']),
            'minus AdamW, 95 %': interval(row) if row['optimizer'] != 'AdamW' else None} for row in long_horizon(runs)]
    return [markdown(rows) for rows in (texts(tests(runs)), six)]


# ----------------------------------------------------------------------------------------------------------------------
# Pictures


def draw_gamma(runs):
    """Draw part A: final loss and unclipped share against γ, a line for each learning rate; sign momentum as the left
    end, AdamW as a band. Return (figure, rows)."""
    arms = arms_of(runs, 'A')
    points = [(gamma, lr, run) for (name, gamma), arm in arms.items() if name in ('sophiag', 'signum')
              for (lr, *_), run in arm['search'].items()]
    left_end = min(gamma for gamma, *_ in points if gamma) / 4  # the place of γ = 0 on the logarithmic axis
    rates = sorted({lr for _, lr, _ in points})
    fig, (loss, unclipped) = figure(2, width=4.6, height=4.0)
    for lr, style in zip(rates, styles([''] * len(rates))):
        mine = sorted((gamma or left_end, run) for gamma, rate, run in points if rate == lr)
        loss.plot([x for x, _ in mine], [run.final_loss for _, run in mine], 'o-', markersize=4,
                  label=f'learning rate {lr:g}', **style)
        shares = [(x, run.last('update_unclipped')) for x, run in mine if x > left_end]
        unclipped.plot([x for x, _ in shares], [share for _, share in shares], 'o-', markersize=4, **style)
    adamw = losses(arms['adamw', 0.0]['runs'].values())
    loss.axhspan(min(adamw), max(adamw), color='0.5', alpha=0.3, label=f'AdamW, {len(adamw)} seeds')
    unclipped.axhspan(0.1, 0.5, color='0.5', alpha=0.15)
    gammas = sorted({gamma for gamma, *_ in points if gamma})
    for ax, title in (loss, 'final validation loss'), (unclipped, "unclipped share (grey: paper's advice)"):
        ax.set(xscale='log', xlabel='γ', title=title)
        ax.set_xticks([left_end, *gammas], ['0: sign\nmomentum', *(f'{gamma:g}' for gamma in gammas)])
        ax.minorticks_off()
    legend(fig, loss)
    return fig, [dict(gamma=gamma, learning_rate=lr, loss=run.final_loss, unclipped=run.last('update_unclipped'))
                 for gamma, lr, run in points]


def draw_curves(runs):
    """Draw the runs of 9,600 steps with a warm-up of 2,400, six fresh seeds each: mean losses; and their differences
    to AdamW's, with the 95 % interval at the end. Return (figure, rows)."""
    C = arms_of(runs, 'C')
    sides = {'adamw': fresh_runs(C, 'adamw', SIX), 'signum': [run for run in runs if part_of(run) == 'F'],
             'sophiag': fresh_runs(C, 'sophiag', SIX)}
    fig, (loss, lead) = figure(2, width=4.8, height=3.5)
    rows = []
    for place, ((name, side), style) in enumerate(zip(sides.items(), styles(sides))):
        steps, means, *_ = averaged(side, 'val/loss')
        rows += [dict(optimizer=name, steps=step, loss=mean) for step, mean in zip(steps, means)]
        loss.plot(steps[1:], means[1:], label=optimizer_label(name), **style)
        lead.plot(steps[1:], [mean - row['loss'] for mean, row in zip(means[1:], rows[1:])], **style)
        if name != 'adamw':
            final = difference(losses(side), losses(sides['adamw']))
            lead.errorbar(steps[-1] + 200 * place, final['difference'], final['plus_or_minus'], fmt='o', capsize=4,
                          **style)
    loss.set(ylim=(1.25, 1.8), title='Validation loss, mean of six seeds')
    loss.legend(frameon=False)
    lead.set(ylim=(-0.02, 0.01), title="Loss minus AdamW's, 95 % intervals at the end")
    for ax in (loss, lead):
        ax.set(xlim=(0, 10_300), xlabel='steps')
        ax.xaxis.set_major_formatter('{x:,.0f}')
    return fig, rows


DRAWINGS = dict(curves=draw_curves, gamma=draw_gamma)

if __name__ == '__main__':
    show_results(__doc__, HERE, read, tables, DRAWINGS)
