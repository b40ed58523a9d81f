"""Results of the study in records/dissection, from its runs.jsonl: the tables of dev/tables.py, and the picture.

  python dev/dissection.py --output records/dissection/dissection.png
"""

import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from analysis.compare import Tuned, efficiency_at
from analysis.figures import argparser, figure, legend, mean_sd, optimizer_label, save, styles
from analysis.runs import find_runs, mean_loss
from analysis.significance import difference, holm
from dev.study import SEARCH_SEED

RECORDS = ROOT / 'records/dissection'
# The seeds of part A's tests. Sophia-G's best γ was chosen with TESTED, so Sophia-G is tested with seeds of its own.
TESTED = range(1338, 1341)
OF_BEST_GAMMA = range(1341, 1344)
SIX = range(1338, 1344)  # seeds of part C
SEEDS = dict(A=TESTED, C=SIX, B=TESTED)  # by part, of the best settings of each arm
ARMS = ['clip', 'sophiag', 'gnb_mean', 'ef_clip', 'sophiah', 'adamw']  # in the order of the protocol
HEAD = 'loss at learning rate'  # the first column of `table`
SETTINGS = 'β1', 'warm-up', 'weight decay'  # `settings_of` but the learning rate


def settings_of(run):
    """The settings that tell the trials of an arm apart."""
    return run.learning_rate, run.beta1, run.warmup_iters, run.weight_decay


def part_of(run):
    """The part of the study that a run belongs to, a letter."""
    return run.out_dir.relative_to(RECORDS).parts[0]


def arms_of(runs, part):
    """{(optimizer, γ): arm} of a part; an arm is a dict with search, {settings: run with the search's seed}, best, the
    settings with the lowest loss among these, and runs, {seed: run} with the best settings."""
    arms = {}
    for run in runs:
        if part_of(run) == part:
            arms.setdefault((run.optimizer_name, run.gamma), []).append(run)
    for key, mine in arms.items():
        search = {settings_of(run): run for run in mine if run.seed == SEARCH_SEED}
        best = min(search, key=lambda settings: search[settings].final_loss)
        arms[key] = dict(search=search, best=best, runs={run.seed: run for run in mine if settings_of(run) == best})
    return arms


def fresh_runs(arms, name, seeds, gamma=None):
    """The runs with these seeds of the arm of an optimizer that has them; of Sophia-G with a `gamma`, if given."""
    found = [arm['runs'] for (optimizer, value), arm in arms.items()
             if optimizer == name and gamma in (None, value) and set(seeds) <= arm['runs'].keys()]
    return [found[0][seed] for seed in seeds]


def losses(runs):
    """The final losses of `runs`."""
    return [run.final_loss for run in runs]


def table(arms, seeds):
    """A row of texts for each arm: its loss with the search's seed at each learning rate and with each change of
    another setting; mean and standard deviation of the best one over the other `seeds`; its unclipped share."""
    rows, order = [], {}
    for (name, gamma), arm in sorted(arms.items(), key=lambda item: (ARMS.index(item[0][0]), item[0][1])):
        usual = statistics.mode(settings[1:] for settings in arm['search'])
        row = {HEAD: optimizer_label(name) + (f', γ = {gamma:g}' if gamma else '')}
        for (lr, *others), run in arm['search'].items():
            changes = [f'{what} = {value:g}' for what, value, old in zip(SETTINGS, others, usual) if value != old]
            column = ', '.join(changes) or f'{lr:g}'
            order[column] = bool(changes), lr, column
            row[column] = f'{run.final_loss:.3f}'
        fresh = [arm['runs'][seed] for seed in seeds if seed in arm['runs']]
        unclipped = arm['search'][arm['best']].last('update_unclipped')
        row |= {'the best, other seeds': mean_sd(*mean_loss(fresh)) if fresh else None,
                'unclipped': None if unclipped is None or name == 'clip' else f'{unclipped:.0%}'.replace('%', ' %')}
        rows.append(row)
    columns = [HEAD, *sorted(order, key=order.get), 'the best, other seeds', 'unclipped']
    return [{column: row.get(column) for column in columns} for row in rows]


def tests(runs):
    """Rows of the tests: part A's four against Sophia-G, corrected by Holm; part C's primary and secondary test, as
    they are; the secondary one with the runs of parts F and G, the primary one with those of part H."""
    A, C = arms_of(runs, 'A'), arms_of(runs, 'C')
    reference = losses(fresh_runs(A, 'sophiag', OF_BEST_GAMMA))
    rows = [{'comparison': f'A: {optimizer_label(name)} minus Sophia-G', 'n': '3, 3',
             **difference(losses(fresh_runs(A, name, TESTED)), reference)}
            for name in ('clip', 'gnb_mean', 'ef_clip', 'sophiah')]
    for row, p in zip(rows, holm([row['p'] for row in rows])):
        row['p, Holm'] = p
    sophia = losses(fresh_runs(C, 'sophiag', SIX))
    others = {f'C, {what}: Sophia-G minus {optimizer_label(name)}': losses(fresh_runs(C, name, SIX))
              for name, what in (('adamw', 'primary'), ('clip', 'secondary'))}
    for part, what in ('F', 'Sign momentum, same warm-up'), ('G', 'GNB, mean of h'):
        others[f'{part}, added: Sophia-G minus {what}'] = losses(run for run in runs if part_of(run) == part)
    rows += [{'comparison': what, 'n': '6, 6', **difference(sophia, other)} for what, other in others.items()]
    shorter = [losses(fresh_runs(arms_of(runs, 'H'), name, TESTED)) for name in ('sophiag', 'adamw')]
    return [*rows, {'comparison': 'H, added: Sophia-G minus AdamW, warm-up 1,200', 'n': '3, 3', **difference(*shorter)}]


def long_horizon(runs):
    """A row for each side of part C, the lowest loss first.

    Differences are to AdamW. 'to AdamW': the iterations after which a run of this side would end at AdamW's loss of
    part C, interpolated between its own losses in the parts A and C; None if it would take more than part C has.
    """
    A, C = arms_of(runs, 'A'), arms_of(runs, 'C')
    best_gamma = fresh_runs(A, 'sophiag', OF_BEST_GAMMA)[0].gamma
    sides = {}
    for name in 'sophiag', 'adamw', 'clip':
        groups = (fresh_runs(A, name, TESTED, best_gamma if name == 'sophiag' else None), fresh_runs(C, name, SIX))
        sides[name] = {group[0].max_iters: Tuned(group[0].max_iters, group, [group], []) for group in groups}
    T = max(sides['adamw'])
    adamw, rows = sides['adamw'][T], []
    for side in sorted(sides.values(), key=lambda side: side[T].mean):
        reached = efficiency_at(adamw, side)
        rows.append(side[T].row() | difference(side[T].losses, adamw.losses)
                    | {'to AdamW': reached['baseline steps'] if reached else None})
    return rows


def draw(arms):
    """(figure, rows) of part A: final loss and unclipped share against γ, a line for each learning rate; sign momentum
    as the left end, AdamW as a band."""
    points = [(gamma, lr, run) for (name, gamma), arm in arms.items() if name in ('sophiag', 'clip')
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


def main(argv=None):
    args = argparser(__doc__, 'dissection.png').parse_args(argv)
    save(args.output, *draw(arms_of(find_runs([RECORDS]), 'A')))


if __name__ == '__main__':
    main()
