"""Checkpoints and logs without a run: any optimizer's state, other programs' files, damage, config.json, wandb."""

import functools
import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from operator import getitem

import numpy as np
import pytest
import torch
from conftest import ROOT, rejection

from runtime import checkpoint, files, runlog
from runtime.distributed import World
from sophia import Sophia

# ----------------------------------------------------------------------------------------------------------------------
# Optimizers


class Toy(torch.optim.Optimizer):
    """Keeps a Python int for each parameter, a NumPy number, integers in a tensor, and a counter in its group."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr, k=0, train_mode=False, betas=(0.5, 0.5)))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group['k'] += 1
            group['train_mode'] = True
            for p in group['params']:
                state = self.state[p]
                state['step'] = state.get('step', 0) + 1
                state['numpy'] = np.float64(state['step'] / 3)
                state['seen'] = state.get('seen', torch.tensor([2 ** 40, 0])) + state['step']
                state['pair'] = (state['step'], [p.detach() * 0.5, None])
                count = state['step'] + group['k'] + state['numpy'] + int(state['seen'][1]) + group['train_mode']
                p.sub_(p.grad + state['pair'][1][0], alpha=group['lr'] / count)


def pytorch_optimizer(name, **kwargs):
    return lambda params, lr: pytest.importorskip('pytorch_optimizer').load_optimizer(name)(params, lr=lr, **kwargs)


OPTIMIZERS = dict(
    adamw=torch.optim.AdamW, adafactor=torch.optim.Adafactor, sophia=Sophia, toy=Toy,
    soap=pytorch_optimizer('soap', precondition_frequency=2), prodigy=pytorch_optimizer('prodigy'))


def equal(a, b):
    """Whether nested containers of tensors and plain values are the same, types included."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


def made(name, lr=0.05):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3, bias=False))
    return model, OPTIMIZERS[name](model.parameters(), lr=lr)


def trained(model, optimizer, iterations):
    for i in iterations:
        generator = torch.Generator().manual_seed(i)
        optimizer.zero_grad()
        x, y = (torch.randn(8, n, generator=generator) for n in (5, 3))
        (model(x) - y).square().mean().backward()
        if isinstance(optimizer, Sophia) and i % 3 == 0:
            optimizer.update_hessian(p.grad.square() for p in model.parameters())
        optimizer.step()


def saved(out_dir, model, optimizer, iteration, **more):
    return checkpoint.save_run(World('cpu', 'gloo'), out_dir, model, optimizer, dict(
        model_args={}, iter_num=iteration, best_val_loss=1.0, config={}, scaler={}, **more))


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_a_resumed_optimizer_is_the_same_bit_for_bit(tmp_path, name):
    model, optimizer = made(name)
    trained(model, optimizer, range(6))
    path, state = checkpoint.load(saved(tmp_path, model, optimizer, 6))
    again, its = made(name)
    checkpoint.restore(path, state, again, its, None)
    trained(model, optimizer, range(6, 12))
    trained(again, its, range(6, 12))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))
    ours, theirs = its.state_dict(), optimizer.state_dict()
    assert equal(ours['state'], theirs['state'])
    for group, expected in zip(ours['param_groups'], theirs['param_groups'], strict=True):
        assert equal({key: group[key] for key in expected}, expected)  # load_state_dict may add settings
    if name == 'toy':
        assert its.state[again[0].weight]['seen'].dtype == torch.int64 and its.param_groups[0]['k'] == 12


def test_what_the_command_line_sets_is_not_restored(tmp_path):
    model, optimizer = made('adamw')
    trained(model, optimizer, range(3))
    path, state = checkpoint.load(saved(tmp_path, model, optimizer, 3))
    state['config'] = dict(weight_decay=0.01, eps=1e-8)
    again = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.1, 0.2), eps=1e-3, weight_decay=0.3)
    checkpoint.restore(path, state, model, again, None)
    group = again.param_groups[0]
    assert (group['lr'], group['betas'], group['eps'], group['weight_decay']) == (0.5, (0.1, 0.2), 1e-3, 0.3)
    assert again.state[model[0].weight]['step'] == 3


