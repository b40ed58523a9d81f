"""Results of this study, from runs.jsonl beside this file.

  python records/fresh_h/results.py tables                                            the tables of README.md
  python records/fresh_h/results.py shares --output records/fresh_h/shares.png        loss against unclipped share
"""

import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure, styles
from analysis.runs import find_runs, mean_and_sd
from analysis.significance import difference, holm
from records.dissection import results as dissection
from records.dissection.results import mean_sd
from records.search import SEARCH_SEED
from records.studies import part_of, recorded, show_results

SECOND_SEED = 1336  # decided in part B between the two best
FRESH = dict(beta2=0.9, hessian_parts=16)
# Arm → (optimizer, what tells it from other arms of this optimizer).
ARMS = {'sign momentum': ('clip', {}), 'fresh': ('sophiag', FRESH), 'permuted': ('gnb_permuted', FRESH),
        'paper': ('sophiag', {}), 'mean': ('gnb_mean', FRESH), 'AdamW': ('adamw', {}),
        'short memory': ('sophiag', dict(beta2=0.9)), 'parts': ('sophiag', dict(hessian_parts=16))}
STEPS = dict(A=2400, B=150, C=9600)
SPECIAL = 'beta2', 'hessian_parts'  # the settings that tell arms of one optimizer apart


def arm_of(optimizer, settings):
    """Return the name of the arm that a run belongs to, given its settings as texts; None for Sophia-H."""
    mine = {key: float(settings[key]) for key in SPECIAL if key in settings}
    return next((arm for arm, (name, special) in ARMS.items() if (name, special) == (optimizer, mine)), None)


def arms_of(results, part):
    """Group the results of a part: {arm: {(γ, learning rate): {seed: `Result`}}}, γ = None for arms without h.

    results: {name of a run: `Result`}, see `studies.recorded`. Runs of another length are left out: B's first two.
    """
    arms, length = {}, STEPS[part]
    for name, result in results.items():
        if not name.startswith(f'{part}/'):
            continue
        optimizer, *words = name.removeprefix(f'{part}/').split(',')
        settings = dict(word.split('=') for word in words)
        if int(settings['max_iters']) != length:
            continue
        trial = settings.get('gamma') and float(settings['gamma']), float(settings['learning_rate'])
        seeds = arms.setdefault(arm_of(optimizer, settings), {}).setdefault(trial, {})
        seeds[int(settings['seed'])] = result
    return arms


def search_of(trials):
    """Return {γ: {learning rate: `Result`}} of an arm with the search's seed, in order of γ."""
    found = {}
    for (gamma, lr), seeds in sorted(trials.items(), key=lambda item: item[0][0] or 0):
        if SEARCH_SEED in seeds:
            found.setdefault(gamma, {})[lr] = seeds[SEARCH_SEED]
    return found


def fresh(trials, measure):
    """Return the losses of the fresh seeds of an arm, at the settings that have the most of them."""
    found = [[measure(result) for seed, result in seeds.items() if seed not in (SEARCH_SEED, SECOND_SEED)]
             for seeds in trials.values()]
    return max(found, key=len, default=[])


def validation(result):
    """Return the validation loss of a `Result`."""
    return result.loss


def training(result):
    """Return the loss of a `Result` on its last mini-batch."""
    return result.train_loss


def search_table(arms, measure=validation):
    """Return a row of texts for each arm and γ: the unclipped share at the lowest loss, the loss of the search's seed
    at each learning rate, and mean and standard deviation of the fresh seeds."""
    found = {arm: search_of(trials) for arm, trials in arms.items()}
    rates = sorted({lr for search in found.values() for mine in search.values() for lr in mine})
    rows = []
    for arm in [arm for arm in ARMS if arm in found] + [arm for arm in found if arm is None]:
        for gamma, mine in found[arm].items():
            best = min(mine, key=lambda lr: measure(mine[lr]))
            others = fresh({trial: seeds for trial, seeds in arms[arm].items() if trial[0] == gamma}, measure)
            row = {'arm': arm or 'Sophia-H', 'γ': f'{gamma:g}' if gamma else '',
                   'unclipped': f'{mine[best].unclipped:.0%}'.replace('%', ' %') if gamma and mine[best].unclipped
                   else ''}
            row |= {f'{lr:g}': f'{measure(mine[lr]):.4f}' if lr in mine else '' for lr in rates}
            rows.append(row | {'fresh seeds': f'{mean_sd(*mean_and_sd(others))} ({len(others)})' if others else ''})
    return rows


