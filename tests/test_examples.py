"""examples/: each trains, with an estimate every k steps, of the step's own forward, before its update."""

import functools
import importlib
import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import HANG, ROOT
from test_hacking import copy_repository, elsewhere

from sophia import Sophia, gauss_newton_bartlett


def example(name, *packages):
    """The module examples/{name}.py; skips the test where one of its `packages` is missing."""
    for package in packages:
        pytest.importorskip(package, reason=f'needs {package}: pip install -r requirements-examples.txt')
    return importlib.import_module(f'examples.{name}')


@pytest.fixture
def trainer(monkeypatch):
    """The module examples/huggingface_trainer.py, on a CPU."""
    module = example('huggingface_trainer', 'transformers', 'accelerate')
    monkeypatch.setattr(module, 'TrainingArguments', functools.partial(module.TrainingArguments, use_cpu=True))
    return module


@pytest.fixture
def trace(monkeypatch):
    """trace(module): what happens from here on: 'f', a forward in training; 'h', an estimate; 's', an update."""
    events, hooks = [], []
    update_hessian, update = Sophia.update_hessian, Sophia.update

    def traced_update_hessian(*args):
        events.append('h')
        update_hessian(*args)

    def traced_update(self, group, params):
        assert all((p.dim() > 1) == (group['weight_decay'] > 0) for p in params)
        if group['weight_decay']:  # the first of two groups
            events.append('s')
        update(self, group, params)

    monkeypatch.setattr(Sophia, 'update_hessian', traced_update_hessian)
    monkeypatch.setattr(Sophia, 'update', traced_update)

    def start(cls):
        def forward(module, args):
            if type(module) is cls and module.training:
                events.append('f')
        hooks.append(torch.nn.modules.module.register_module_forward_pre_hook(forward))
        return events

    yield start
    for hook in hooks:
        hook.remove()


def steps(n, k=10, forwards='f'):
    """The trace of n steps with an estimate at 0, k, 2k, …, each of one forward per micro-batch."""
    return list(''.join(forwards + ('h' if i % k == 0 else '') + 's' for i in range(n)))


def test_sophia_anywhere(tmp_path):
    """sophia.py and the script, in a directory with nothing else: both models learn."""
    for path in ('sophia.py', 'examples/sophia_anywhere.py'):
        shutil.copy(ROOT / path, tmp_path)
    done = subprocess.run([sys.executable, 'sophia_anywhere.py', '--steps=120', '--estimator=hutchinson'], cwd=tmp_path,
                          capture_output=True, text=True, timeout=HANG,
                          env=dict(os.environ, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES=''))
    assert done.returncode == 0, done.stderr[-3000:]
    first = [float(x) for x in re.findall(r'step 0: loss ([\d.]+)', done.stdout)]
    unseen = [float(x) for x in re.findall(r'new \w+: ([\d.]+)', done.stdout)]
    assert len(first) == len(unseen) == 2
    assert unseen[0] < first[0] - 0.5 and unseen[1] < 0.25 * first[1]


def test_accelerate(trace):
    """Two micro-batches a step; the estimate is made on the second."""
    events = trace(torch.nn.Sequential)
    losses = example('accelerate_loop', 'accelerate').main(steps=30)
    assert events == steps(30, forwards='ff')
    assert sum(losses[-10:]) / 10 < 0.5 * losses[0]


def test_lightning(trace, monkeypatch):
    """With gradient accumulation the hook is called once a step, after the last backward."""
    module = example('lightning_module', 'lightning')
    monkeypatch.setattr(module.lightning, 'Trainer', functools.partial(
        module.lightning.Trainer, accelerator='cpu', accumulate_grad_batches=3))
    events = trace(torch.nn.Sequential)
    losses = module.main(steps=20)
    assert events == steps(20, forwards='fff')
    assert sum(losses[-10:]) / 10 < 0.8 * losses[0]


def test_peft_lora(trace, monkeypatch):
    transformers = pytest.importorskip('transformers')
    module = example('peft_lora', 'transformers', 'peft')
    taken = []
    monkeypatch.setattr(module, 'Sophia', lambda groups, *args, **kwargs: (
        taken.extend(groups), Sophia(groups, *args, **kwargs))[1])
    events = trace(transformers.GPT2Model)
    losses = module.main(steps=30)
    assert events == steps(30)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3
    adapters, biases = (group['params'] for group in taken)
    assert adapters and all(min(p.shape) == 8 for p in adapters) and biases  # of rank 8, no matrix of the base model