@pytest.mark.parametrize('key, value, words', [
    ('exp_avg', torch.zeros(2), 'exp_avg of parameter 0 has the shape (2,) and is torch.float32'),
    ('exp_avg', torch.zeros(6, 5, dtype=torch.int8), 'exp_avg of parameter 0 has the shape (6, 5) and is torch.int8'),
    ('exp_avg_sq', 'text', "exp_avg_sq of parameter 0 is 'text'"), ('step', {}, 'step of parameter 0 is {}'),
    ('exp_avg_sq', None, 'exp_avg_sq of parameter 0 is missing')])
def test_a_state_that_no_step_can_use_is_rejected(tmp_path, key, value, words):
    model, optimizer = made('adamw')
    trained(model, optimizer, range(3))
    path, state = checkpoint.load(saved(tmp_path, model, optimizer, 3))
    if value is None:
        del state['optimizer']['state'][0][key]
    else:
        state['optimizer']['state'][0][key] = value
    assert words in rejection(checkpoint.restore, path, state, model, optimizer, None)


def test_a_param_group_of_another_kind_is_rejected(tmp_path):
    model, optimizer = made('toy')
    trained(model, optimizer, range(3))
    path, state = checkpoint.load(saved(tmp_path, model, optimizer, 3))
    state['optimizer']['param_groups'][0]['k'] = [3]
    assert 'k of a param group is [3]' in rejection(checkpoint.restore, path, state, model, optimizer, None)


def test_a_state_that_no_checkpoint_can_hold_is_rejected_before_anything_is_written(tmp_path):
    model, optimizer = made('toy')
    trained(model, optimizer, range(1))
    optimizer.state[model[2].weight]['history'] = {1, 2}
    message = rejection(saved, tmp_path, model, optimizer, 1)
    assert 'Toy: its state cannot be saved (optimizer.state.2.history is of type set)' in message
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------------------
# Foreign and damaged files


MODEL_ARGS = dict(n_layer=1, n_head=1, n_embd=4, block_size=8, vocab_size=16, bias=False, dropout=0.0)
RUN = dict(config=dict(dataset='here', optimizer_name='adamw', learning_rate=0.1), data=dict(train=[1], val=[2]),
           tokenizer=dict(tokenizer='byte'), changes=[dict(iter=1)], train_state=dict(
               iter=3, tokens=96, seconds=1.5, clipped=0, skipped_in_a_row=0, best_val_loss=float('inf'),
               last_eval_iter=3, latest_losses=[4.0]))


@pytest.fixture
def good(tmp_path):
    """(path, state) of a checkpoint of a tiny model."""
    model, optimizer = made('adamw')
    trained(model, optimizer, range(3))
    (tmp_path / 'good').mkdir()
    return checkpoint.load(checkpoint.save(tmp_path / 'good', dict(
        model=model.state_dict(), optimizer=optimizer.state_dict(), model_args=MODEL_ARGS, iter_num=3, scaler={},
        best_val_loss=2.0, **RUN)))


def resumed(path):
    """All that is done with a checkpoint at resume."""
    path, state = checkpoint.load(path)
    model, optimizer = made('adamw')
    checkpoint.compare(path, state, RUN['config'], MODEL_ARGS, RUN['data'])
    checkpoint.restore(path, state, model, optimizer, torch.amp.GradScaler('cpu', enabled=False))
    trained(model, optimizer, range(1))
    return state


WRONG = (None, [], {}, 'text', -1, 2.5, {'x': 1}, [[1]], True, {1: 2}, float('nan'), torch.ones(2))


@pytest.mark.parametrize('field', [
    'model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config', 'scaler', 'data', 'tokenizer', 'changes',
    'train_state', 'train_state.tokens', 'train_state.seconds', 'train_state.latest_losses', 'model.0.weight',
    'config.dataset', 'config.optimizer_name', 'config.learning_rate', 'changes.0', 'train_state.latest_losses.0',
    'optimizer.state', 'optimizer.param_groups',
    'tokenizer.tokenizer', 'model_args.n_layer', 'model_args.n_head', 'model_args.n_embd', 'model_args.vocab_size',
    'model_args.dropout'])
