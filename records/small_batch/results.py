"""Results of this study, from runs.jsonl and bands.jsonl in this directory.

  python records/small_batch/results.py tables                                          the tables of README.md
  python records/small_batch/results.py trials --output records/small_batch/trials.csv  every run
  python records/small_batch/results.py bands --output records/small_batch/bands.png    losses of frequent, rare tokens
"""

import json
import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from analysis.figures import figure, styles
from analysis.runs import find_runs
from analysis.significance import difference, holm
from records.fresh_h.results import fresh
from records.studies import markdown, percent, show_results, texts

# Arm → optimizer, and parts of an estimate.
ARMS = {'sign momentum': ('signum', 0), 'fresh': ('sophiag', 4), 'permuted': ('gnb_permuted', 4),
        'paper': ('sophiag', 1), 'mean': ('gnb_mean', 4), 'AdamW': ('adamw', 0)}
TESTS = [('fresh', 'sign momentum'), ('mean', 'sign momentum'), ('paper', 'sign momentum'), ('fresh', 'permuted')]


def read():
    return find_runs([HERE])


def arm_of(run):
    return next(arm for arm, row in ARMS.items() if row == (run.optimizer_name, run.hessian_parts))


def arms_of(runs):
    """Group the runs: {arm: {(γ, β2, learning rate): {seed: run}}}."""
    arms = {arm: {} for arm in ARMS}
    for run in runs:
        arms[arm_of(run)].setdefault((run.gamma, run.beta2, run.learning_rate), {})[run.seed] = run
    return arms


def planned_tests(runs):
    """Return a row for each planned test, corrected by Holm."""
    losses = {arm: fresh(trials) for arm, trials in arms_of(runs).items()}
    rows = [{'comparison': f'{one} minus {two}', 'n': '4, 4', **difference(losses[one], losses[two])}
            for one, two in TESTS]
    return [row | {'p, Holm': p} for row, p in zip(rows, holm([row['p'] for row in rows]))]


def read_bands(runs):
    """Return {arm: [{'ids': number, 'tokens': number, 'loss': mean over the fresh seeds} of each band]}, by
    scripts/eval.py --bands."""
    found, arms = {arm: [] for arm in ARMS}, {run.out_dir.name: arm_of(run) for run in runs}
    for line in (HERE / 'bands.jsonl').read_text(encoding='utf-8').splitlines():
        result = json.loads(line)
        found[arms[Path(result['checkpoint']).parent.name]].append(result['bands'])
    # The runs of an arm differ in the losses only.
    return {arm: [one[0] | dict(loss=mean(band['loss'] for band in one)) for one in zip(*runs)]
            for arm, runs in found.items()}


def band_table(bands):
    """Return a row of texts for each arm: its loss on each band of ids. Two rows before say how many ids and which
    share of the tokens a band has."""
    parts = bands['sign momentum']
    tokens = sum(part['tokens'] for part in parts)
    rows = {'ids': [f'{part["ids"]}' for part in parts], 'tokens': [percent(part['tokens'] / tokens) for part in parts],
            **{arm: [f'{part["loss"]:.3f}' for part in mine] for arm, mine in bands.items()}}
    return [{'': name, **{f'band {i}': text for i, text in enumerate(texts, 1)}} for name, texts in rows.items()]


def tables(runs):
    """Return the tables as Markdown: the planned tests, the losses by band."""
    return [markdown(rows) for rows in (texts(planned_tests(runs)), band_table(read_bands(runs)))]


# ----------------------------------------------------------------------------------------------------------------------
# Pictures


def draw_bands(runs):
    """Draw each arm's loss on each band of ids minus sign momentum's, means over fresh seeds. Return (figure, rows)."""
    bands, rows = read_bands(runs), []
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


DRAWINGS = dict(bands=draw_bands)

if __name__ == '__main__':
    show_results(__doc__, HERE, read, tables, DRAWINGS)
