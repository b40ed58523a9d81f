"""scripts/paper/compute_table.py: FLOPs as in the paper's Table 2, times from runs."""

import pytest
from conftest import ROOT
from fake_runs import make, rows_of

from scripts.paper import compute_table


@pytest.mark.parametrize('size', ['medium', 'large'])
def test_flops_agree_with_table_2(tmp_path, size):
    names = 'adamw', 'sophiah', 'sophiag'
    compute_table.main([*(f'{ROOT}/config/train_gpt2_{size}_{name}.py' for name in names),
                        f'--output={tmp_path / "table.csv"}'])
    rows = rows_of(tmp_path / 'table.csv')
    adamw, sophiah, sophiag = (float(row['TFLOPs per step']) for row in rows)
    assert adamw == pytest.approx(float(rows[0]['Table 2']), rel=0.005)
    # The paper's estimates cost more: 6 % and 5 % of a step.
    assert sophiah / adamw == pytest.approx(1 + 8 / 3 * 32 / 480 / 10)
    assert sophiag / adamw == pytest.approx(1 + 2 / 3 / 20)
    assert all(1 < float(row['Table 2']) / float(row['TFLOPs per step']) < 1.05 for row in rows[1:])


def test_times_are_those_of_the_runs(tmp_path):
    adamw = make(tmp_path, 'adamw', 100, 3.0)
    sophiag = make(tmp_path, 'sophiag', 100, 3.0, hessian_ms=100.0)
    compute_table.main([str(adamw), str(sophiag), f'--output={tmp_path / "table.csv"}'])
    adamw, sophiag = rows_of(tmp_path / 'table.csv')
    assert float(adamw['T(step) s']) == pytest.approx(0.5) and float(adamw['memory GB']) == 1.5
    assert float(sophiag['T(Hessian) s']) == pytest.approx(0.01)