def test_a_broken_field_is_one_line(good, tmp_path, field):
    """Whatever it holds: the run resumes, or says why not."""
    assert resumed(good[0])['iter_num'] == 3
    path, rejected = tmp_path / 'ckpt_00000003.pt', 0
    *outer, key = ['model', '0.weight'] if field == 'model.0.weight' else field.split('.')
    for value in WRONG:
        state = torch.load(good[0], weights_only=True)
        functools.reduce(getitem, outer, state)[int(key) if key == '0' else key] = value
        torch.save(state, path)
        try:
            resumed(path)
        except SystemExit as error:
            assert str(error).startswith(f'{path}: ') and '\n' not in str(error)
            rejected += 1
    assert rejected > len(WRONG) / 2


@pytest.mark.parametrize(
    'key', ['model', 'model_args', 'iter_num', 'config', 'optimizer', 'train_state', 'scaler', 'data'])
def test_a_missing_field_is_one_line(good, key):
    state = torch.load(good[0], weights_only=True)
    del state[key]
    torch.save(state, good[0])
    assert str(good[0]) in rejection(resumed, good[0])


def test_no_flipped_bit_loads_silently(good):
    """A bit of padding or of a date may flip without harm; what loads is what was saved."""
    path, data = good[0], good[0].read_bytes()
    intact = torch.load(path, weights_only=True)
    rejected = 0
    for bit in np.random.default_rng(0).integers(0, 8 * len(data), 1000).tolist():
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            loaded = checkpoint.load(path)[1]
        except SystemExit:
            rejected += 1
            continue
        assert equal(loaded, intact)
    assert rejected > 300


def rezipped(path, compression):
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, 'w', compression) as new:
        for name, content in members.items():
            new.writestr(name, content)


def test_a_compressed_file_is_rejected(good):
    """Its checksums fit, and mapped into memory it would be other numbers."""
    rezipped(good[0], zipfile.ZIP_DEFLATED)
    assert 'it was compressed' in rejection(checkpoint.load, good[0])


def test_work_is_bounded_before_it_is_done(good, tmp_path, monkeypatch):
    path = tmp_path / 'ckpt_00000009.pt'
    os.mkfifo(path)
    assert 'no regular file' in rejection(checkpoint.load, path)
    path.unlink()
    monkeypatch.setattr(zipfile.ZipFile, 'testzip', lambda self: pytest.fail('read'))
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('archive/data.pkl', bytes(2 ** 24))
    assert 'it was compressed' in rejection(checkpoint.load, path)
    with zipfile.ZipFile(path, 'w') as archive:  # many members that are one and the same
        archive.writestr('archive/data/0', bytes(2 ** 16))
        archive.filelist *= 100
    assert 'does not fit its checksums' in rejection(checkpoint.load, path)


@pytest.mark.parametrize('asked', [
    dict(n_layer=10 ** 7), dict(n_layer=5000, n_embd=400), dict(vocab_size=10 ** 7), dict(n_head=3), dict(n_embd=True),
    dict(dropout='0'), dict(rope=[1])])
def test_models_that_no_file_can_mean_are_rejected(asked):
    weights = {'w': torch.ones(1000)}
    checkpoint.check_model_args(MODEL_ARGS, weights)
    checkpoint.check_model_args(dict(MODEL_ARGS, rope=True, n_layer=48, n_embd=1600, n_head=25, vocab_size=50257))
    with pytest.raises(ValueError, match=f'its {next(iter(asked))} is|its n_embd is 4, which|far larger model'):
        checkpoint.check_model_args({**MODEL_ARGS, **asked}, weights)


