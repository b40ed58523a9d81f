"""Results of the study in records/dissection: tables, the planned tests, the picture. Reads its runs.jsonl only.

  python dev/dissection.py
  python dev/dissection.py --output records/dissection/dissection.png

Runs that the protocol asks for and that are missing are left out, with a note.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.compare import Tuned, efficiency_at
from analysis.figures import figure, legend, mean_sd, optimizer_label, png_path, print_table, save, styles
from analysis.runs import find_runs, mean_loss
from analysis.significance import difference, holm
from dev.study import RECORDS, SEARCH_SEED

# The seeds of part A's tests. Sophia-G's best γ was chosen with TESTED, so Sophia-G is tested with seeds of its own.
TESTED = range(1338, 1341)
OF_BEST_GAMMA = range(1341, 1344)
ARMS = ['clip', 'sophiag', 'gnb_mean', 'ef_clip', 'sophiah', 'adamw']  # in the order of the protocol
IN_TESTS = 'clip', 'gnb_mean', 'ef_clip', 'sophiah'
SIX = range(1338, 1344)  # seeds of part C
SEEDS = dict(A=TESTED, C=SIX, B=TESTED, D=(), E=())  # by part, of the best settings of each arm
HEAD = 'loss at learning rate'  # the first column of `table`
# Columns printed of `long_horizon`.
LONG = ['optimizer', 'learning_rate', 'val/loss', 'sd', 'seeds', 'difference', 'plus_or_minus', 'p', 'to AdamW']
SETTINGS = 'β1', 'warm-up', 'weight decay'  # `settings_of` but the learning rate


def settings_of(run):
    """The settings that tell the trials of an arm apart."""
    return run.learning_rate, run.beta1, run.warmup_iters, run.weight_decay


def part_of(run):
    """The part of the study that a run belongs to, a letter."""
    return run.out_dir.relative_to(RECORDS.parent).parts[0]


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


def with_seeds(arm, seeds):
    """The runs of an arm's best settings with these seeds; [] unless all are there."""
    return [arm['runs'][seed] for seed in seeds] if all(seed in arm['runs'] for seed in seeds) else []


def losses(arm, seeds):
    """The losses of `with_seeds`."""
    return [run.final_loss for run in with_seeds(arm, seeds)]


def best_gamma(arms):
    """The γ of Sophia-G with the lowest mean over four seeds; None while a seed is missing."""
    means = {gamma: losses(arm, [SEARCH_SEED, *TESTED]) for (name, gamma), arm in arms.items() if name == 'sophiag'}
    return min(means, key=lambda gamma: statistics.mean(means[gamma])) if means and all(means.values()) else None


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
        fresh, unclipped = with_seeds(arm, seeds), arm['search'][arm['best']].last('update_unclipped')
        row |= {'the best, other seeds': mean_sd(*mean_loss(fresh)) if fresh else None,
                'unclipped': None if unclipped is None or name == 'clip' else f'{unclipped:.0%}'.replace('%', ' %')}
        rows.append(row)
    columns = [HEAD, *sorted(order, key=order.get), 'the best, other seeds', 'unclipped']
    return [{column: row.get(column) for column in columns} for row in rows]


def fresh_runs(arms, name, seeds):
    """The runs with these seeds of the one arm of an optimizer that has them; [] if none has."""
    found = (with_seeds(arm, seeds) for (optimizer, _), arm in arms.items() if optimizer == name)
    return next(filter(None, found), [])


def fresh_losses(arms, name, seeds):
    """The losses of `fresh_runs`."""
    return [run.final_loss for run in fresh_runs(arms, name, seeds)]