def planned_tests(results):
    """Return a row for each planned test whose runs are complete: A's three, corrected by Holm once all are there, and
    C's against part F of the dissection."""
    losses = {arm: fresh(trials, validation) for arm, trials in arms_of(results, 'A').items()}
    rows = [{'comparison': f'A: fresh minus {arm}', 'n': '4, 4', **difference(losses['fresh'], losses[arm])}
            for arm in ('sign momentum', 'permuted', 'paper')
            if len(losses.get('fresh', [])) == len(losses.get(arm, [])) == 4]
    if len(rows) == 3:
        for row, p in zip(rows, holm([row['p'] for row in rows])):
            row['p, Holm'] = p
    hutchinson = fresh(arms_of(results, 'C').get(None, {}), validation)
    if len(hutchinson) == 6:
        runs = find_runs([dissection.RECORDS])
        sign = dissection.losses(run for run in runs if part_of(run) == 'F')
        rows.append({'comparison': 'C: Sophia-H minus sign momentum', 'n': '6, 6', **difference(hutchinson, sign)})
    return rows


def fixed_batch(results):
    """Return a row of texts for each arm of part B: the chosen settings, the training loss with each fresh seed, and
    the mean difference to sign momentum with its 95 % interval."""
    rows, sign, search = [], {}, (SEARCH_SEED, SECOND_SEED)
    for arm, trials in sorted(arms_of(results, 'B').items(), key=lambda item: [*ARMS].index(item[0])):
        twice = {trial: seeds for trial, seeds in trials.items() if SECOND_SEED in seeds}
        if not twice:
            continue
        gamma, lr = min(twice, key=lambda trial: sum(twice[trial][seed].train_loss for seed in search))
        mine = {seed: result.train_loss for seed, result in twice[gamma, lr].items() if seed > SEARCH_SEED}
        if len(mine) < 3:
            continue
        sign = sign or mine  # the first arm
        row = {'arm': arm, 'γ': f'{gamma:g}' if gamma else '', 'learning rate': f'{lr:g}',
               **{f'seed {seed}': f'{mine[seed]:.3f}' for seed in sorted(mine)}, 'mean': f'{mean(mine.values()):.3f}'}
        rows.append(row | {'minus sign momentum, 95 %': '' if mine is sign else dissection.interval(
            difference([*mine.values()], [*sign.values()]))})
    return rows


def read_results():
    """Return {name of a run: its `Result`} of this study."""
    return recorded(HERE / 'runs.jsonl')


def tables(results):
    """Return the tables as Markdown, without the ones that have no runs: parts A, B and C, the fresh seeds of B,
    and the planned tests."""
    parts = [search_table(arms_of(results, part), training if part == 'B' else validation) for part in 'ABC']
    parts[1] = [{key: text for key, text in row.items() if key != 'fresh seeds'} for row in parts[1]]
    return [dissection.markdown(rows) for rows in (*parts, fixed_batch(results),
                                                   dissection.texts(planned_tests(results))) if rows]


# ----------------------------------------------------------------------------------------------------------------------
# Pictures


def draw_shares(results):
    """Draw part A: the loss with the search's seed against the unclipped share, each γ at its best learning rate; and
    the planned tests with their 95 % intervals. Return (figure, rows)."""
    arms, rows = arms_of(results, 'A'), []
    for arm in [arm for arm in ARMS if arm in arms]:
        for gamma, mine in search_of(arms[arm]).items():
            lr = min(mine, key=lambda lr: mine[lr].loss)
            rows.append(dict(arm=arm, gamma=gamma, learning_rate=lr, unclipped=mine[lr].unclipped, loss=mine[lr].loss))
    fig, (loss, tested) = figure(2, width=4.8, height=3.4)
    with_h = list(dict.fromkeys(row['arm'] for row in rows if row['gamma']))
    for arm, style in zip(with_h, styles([''] * len(with_h))):
        mine = [row for row in rows if row['arm'] == arm]
        loss.plot([row['unclipped'] for row in mine], [row['loss'] for row in mine], 'o-', markersize=4, label=arm,
                  **style)
    for arm, line in ('sign momentum', '--'), ('AdamW', ':'):
        for row in rows:
            if row['arm'] == arm:
                loss.axhline(row['loss'], color='0.4', linestyle=line, label=arm)
    loss.set(xlabel='unclipped share at the end', title='Validation loss, seed of the search')
    loss.legend(frameon=False, fontsize=8)
    tests = [row for row in planned_tests(results) if row['comparison'].startswith('A: ')]
    for place, row in enumerate(tests):
        tested.errorbar(row['difference'], -place, xerr=row['plus_or_minus'], fmt='o', capsize=4, color='C0')
    tested.axvline(0, color='0.4', linewidth=1)
    tested.locator_params(axis='x', nbins=5)
    tested.set(ylim=(0.5 - max(len(tests), 1), 0.5), title='Difference of the losses, fresh seeds, 95 %')
    tested.set_yticks([-place for place in range(len(tests))],
                      [row['comparison'].removeprefix('A: ').replace(' minus', '\nminus') for row in tests])
    return fig, rows


if __name__ == '__main__':
    show_results(__doc__, 'shares.png', read_results, tables, dict(shares=draw_shares))