@pytest.mark.parametrize('prefix', ['', '_orig_mod.', 'module.', '_orig_mod.module.', 'module._orig_mod.'])
def test_weights_of_the_official_repository_get_our_names(good, prefix):
    """With the buffers that its attention always saves, and the prefixes of torch.compile and DDP."""
    ours = {'transformer.h.0.attn.c_attn.weight': torch.ones(12, 4), 'transformer.h.0.attn.c_attn.bias': torch.ones(12),
            'lm_head.weight': torch.ones(16, 4)}
    buffers = {'transformer.h.0.attn.bias': torch.ones(1, 1, 8, 8), 'transformer.h.0.attn.masked_bias': torch.ones(())}
    state = torch.load(good[0], weights_only=True)
    state['model'] = {f'{prefix}{name}': weight for name, weight in {**ours, **buffers}.items()}
    torch.save(state, good[0])
    assert checkpoint.load(good[0])[1]['model'].keys() == ours.keys()


def test_a_file_whose_name_says_another_iteration_is_skipped(good, capsys):
    out_dir = good[0].parent
    (out_dir / 'ckpt_00000099.pt').write_bytes(good[0].read_bytes())
    (out_dir / 'ckpt_99.pt').write_bytes(good[0].read_bytes())
    path, state = checkpoint.open_run(World('cpu', 'gloo'), out_dir, 'auto')
    assert path == good[0] and 'ckpt_00000099.pt: holds iteration 3' in capsys.readouterr().err


@pytest.mark.parametrize('init_from', ['auto', 'resume'])
def test_what_to_do_with_nanogpts_checkpoint(good, tmp_path, init_from):
    (tmp_path / 'ckpt.pt').write_bytes(good[0].read_bytes())
    message = rejection(checkpoint.open_run, World('cpu', 'gloo'), tmp_path, init_from)
    assert 'ckpt.pt: a checkpoint of nanoGPT' in message and 'scripts/export_hf.py' in message
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ['ckpt.pt']


def test_a_checkpoint_with_the_keys_of_before_resumes(good):
    state = torch.load(good[0], weights_only=True)
    before = state.pop('train_state')
    del before['iter'], state['changes']
    before['passed_over'], before['evaluated'] = before.pop('skipped_in_a_row'), before.pop('last_eval_iter')
    torch.save({**before, **state}, good[0])
    assert resumed(good[0])['train_state'] == dict(RUN['train_state'], best_val_loss=2.0)


# ----------------------------------------------------------------------------------------------------------------------
# The best checkpoint, and changed settings


def test_the_best_is_repaired_after_a_kill_between_its_two_names(tmp_path, monkeypatch):
    state = dict(model={}, model_args={}, config={})
    checkpoint.save(tmp_path, dict(state, iter_num=1, best_val_loss=3.0), best=True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, 'link_best', lambda path: sys.exit('killed'))
        with pytest.raises(SystemExit):
            checkpoint.save(tmp_path, dict(state, iter_num=2, best_val_loss=2.0), best=True)
    assert checkpoint.load(tmp_path / 'best.pt')[1]['iter_num'] == 1
    for read_only, best in ((True, 1), (False, 2)):
        path, _ = checkpoint.open_run(World('cpu', 'gloo'), tmp_path, 'auto', read_only)
        assert path.name == 'ckpt_00000002.pt' and checkpoint.load(tmp_path / 'best.pt')[1]['iter_num'] == best
    checkpoint.LOCKS.pop().close()
    checkpoint.save(tmp_path, dict(state, iter_num=3, best_val_loss=1.0), best=True)
    (tmp_path / 'ckpt_00000003.pt').unlink()
    checkpoint.open_run(World('cpu', 'gloo'), tmp_path, 'auto')
    assert checkpoint.load(tmp_path / 'best.pt')[1]['iter_num'] == 3, 'a better one stays'
    checkpoint.LOCKS.pop().close()


