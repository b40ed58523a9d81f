"""The benchmark: its columns, its baselines, its errors; and that it steps as train.py does."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, metrics, rejection

import train
from dev import bench

BASELINE = '''
import torch
from dataclasses import dataclass
from torch import nn
from model import GPT as Ours


@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 64
    n_layer: int = 1
    n_head: int = 1
    n_embd: int = 8
    dropout: float = 0.0
    bias: bool = False


class GPT(Ours):
    def __init__(self, config):
        from model import GPTConfig as Full
        super().__init__(Full(**vars(config)))

    def forward(self, idx, targets):
        assert idx.is_contiguous() and targets.is_contiguous()
        logits = super().forward(idx)[0]
        return logits, nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        print('this is no row of the table')
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas)
'''


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp('bench')
    (folder / 'peer').mkdir()
    (folder / 'peer' / 'model.py').write_text(BASELINE)
    bench.main(['--tiny', '--rounds', '2', '--device', 'cpu', '--baseline', str(folder / 'peer'), '--output',
                str(folder / 'bench.json')])
    return json.loads((folder / 'bench.json').read_text())


def test_every_column_is_measured_where_it_exists(report):
    rows = report['results']
    assert len(rows) == 4 and rows[3]['config'].startswith('peer: ')
    for row, name in zip(rows, ('adamw', 'sophiag', 'sophiah', 'adamw')):
        assert f'optimizer_name={name}' in row['config']
        for key in ('step_ms', 'tokens_per_sec', 'optimizer_ms', 'over_adamw', 'over_adamw_clipping', 'over_floor',
                    'wait_share', 'memory_gb', 'bandwidth_gb_s'):
            assert row[key] >= 0, key
        assert ('hessian_ms' in row) == name.startswith('sophia') and ('hvp_ratio' in row) == (name == 'sophiah')
        assert 'mfu' not in row  # of a CPU, whose peak is not known
    assert report['about']['torch'] == torch.__version__
    command = report['about']['command']
    assert command.startswith('dev/bench.py --tiny') and '--baseline peer ' in command
    lines = bench.table(rows).splitlines()
    assert len(lines) == 6 and len({line.count('|') for line in lines}) == 1


def test_updates_of_every_optimizer(tmp_path, monkeypatch):
    """One row each; what is named in a CONFIG is taken alone."""
    monkeypatch.setattr(bench, 'OPTIMIZERS', ['adamw', 'sophiag', 'adahessian', 'normalize'])
    monkeypatch.setattr(bench, 'STEPS', 2)
    tiny = '--model_size=tiny --n_layer=1 --n_embd=8 --n_head=1 --total_batch_size=12'
    bench.main(['--updates', '--rounds', '3', '--device', 'cpu', tiny, f'{tiny} --optimizer_name=muon', '--output',
                str(tmp_path / 'updates.json')])
    rows = {row['optimizer_name']: row for row in json.loads((tmp_path / 'updates.json').read_text())['results']}
    assert {name: round(row['state'], 2) for name, row in rows.items()} == dict(
        adamw=2, sophiag=2, adahessian=2, normalize=1, muon=2)
    assert all(row['over_adamw'] > 0 and row['turns'] == 3 for row in rows.values())
    assert rows['muon']['state'] < 2  # of the few parameters that are no embeddings


def test_the_numbers_of_a_state():
    state = dict(step=torch.tensor(3.0), k=4, m=torch.zeros(2, 3), sides=[torch.zeros(2, 2), None, torch.zeros(3, 3)])
    assert bench.numbers(state) == 6 + 4 + 9


@pytest.mark.parametrize('name, extra', [('adamw', []), ('sophiag', ['--hessian_interval=2', '--hessian_batch_size=3']),
                                         ('sophiah', ['--hessian_interval=2', '--hessian_batch_size=3'])])
def test_it_steps_as_train_py_does(fork, corpus, tmp_path, name, extra):
    """The first steps: bench.py's rate is constant, and iterations 0 to 3 of its rounds are those of k = 2."""
    flags = [*TINY, f'--optimizer_name={name}', '--decay_lr=False', '--warmup_iters=0', '--learning_rate=1e-2', *extra]
    fork('train.py', *flags, f'--dataset={corpus}', f'--out_dir={tmp_path}', '--max_iters=4', check=True)
    case = bench.Case(train.resolve([*flags, f'--dataset={corpus}']), corpus)
    case.close()
    assert case.losses == pytest.approx(metrics(tmp_path), abs=2e-6)


def test_configurations_of_one_model_take_turns_compiled_or_not(monkeypatch):
    groups = []

    def measure(configs, *_):
        groups.append([(config.values['n_layer'], config.values['compile']) for config in configs])
        return []

    monkeypatch.setattr(bench, 'measure', measure)
    bench.main(['--device', 'cpu', bench.TINY, f'{bench.TINY} --n_layer=2', f'{bench.TINY} --compile=True'])
    assert groups == [[(1, False), (1, True)], [(2, False)]]


def test_progress_says_which_model_is_how_far(monkeypatch):
    shown, clock = [], iter(range(0, 100, 3))
    monkeypatch.setattr(bench, 'show_progress', shown.append)
    monkeypatch.setattr(bench, 'Case', lambda *_: SimpleNamespace(measure=lambda _: None, results=lambda _: {},
                                                                  close=lambda: None))
    monkeypatch.setattr(bench, 'time', SimpleNamespace(monotonic=lambda: next(clock)))
    bench.measure([SimpleNamespace(optimizer_name='lion')], [], None, 3, deadline=1000, where='model 2/3: ')
    assert shown == ['model 2/3: set-up 1/1', 'model 2/3: round 1/3', 'model 2/3: round 2/3, ETA 12 s',
                     'model 2/3: round 3/3, ETA 4 s', 'model 2/3: optimizer steps and products alone', '']


def test_a_configuration_may_be_one_flag_and_they_keep_their_order(monkeypatch):
    texts = []

    def measure(configs, *_):
        texts.extend(' '.join(sorted(config.given - {'device', 'show_config'})) for config in configs)
        return []

    monkeypatch.setattr(bench, 'measure', measure)
    bench.main(['--model_size=125M', '--device', 'cpu', '--model_size=125M --optimizer_name=sophiag', '--rounds', '2',
                '--total_batch_size=480', 'config/quickstart.py --model_size=125M --n_layer=12'])
    assert texts[:3] == ['model_size', 'model_size optimizer_name', 'total_batch_size']


def test_errors(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert 'no CUDA device' in rejection(bench.main, ['--tiny', '--device', 'cuda'])
    for argv in (['--tyni'], ['--model_size', '125M']):
        with pytest.raises(SystemExit):
            bench.main(argv)
        assert f'{argv[0]}: no such flag' in capsys.readouterr().err


def test_a_baseline_without_a_model_is_rejected(tmp_path):
    with pytest.raises(SystemExit, match='no model.py'):
        bench.main(['--tiny', '--baseline', str(tmp_path)])