def test_huggingface_trainer(trainer, tmp_path, trace, monkeypatch):
    """It learns, and resumes bit for bit. With padding the estimate counts the positions that the loss counts."""
    sequences, shapes = trainer.sequences, []

    def padded(n):
        return [dict(row, labels=torch.where(torch.arange(32) < 24, row['labels'], -100)) for row in sequences(n)]

    monkeypatch.setattr(trainer, 'sequences', padded)
    monkeypatch.setattr(trainer, 'gauss_newton_bartlett', lambda logits, *args, **options: shapes.append(
        logits.shape) or gauss_newton_bartlett(logits, *args, **options))
    monkeypatch.setattr(trainer.SophiaTrainer, 'hessian_interval', 4)
    events = trace(trainer.GPT2LMHeadModel)
    whole, _ = trainer.main(['--steps=20', f'--out_dir={tmp_path}/whole'])
    assert events == steps(20, k=4)
    losses = [line['loss'] for line in whole.state.log_history if 'loss' in line]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.1
    shutil.copytree(tmp_path / 'whole/checkpoint-10', tmp_path / 'part/checkpoint-10')
    events.clear()
    resumed, _ = trainer.main(['--steps=20', f'--out_dir={tmp_path}/part', '--resume'])
    assert events == steps(20, k=4)[len(steps(10, k=4)):]
    resumed.evaluate(padded(16))
    assert shapes == [(16 * 23, 64)] * 7  # at 0, 4, …, 16; at 12 and 16; not in evaluation
    for (name, p), q in zip(whole.model.named_parameters(), resumed.model.parameters()):
        assert torch.equal(p, q), name
    states = [run.optimizer.optimizer.state_dict()['state'] for run in (whole, resumed)]
    for i, state in states[0].items():
        assert state.keys() == {'exp_avg', 'hessian'}
        assert all(torch.equal(state[key], states[1][i][key]) for key in state)


def test_huggingface_trainer_estimates_from_a_micro_batch_with_labels(trainer, tmp_path, trace, monkeypatch):
    """Of four micro-batches a step the first two have none, as where a prompt fills the context."""
    rows = [dict(row, labels=row['labels'] if i % 4 > 1 else torch.full((32,), -100))
            for i, row in enumerate(trainer.sequences(16))]
    one_each = dict(per_device_train_batch_size=1, gradient_accumulation_steps=4, train_sampling_strategy='sequential')
    monkeypatch.setattr(trainer, 'sequences', lambda n: rows)
    monkeypatch.setattr(trainer, 'TrainingArguments', lambda *args, make=trainer.TrainingArguments, **options: make(
        *args, **dict(options, **one_each)))
    events = trace(trainer.GPT2LMHeadModel)
    trainer.main(['--steps=2', f'--out_dir={tmp_path}'])
    assert ''.join(events) == 'fffhfs' + 'ffffs'


def test_prompt_tuning_puts_logits_in_front(trainer, tmp_path, monkeypatch):
    """Both examples take the logits of the tokens."""
    peft, lora, shapes = pytest.importorskip('peft'), example('peft_lora', 'transformers', 'peft'), []

    def tuned(model, config=None):
        return peft.get_peft_model(model, peft.PromptTuningConfig(task_type='CAUSAL_LM', num_virtual_tokens=5))

    for module in trainer, lora:
        monkeypatch.setattr(module, 'GPT2Config', lambda make=module.GPT2Config, **sizes: make(
            **dict(sizes, n_positions=64)))
        monkeypatch.setattr(module, 'gauss_newton_bartlett', lambda logits, *args, **options: shapes.append(
            logits.shape) or gauss_newton_bartlett(logits, *args, **options))
    monkeypatch.setattr(trainer, 'GPT2LMHeadModel', lambda config, make=trainer.GPT2LMHeadModel: tuned(make(config)))
    monkeypatch.setattr(lora, 'get_peft_model', tuned)
    trainer.main(['--steps=1', f'--out_dir={tmp_path}'])
    lora.main(steps=1)
    assert shapes == [(16 * 31, 64), (16, 31, 64)]


def test_fsdp2(fork):
    """Two ranks with sharded parameters. tests/test_sharding.py compares such steps with one process's."""
    done = fork('examples/fsdp2.py', '--steps=31', ranks=2, check=True)
    found = re.findall(r'step (\d+): loss ([\d.]+), (\d+)% not clipped', done.out)
    assert [int(step) for step, *_ in found] == [0, 10, 20, 30]
    assert float(found[-1][1]) < 0.6 * float(found[0][1]) and 5 < int(found[-1][2]) < 60


def test_the_notebook(fork, monkeypatch, tmp_path):
    """Its cells in order, with few steps of a small model. It is stored without outputs."""
    notebook = json.loads((ROOT / 'examples/quickstart.ipynb').read_text(encoding='utf-8'))
    cells = [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']
    assert not any(cell['outputs'] or cell['execution_count'] for cell in cells)
    copy = copy_repository(tmp_path / 'sophia')
    shown, printed = [], []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'IPython.display', types.SimpleNamespace(Image=shown.append))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')

    def shell(command):
        words = shlex.split(string.Template(command).substitute(scope))
        if words[0] == 'python':
            printed.append(fork(copy / words[1], *words[2:], faults=elsewhere(copy), check=True).out)
        else:
            assert words[:2] in (['test', '-d'], ['pip', 'install'])

    scope = dict(shell=shell, chdir=os.chdir)
    for cell in cells:
        text = ''.join(cell['source']).replace('\\\n', ' ').replace('STEPS = 600', 'STEPS = 4')
        text = text.replace("SEEDS = '1337,1338,1339'", "SEEDS = '1337'")
        text = text.replace('=False', '=False --n_layer=1 --n_embd=32 --eval_sequences=16')
        text = re.sub(r'^!(.*)$', lambda match: f'shell({match[1]!r})', text, flags=re.M)
        exec(re.sub(r'^%cd (.*)$', lambda match: f'chdir({match[1]!r})', text, flags=re.M), scope)
    assert len(shown) == 2 and all(Path(path).is_file() for path in shown)
    assert 'T = 4: Sophia-G ends' in printed[-1]
