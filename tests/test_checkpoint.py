"""Checkpoints without a run: any optimizer's state, other programs' files, damage, retention, recorded changes."""

import contextlib
import errno
import json
import os
import pickle
import stat
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import iterations, rejection

import train
from lifecycle import guards, resume
from runtime import checkpoint, files, optimizer_state, runlog
from runtime.distributed import World
from runtime.optimizer_state import first_difference
from runtime.rng import seed_all
from runtime.signals import undo_at_end
from sophia import Sophia


class Toy(torch.optim.Optimizer):
    """An optimizer with Python's and NumPy's numbers, integers in a tensor and containers in its state, and a counter
    and a list in its groups."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr, k=0, train_mode=False, betas=[0.5, 0.5]))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group['k'] += 1
            group['betas'][0] *= 0.9
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
    def build(params, lr):
        library = pytest.importorskip('pytorch_optimizer')
        return getattr(library, name)(params, lr=lr, **kwargs)
    return build


# These have state under keys of their own (StableSPAM), of other shapes and types than the parameter (AdaFactor, SOAP),
# a group entry named like a setting (AvaGrad), a dict (AggMo), lists and a dtype (Kron), an enum (SCION).
OPTIMIZERS = dict(adamw=torch.optim.AdamW, sophia=Sophia, toy=Toy) | {
    name: pytorch_optimizer(name) for name in ('StableSPAM', 'AdaFactor', 'AvaGrad', 'AggMo', 'Kron', 'SCION')} | {
    'SOAP': pytorch_optimizer('SOAP', precondition_frequency=2)}
WORLD = World('cpu', 'gloo')


def built(name, params):
    build = OPTIMIZERS[name] if isinstance(name, str) else name
    optimizer = build(params, lr=0.05)
    optimizer_state.record_construction(optimizer)
    return optimizer


def made(name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3, bias=False))
    return model, built(name, model.parameters())


def trained(model, optimizer, iterations):
    for i in iterations:
        generator = torch.Generator().manual_seed(i)
        seed_all(i)  # as train_step does, because Kron draws from NumPy's generator
        optimizer.zero_grad()
        x, y = (torch.randn(8, n, generator=generator) for n in (5, 3))
        (model(x) - y).square().mean().backward()
        if isinstance(optimizer, Sophia) and i % 3 == 0:
            optimizer.update_hessian(p.grad.square() for p in model.parameters())
        optimizer.step()


def saved(out_dir, model, optimizer, iteration, train_state=None, **kwargs):
    return checkpoint.save_run(WORLD, out_dir, model, optimizer, dict(
        model_args={}, iter_num=iteration, best_val_loss=1.0, config={}, scaler={}, train_state=train_state or {}),
        **kwargs)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_a_resumed_optimizer_is_the_same_bit_for_bit(tmp_path, name):
    model, optimizer = made(name)
    trained(model, optimizer, range(1))
    guards.check_round_trip(WORLD, model, optimizer, built(name, model.parameters()))
    trained(model, optimizer, range(1, 6))
    path, state = checkpoint.load_checkpoint(saved(tmp_path, model, optimizer, 6, dict(ema=np.float64(0.5))))
    assert state['train_state'] == dict(ema=0.5)  # a plain number, because load_pt rejects NumPy's numbers
    again, its = made(name)
    checkpoint.load_tensors(path, state, again, its, None)
    trained(model, optimizer, range(6, 12))
    trained(again, its, range(6, 12))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))
    ours, theirs = its.state_dict(), optimizer.state_dict()
    for group in ours['param_groups'] + theirs['param_groups']:
        group.pop('differentiable', None)  # PyTorch adds it at a resume.
    assert not first_difference(ours, theirs)


def test_tensors_of_another_dtype_or_shape_differ():
    one = torch.tensor([1.0, float('nan')])
    assert not first_difference([one, float('nan')], [one.clone(), float('nan')])
    for other in one.double(), one[None], one[:1], one.nan_to_num():
        assert first_difference(dict(a=[one]), dict(a=[other]), 'x') == 'x.a.0 differs'
    assert first_difference(dict(a=1), dict(a=1, b=2), 'x') == 'x.b is missing'
    assert first_difference(dict(a=[]), dict(a={}), 'x') == 'x.a differs'
    assert first_difference(float('nan'), 1.0, 'x') == 'x differs'


def test_values_of_groups_are_restored_as_saved_unless_they_are_built_otherwise(tmp_path):
    """This includes values that the optimizer or the loop has adapted."""
    model, optimizer = made('sophia')
    optimizer.param_groups[0].update(gamma=0.3, eps=1e-3, counter=3)
    trained(model, optimizer, range(3))
    path, state = checkpoint.load_checkpoint(saved(tmp_path, model, optimizer, 3))

    again = Sophia(model.parameters(), lr=0.05, eps=1e-5, weight_decay=0.7)
    again.param_groups[0]['lr_scale'] = 0.5
    optimizer_state.record_construction(again)
    again.param_groups[0]['betas'] = 0.1, 0.1  # not what it was built with
    checkpoint.load_tensors(path, state, model, again, None)
    group, = again.param_groups
    assert [group[key] for key in ('gamma', 'eps', 'weight_decay', 'lr_scale', 'counter', 'betas')] == [
        0.3, 1e-5, 0.7, 0.5, 3, (0.96, 0.99)]


def test_state_goes_to_the_parameter_of_its_name(tmp_path):
    """Order and groups may differ, names and shapes may not."""
    model, optimizer = made('adamw')
    trained(model, optimizer, range(3))
    path, state = checkpoint.load_checkpoint(saved(tmp_path, model, optimizer, 3))
    weight, bias, last = model.parameters()

    def restored(*groups, state=state):
        other = built(torch.optim.AdamW, [dict(params=list(params)) for params in groups])
        checkpoint.load_tensors(path, state, model, other, None)
        for name, p in model.named_parameters():
            loaded, mapped = other.state[p]['exp_avg'], state['optimizer']['state'][name]['exp_avg']
            assert torch.equal(loaded, optimizer.state[p]['exp_avg'])
            assert loaded.data_ptr() != mapped.data_ptr()  # The latter keeps the file's disk space taken.

    restored([last, bias, weight])
    restored([last], [bias, weight])
    with pytest.raises(ValueError, match=r"are not the checkpoint's \(shapes.2.weight.0 is missing\)"):
        restored([weight, bias])
    state['optimizer']['shapes']['0.bias'] = (7,)
    with pytest.raises(ValueError, match=r'\(shapes.0.bias.0 differs\)'):
        restored(model.parameters())
    two = built(torch.optim.AdamW, [dict(params=[weight, bias]), dict(params=[last])])
    path, state = checkpoint.load_checkpoint(saved(tmp_path, model, two, 4))
    with pytest.raises(ValueError, match='2.weight and 0.weight were in different param groups'):
        restored([last, bias, weight], state=state)


def test_what_no_checkpoint_can_hold_is_rejected_before_anything_is_written(tmp_path):
    model, optimizer = made('toy')
    trained(model, optimizer, range(1))
    with pytest.raises(TypeError, match=r'TrainState.ema.a.1 is of type set'):
        saved(tmp_path, model, optimizer, 1, dict(iter=1, ema=dict(a=[1.0, {2.0}])))
    optimizer.state[model[2].weight]['history'] = {1, 2}
    words = 'Toy: its state cannot be saved (optimizer.state.2.weight.history is of type set'
    assert f'{words}); keep plain numbers and tensors there' == rejection(saved, tmp_path, model, optimizer, 1)
    assert words in rejection(guards.check_round_trip, WORLD, model, optimizer, built('toy', model.parameters()))
    assert not list(tmp_path.iterdir())
    message = rejection(optimizer_state.to_save, optimizer, checkpoint.parameter_names(model), True)
    assert 'optimizer.state.0.weight.seen is a tensor that each rank has for itself' in message
    assert message.endswith(', or use --parallel=ddp')
    optimizer.state.clear()
    optimizer.state[model[0].bias]['step'] = torch.tensor(3.0)  # the same on every rank
    state, _ = optimizer_state.to_save(optimizer, checkpoint.parameter_names(model), True)
    assert state['state']['0.bias']['step'] == 3


@pytest.fixture
def good(tmp_path):
    """Return the path of a checkpoint of a tiny model, in a directory of its own."""
    model, optimizer = made('adamw')
    trained(model, optimizer, range(3))
    (tmp_path / 'good').mkdir()
    return saved(tmp_path / 'good', model, optimizer, 3)


class Exploit:
    """An object whose unpickling makes a directory."""

    def __reduce__(self):
        return os.mkdir, ('exploited',)


def test_damaged_and_foreign_files_are_rejected(good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, bad, rng = good.read_bytes(), tmp_path / 'ckpt_00000009.pt', np.random.default_rng(0)
    intact = torch.load(good, weights_only=True)
    for missing in bad, tmp_path / 'best.pt':
        assert 'No such file or directory' in rejection(checkpoint.load_checkpoint, missing)
    for size in 0, 1000, len(data) - 1:
        bad.write_bytes(data[:size])
        assert str(bad) in rejection(checkpoint.load_checkpoint, bad)
    for bit in rng.integers(0, 8 * len(data), 30).tolist():
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        bad.write_bytes(damaged)
        try:
            loaded = checkpoint.load_checkpoint(bad)[1]
        except SystemExit:
            continue
        assert not first_difference(loaded, intact), 'only bits of padding or of a date may flip without harm'
    for wrong in [1], {key: value for key, value in intact.items() if key != 'model_args'}:
        torch.save(wrong, bad)
        assert 'not a checkpoint of this repository (it has no mod' in rejection(checkpoint.load_checkpoint, bad)
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(bad, 'w', zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, pickle.dumps(Exploit()) if name.endswith('data.pkl') else old.read(name))
    assert 'could run code' in rejection(checkpoint.load_checkpoint, bad) and not (tmp_path / 'exploited').exists()


def test_the_newest_readable_checkpoint_is_loaded(good, capsys):
    out_dir = good.parent
    (out_dir / 'ckpt_00000009.pt').write_bytes(good.read_bytes()[:-1])
    path, _ = checkpoint.open_run(WORLD, out_dir, may_resume=True, read_only=True)
    assert checkpoint.load_checkpoint(out_dir)[0] == path == good
    assert 'ckpt_00000009.pt: not a checkpoint' in capsys.readouterr().err
    good.write_bytes(b'')
    assert 'ckpt_00000009.pt: not a checkpoint' in rejection(checkpoint.load_checkpoint, out_dir)
    assert not capsys.readouterr().err


def test_one_run_at_a_time_has_an_out_dir_and_none_overwrites_another(good):
    def opened(**kwargs):
        return checkpoint.open_run(WORLD, good.parent, **kwargs)

    with undo_at_end():
        assert 'holds checkpoints, which a new run would overwrite' in rejection(opened)
    for _ in range(2):
        with undo_at_end():
            assert opened(may_resume=True)[0] == opened(must_resume=True, read_only=True)[0] == good
            assert f'good: process {os.getpid()} on' in rejection(lambda: opened(may_resume=True))
    assert opened(read_only=True) == (None, None)
    good.unlink()
    with undo_at_end():
        assert 'has no checkpoint; name the --out_dir of a run' in rejection(lambda: opened(must_resume=True))
    log = good.with_name('metrics.jsonl')
    log.write_text('{"iter": 0, "val/loss": 5.5}\n{"iter": 5, "train/loss": 4.5}\n')  # of a run that has just begun
    with undo_at_end():
        assert opened() == (None, None)
    log.write_text(log.read_text() + '{"iter": 10, "val/loss": 3.5}\n')
    with undo_at_end():
        assert 'holds the metrics of a run without checkpoints' in rejection(opened)
    with undo_at_end():
        assert opened(may_resume=True) == (None, None)


def test_an_out_dir_that_the_machines_do_not_share_is_rejected(good):
    rank = SimpleNamespace(is_master=False, rank=1, sharded=True, exit_together=contextlib.nullcontext,
                           from_master=lambda _: 3)
    assert 'rank 1 does not see what rank 0 has written' in rejection(checkpoint.open_run, rank, good.parent)
    (good.parent / 'lock').touch()
    assert checkpoint.open_run(rank, good.parent)[0] == good


def test_retention(tmp_path):
    model, optimizer = made('adamw')
    for i in 1, 2, 3, 12:
        saved(tmp_path, model, optimizer, i, best=i == 1)
    assert iterations(tmp_path) == [12, 3, 1]
    assert 'No such file' in rejection(checkpoint.load_checkpoint, tmp_path / 'ckpt_00000002.pt')  # not the best one
    assert checkpoint.load_checkpoint(tmp_path / 'best.pt')[1]['iter_num'] == 1
    assert all(map(checkpoint.exists, [tmp_path, *checkpoint.checkpoints(tmp_path), tmp_path / 'best.pt']))
    # A newer checkpoint, damaged and skipped at a resume, does not count as kept.
    saved(tmp_path, model, optimizer, 4, best=True)
    assert iterations(tmp_path) == [12, 4, 3]
    assert checkpoint.load_checkpoint(tmp_path / 'best.pt')[1]['iter_num'] == 4


def test_files_left_by_a_kill_are_removed_and_other_programs_files_stay(tmp_path):
    theirs = [tmp_path / name for name in ('best', 'video.partial', 'ckpt_best.partial', 'ckpt_1234567.partial')]
    ours = [tmp_path / name for name in ('ckpt_00000009.partial', 'ckpt_00000009.pt.host-1.5.partial')]
    for path in (*theirs, *ours):
        path.mkdir()
    (theirs[-1] / 'state.pt').touch()
    with undo_at_end():
        checkpoint.open_run(WORLD, tmp_path, may_resume=True)
    assert all(path.exists() for path in theirs) and not any(path.exists() for path in ours)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """It is saved, too, where directories cannot be synced, as on some network file systems."""
    synced, fsync, opened = [], os.fsync, len([*os.scandir('/dev/fd')])

    def seen(fd):
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        synced.append((is_directory, sorted(p.suffix for p in tmp_path.iterdir())))
        if is_directory:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        assert os.fstat(fd).st_size  # It is not in Python's buffer.
        fsync(fd)

    monkeypatch.setattr(os, 'fsync', seen)
    assert saved(tmp_path, *made('adamw'), 3, best=True) and len([*os.scandir('/dev/fd')]) <= opened
    assert synced == [(False, ['.partial']), (True, ['.pt']), (False, ['.partial', '.pt'])]


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, capsys):
    def failing(*args):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(files.fcntl, 'flock', failing)
    with undo_at_end():
        assert checkpoint.open_run(WORLD, tmp_path) == (None, None)
    warning = f'warning: {tmp_path}: the file system has no locks (No locks available); make sure'
    assert capsys.readouterr().err.startswith(warning)


def test_changes_are_recorded_with_their_iteration(tmp_path):
    path, data = tmp_path / 'ckpt_00000003.pt', dict(train=[1], val=[2])
    before = train.resolve(['--dataset=here', '--grad_clip=0.1']).values
    state = dict(config=before, data=data, iter_num=3, changes=[dict(iter=1)], train_state={}, optimizer={}, scaler={})
    flags = ['--dataset=moved', '--grad_clip=0.2', '--log_interval=3']
    c = train.resolve(flags)
    rate = train.learning_rate_at
    lines, changes = resume.compare(path, state, c, data, rate)
    first = {'iter': 3, 'key': 'grad_clip', 'from': 0.1, 'to': 0.2}
    assert lines == ['log_interval = 3, was 10', "dataset = 'moved', was 'here'", 'grad_clip = 0.2, was 0.1']
    assert changes == [{'iter': 1}, first]
    later = dict(state, config=c.values, iter_num=7, changes=changes)
    assert resume.compare(path, later, c, data, rate) == ([], changes)
    assert 'was not trained on' in rejection(resume.compare, path, later, c, dict(data, val=[3]), rate)
    asked = train.resolve([*flags, '--ignore_data_change=True'])
    _, changes = resume.compare(path, later, asked, dict(data, val=[3]), rate)
    assert changes[1:] == [first, {'iter': 7, 'key': 'data val', 'from': [2], 'to': [3]}]


WSD = ['--schedule=wsd', '--cooldown_iters=30']


@pytest.mark.parametrize(('flags', 'before', 'iteration', 'recorded'), [
    ([], [], 20, False), ([], [], 31, True),  # The cosine has begun.
    (WSD, [], 70, False), (WSD, [], 81, True),
    (WSD, ['--max_iters=60'], 40, True),  # Under the former settings the decay had begun.
    (['--schedule=constant'], [], 90, False), ([], ['--learning_rate=1'], 10, True)])
def test_a_change_of_the_horizon_is_recorded_once_the_decay_has_begun(tmp_path, flags, before, iteration, recorded):
    data, common = dict(train=[1], val=[2]), ['--warmup_iters=20']
    saved = train.resolve([*common, *flags, '--max_iters=1000', *before]).values
    state = dict(config=saved, data=data, iter_num=iteration, train_state={}, optimizer={}, scaler={})
    c = train.resolve([*common, *flags, '--max_iters=100'])
    _, changes = resume.compare(tmp_path, state, c, data, train.learning_rate_at)
    assert ('max_iters' in {change['key'] for change in changes}) is recorded


def test_a_setting_that_the_checkpoint_lacks_had_its_default():
    before = train.resolve(['--optimizer_name=sophiag']).values
    lacks = 'hessian_parts', 'gamma', 'schedule', 'grad_clip'
    config = {key: value for key, value in before.items() if key not in lacks}
    state = dict(config=config, data={}, iter_num=4, train_state={}, optimizer={}, scaler={})
    for flags, changes in ([], []), (['--grad_clip=2'], [{'iter': 4, 'key': 'grad_clip', 'from': 1.0, 'to': 2.0}]):
        c = train.resolve(['--optimizer_name=sophiag', *flags])
        assert resume.compare('x', state, c, {}, train.learning_rate_at)[1] == changes


def test_metrics_jsonl_loses_torn_and_repeated_lines_at_resume(tmp_path):
    """The evaluation of the checkpoint's own iteration stays."""
    path = tmp_path / 'metrics.jsonl'
    good = b'{"iter": 4, "lr": 1}\n{"iter": 5, "val/loss": 3}\n{"iter": 5, "val/accuracy": 0.1}\n'
    path.write_bytes(good + b'{"iter": 5, "lr": 1}\n{"iter": 3, "\xff": 1}\n{"iter": 6, "l\n3\n\0\0\0\0')
    runlog.rewind_log(path, 5, 5)
    assert path.read_bytes() == good


def test_an_atomic_write_that_fails_changes_nothing(tmp_path):
    path = tmp_path / 'a.txt'
    files.write_text(path, 'first')
    with pytest.raises(KeyError), files.atomic_write(path, 'w') as f:
        f.write('half')
        raise KeyError
    assert path.read_text() == 'first' and list(tmp_path.iterdir()) == [path]
    files.write_json(path, {'a': [1]})
    assert json.loads(path.read_text()) == {'a': [1]}
    assert files.checksum(path) == 1099963461  # Checkpoints hold it.