def test_the_best_of_a_copied_run_is_replaced(tmp_path):
    """A copy without links has a directory where the original has the link `best`."""
    shards = tmp_path / 'ckpt_00000001'
    for directory in (shards, tmp_path / 'best'):
        directory.mkdir()
        (directory / 'state.json').touch()
    checkpoint.link_best(shards)
    assert (tmp_path / 'best').is_symlink() and checkpoint.path_of(tmp_path, checkpoint.BEST).resolve() == shards
    (tmp_path / 'best').unlink()
    (tmp_path / 'best').mkdir()
    checkpoint.save(tmp_path, dict(model={}, model_args={}, config={}, iter_num=2), best=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['best.pt', 'ckpt_00000001', 'ckpt_00000002.pt']


def test_changes_are_recorded_with_their_iteration(good):
    path, state = good
    config = dict(RUN['config'], learning_rate=0.2, dataset='moved', log_interval=3)
    lines, changes = checkpoint.compare(path, state, config, MODEL_ARGS, RUN['data'])
    first = {'iter': 3, 'key': 'learning_rate', 'from': 0.1, 'to': 0.2}
    assert lines == ["dataset = 'moved', was 'here'", 'learning_rate = 0.2, was 0.1']
    assert changes == [{'iter': 1}, first]
    later = dict(state, config=config, iter_num=7, changes=changes)
    assert checkpoint.compare(path, later, config, MODEL_ARGS, RUN['data']) == ([], changes)
    _, changes = checkpoint.compare(path, later, config, MODEL_ARGS, dict(RUN['data'], val=[3]), True)
    assert changes[1:] == [first, {'iter': 7, 'key': 'data val', 'from': [2], 'to': [3]}]


def test_a_model_setting_that_a_checkpoint_lacks_has_its_default(good):
    path, state = good
    args = dict(MODEL_ARGS, rope=False)
    assert 'another rope' in rejection(checkpoint.compare, path, state, RUN['config'], args, RUN['data'])
    defaults = dict(rope=False, bias=True)
    assert checkpoint.compare(path, state, RUN['config'], args, RUN['data'], defaults=defaults)[0] == []
    assert 'another rope' in rejection(
        lambda: checkpoint.compare(path, state, RUN['config'], dict(args, rope=True), RUN['data'], defaults=defaults))


# ----------------------------------------------------------------------------------------------------------------------
# Files and logs


def test_an_atomic_write_that_fails_changes_nothing(tmp_path):
    path = tmp_path / 'a.txt'
    files.write_text(path, 'first')
    with pytest.raises(KeyError), files.atomic_write(path, 'w') as f:
        f.write('half')
        raise KeyError
    assert path.read_text() == 'first' and list(tmp_path.iterdir()) == [path]
    assert 'cannot be written (No such file' in rejection(files.write_text, tmp_path / 'none' / 'a.txt', '')
    files.write_json(path, {'a': [1]})
    assert json.loads(path.read_text()) == {'a': [1]}


def test_files_needs_no_torch():
    code = 'import sys, runtime.files; sys.exit("torch" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0


def test_the_machine_is_described(tmp_path):
    import pytorch_optimizer  # noqa: F401 - the version of an optimizer's library is part of a run
    runlog.describe_run(tmp_path, {'lr': 1}, {'lr': 'flag'}, changes=[1])
    found = json.loads((tmp_path / 'config.json').read_text())
    assert found['config'] == {'lr': 1} and found['provenance'] == {'lr': 'flag'} and found['changes'] == [1]
    assert found['versions']['pytorch_optimizer'] == metadata.version('pytorch_optimizer')
    assert found['machine'] == runlog.machine() and found['machine']['cpu'] and found['machine']['cores'] > 0
    assert found['git_commit'] == files.git_commit()


def test_the_commit_says_whether_code_was_changed(tmp_path):
    def git(*words):
        subprocess.run(['git', '-c', 'user.name=x', '-c', 'user.email=x', *words], cwd=tmp_path, check=True,
                       capture_output=True)

    def commit():
        return subprocess.run([sys.executable, '-c', 'from runtime.files import git_commit; print(git_commit())'],
                              cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / 'runtime').mkdir()
    code = tmp_path / 'runtime' / 'files.py'
    code.write_text((ROOT / 'runtime/files.py').read_text(encoding='utf-8'), encoding='utf-8')
    git('init')
    assert commit() == 'None'
    git('add', 'runtime')
    git('commit', '-m', 'x')
    clean = commit()
    (tmp_path / 'my_config.py').write_text('max_iters = 10')
    assert len(clean) == 40 and commit() == clean
    with code.open('a') as f:
        f.write('# changed')
    assert commit() == clean + '+'