def tests(runs):
    """Rows of the tests whose runs are all there: part A's four against Sophia-G, corrected by Holm; part C's primary
    and secondary test, as they are; the secondary one with the runs of parts F and G."""
    A, C, rows = arms_of(runs, 'A'), arms_of(runs, 'C'), []
    gamma = best_gamma(A)
    reference = losses(A['sophiag', gamma], OF_BEST_GAMMA) if gamma else []
    ones = {name: fresh_losses(A, name, TESTED) for name in IN_TESTS}
    if reference and all(ones.values()):
        for name, one in ones.items():
            rows.append({'comparison': f'A: {optimizer_label(name)} minus Sophia-G', 'n': '3, 3',
                         **difference(one, reference)})
        # A side that has diverged has no test, but the others are corrected as if it had one.
        for row, p in zip(rows, holm([1.0 if row['p'] is None else row['p'] for row in rows])):
            row['p, Holm'] = None if row['p'] is None else p
    sides = {name: fresh_losses(C, name, SIX) for name in ('sophiag', 'adamw', 'clip')}
    for name, what in ('adamw', 'primary'), ('clip', 'secondary'):
        if sides['sophiag'] and sides[name]:
            rows.append({'comparison': f'C, {what}: Sophia-G minus {optimizer_label(name)}', 'n': '6, 6',
                         **difference(sides['sophiag'], sides[name])})
    for part, what in ('F', 'Sign momentum, same warm-up'), ('G', 'GNB, mean of h'):
        added = {run.seed: run.final_loss for run in runs if part_of(run) == part}
        if sides['sophiag'] and len(added) == len(SIX):
            rows.append({'comparison': f'{part}, added: Sophia-G minus {what}', 'n': '6, 6',
                         **difference(sides['sophiag'], [added[seed] for seed in SIX])})
    return rows


def long_horizon(runs):
    """A row for each side of part C, the lowest loss first; [] while one of its runs with the six seeds is missing.

    Differences are to AdamW. 'to AdamW': the iterations after which a run of this side would end at AdamW's loss of
    part C, interpolated between its own losses in the parts A and C; None if it would take more than part C has.
    """
    A, C = arms_of(runs, 'A'), arms_of(runs, 'C')
    gamma = best_gamma(A)
    A = {(name, value): arm for (name, value), arm in A.items() if name != 'sophiag' or value == gamma}
    sides = {}
    for name in 'sophiag', 'adamw', 'clip':
        short, long = fresh_runs(A, name, TESTED), fresh_runs(C, name, SIX)
        if not short or not long:
            return []
        sides[name] = {group[0].max_iters: Tuned(group[0].max_iters, group, [group], []) for group in (short, long)}
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
              for (lr, *_), run in arm['search'].items() if not run.diverged]
    left_end = min(gamma for gamma, *_ in points if gamma) / 4  # the place of γ = 0 on the logarithmic axis
    rates = sorted({lr for _, lr, _ in points})
    fig, (loss, unclipped) = figure(2, width=4.6, height=4.0)
    for lr, style in zip(rates, styles([''] * len(rates))):
        mine = sorted((gamma or left_end, run) for gamma, rate, run in points if rate == lr)
        loss.plot([x for x, _ in mine], [run.final_loss for _, run in mine], 'o-', markersize=4,
                  label=f'learning rate {lr:g}', **style)
        shares = [(x, run.last('update_unclipped')) for x, run in mine if x > left_end]
        unclipped.plot([x for x, _ in shares], [share for _, share in shares], 'o-', markersize=4, **style)
    if ('adamw', 0.0) in arms:
        adamw = [run.final_loss for run in arms['adamw', 0.0]['runs'].values()]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--output', type=png_path, help='PNG of part A; .csv next to it')
    args = parser.parse_args(argv)
    runs = find_runs([RECORDS.parent])
    for part, seeds in SEEDS.items():
        if arms := arms_of(runs, part):
            print(f'Part {part}')
            print_table(table(arms, seeds))
    if rows := long_horizon(runs):
        print_table(rows, LONG)
    if args.output:
        fig, rows = draw(arms_of(runs, 'A'))
        save(args.output, fig, rows)
    found = tests(runs)
    print_table(found) if found else print('no planned test has all of its runs yet')


if __name__ == '__main__':
    main()
