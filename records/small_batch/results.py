"""Results of this study, from runs.jsonl and bands.jsonl beside this file.

  python records/small_batch/results.py tables                                          the tables of README.md
  python records/small_batch/results.py bands --output records/small_batch/bands.png    losses of frequent, rare tokens
"""

import json
import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure, styles
from analysis.significance import difference, holm
from records.dissection.results import markdown, texts
from records.fresh_h.results import fresh, search_table, validation
from records.studies import recorded, show_results

SEEDS = range(1338, 1342)  # of the tests
# Arm → (optimizer, parts of an estimate if it is not one, the setting that was tuned with the learning rate).
ARMS = {'sign momentum': ('clip', None, None), 'fresh': ('sophiag', 4, 'gamma'),
        'permuted': ('gnb_permuted', 4, 'gamma'), 'paper': ('sophiag', None, 'gamma'), 'mean': ('gnb_mean', 4, 'gamma'),
        'AdamW': ('adamw', None, 'beta2')}
TESTS = [('fresh', 'sign momentum'), ('mean', 'sign momentum'), ('paper', 'sign momentum'), ('fresh', 'permuted')]


def arm_and_settings(name):
    """Return (arm, {setting: number}) of a run, given its name."""
    optimizer, *words = name.rsplit('/', 1)[-1].split(',')
    settings = {key: float(value) for key, value in (word.split('=') for word in words)}
    parts = settings.get('hessian_parts')
    arm = next(arm for arm, (other, own, _) in ARMS.items() if (other, own) == (optimizer, parts))
    return arm, settings


def arms_of(results):
    """Group results, {name of a run: `Result`}: {arm: {(γ or β2, learning rate): {seed: `Result`}}}, None in place of γ
    for sign momentum."""
    arms = {arm: {} for arm in ARMS}
    for name, result in results.items():
        arm, settings = arm_and_settings(name)
        tuned = ARMS[arm][2]
        trial = tuned and settings[tuned], settings['learning_rate']
        arms[arm].setdefault(trial, {})[int(settings['seed'])] = result
    return {arm: trials for arm, trials in arms.items() if trials}


def planned_tests(results):
    """Return a row for each planned test, corrected by Holm; none before all fresh seeds are there."""
    losses = {arm: fresh(trials, validation) for arm, trials in arms_of(results).items()}
    if not all(len(losses.get(arm, [])) == len(SEEDS) for pair in TESTS for arm in pair):
        return []
    rows = [{'comparison': f'{one} minus {two}', 'n': '4, 4', **difference(losses[one], losses[two])}
            for one, two in TESTS]
    return [row | {'p, Holm': p} for row, p in zip(rows, holm([row['p'] for row in rows]))]


def read_bands():
    """Return {arm: [{'ids': number, 'tokens': number, 'loss': mean over the fresh seeds} of each band]}, by
    scripts/eval.py --bands."""
    found = {arm: [] for arm in ARMS}
    for line in (HERE / 'bands.jsonl').read_text(encoding='utf-8').splitlines():
        result = json.loads(line)
        found[arm_and_settings(Path(result['checkpoint']).parent.name)[0]].append(result['bands'])
    # The runs of an arm differ in the losses only.
    return {arm: [one[0] | dict(loss=mean(band['loss'] for band in one)) for one in zip(*runs)]
            for arm, runs in found.items()}


def band_table(bands):
    """Return a row of texts for each arm: its loss on each band of ids. Two rows before say how many ids and which
    share of the tokens a band has."""
    parts = bands['sign momentum']
    tokens = sum(part['tokens'] for part in parts)
    rows = {'ids': [f'{part["ids"]}' for part in parts],
            'tokens': [f'{part["tokens"] / tokens:.0%}'.replace('%', ' %') for part in parts],
            **{arm: [f'{part["loss"]:.3f}' for part in mine] for arm, mine in bands.items()}}
    return [{'': name, **{f'band {i}': text for i, text in enumerate(texts, 1)}} for name, texts in rows.items()]


def read_results():
    """Return {name of a run: its `Result`} of this study."""
    return recorded(HERE / 'runs.jsonl')


def tables(results):
    """Return the tables as Markdown: the planned tests, the losses by band, all trials."""
    trials = [{'γ or β2' if key == 'γ' else key: text for key, text in row.items()}
              for row in search_table(arms_of(results))]
    return [markdown(rows) for rows in (texts(planned_tests(results)), band_table(read_bands()), trials)]


# ----------------------------------------------------------------------------------------------------------------------
# Pictures


def draw_bands(results):
    """Draw each arm's loss on each band of ids minus sign momentum's, means over fresh seeds. Return (figure, rows)."""
    bands, rows = read_bands(), []
    sign = bands.pop('sign momentum')
    fig, (ax,) = figure(width=5.6, height=3.4)
    ax.axhline(0, color='0.4', linewidth=1)
    for (arm, mine), style in zip(bands.items(), styles([''] * len(bands))):
        apart = [one['loss'] - other['loss'] for one, other in zip(mine, sign)]
        ax.plot(range(1, len(apart) + 1), apart, 'o-', markersize=4, label=arm, **style)
        rows += [dict(arm=arm, band=band, difference=found) for band, found in enumerate(apart, 1)]
    ax.set(xlabel='band of ids, from frequent to rare', title='Loss minus sign momentum\'s, fresh seeds')
    ax.set_xticks(range(1, len(sign) + 1))
    ax.legend(frameon=False, fontsize=8)
    return fig, rows


if __name__ == '__main__':
    show_results(__doc__, 'bands.png', read_results, tables, dict(bands=draw_bands))
