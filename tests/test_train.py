"""train.py: it learns, losses do not depend on how a mini-batch is split, edits take effect or end in an error."""

import functools
import json
import math
import random
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, finish, metrics, rejection, start
from torch.utils._python_dispatch import TorchDispatchMode

import model
import train as program
from analysis import runs
from analysis.runs import read_run
from data.loader import Bin
from lifecycle import resume
from runtime import checkpoint
from runtime.device import can_compile
from runtime.files import differing_files
from runtime.rng import DROPOUT, keyed_seed, seed_all
from runtime.signals import LISTENED, NOT_FINITE, STOPPED
from scripts.load import load

FLAGS = {'adamw': ['--decay_lr=False', '--grad_clip=0.85'],
         'sophiag': ['--hessian_interval=2', '--lr_decay_iters=8', '--dropout=0']}


@pytest.fixture
def main(corpus):
    """Return main(out_dir, *flags), which trains in this process, perhaps repeatedly in a directory."""
    def call(out, *flags):
        program.main([*TINY, f'--dataset={corpus}', f'--out_dir={out}', '--learning_rate=1e-2', *flags])
    return call


@pytest.mark.parametrize('owner', [lambda run: run, lambda run: run.state])
def test_an_attribute_that_a_resume_would_lose_is_an_error(main, tmp_path, monkeypatch, owner):
    monkeypatch.setattr(program, 'train_step', lambda run, *args: setattr(owner(run), 'ema_loss', 0.0))
    with pytest.raises(AttributeError, match="no attribute 'ema_loss'"):
        main(tmp_path)


def test_a_last_evaluation_that_is_not_finite_is_a_divergence(main, tmp_path, monkeypatch, capsys):
    """Earlier evaluations may be."""
    monkeypatch.setattr(program, 'evaluate', lambda *args: (math.nan, math.nan))
    with pytest.raises(SystemExit) as stopped:
        main(tmp_path)
    assert stopped.value.code == NOT_FINITE
    line = 'iteration 10: the validation loss is not finite; resume with a lower --learning_rate'
    assert capsys.readouterr().err.startswith(line) and read_run(tmp_path).failed.startswith(line)


@pytest.mark.parametrize('name', ['adamw', 'sophiag'])
def test_it_learns_and_leaves_its_records(finished, name, monkeypatch):
    out = finished(*FLAGS[name], name=name)
    losses = metrics(out)
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.25
    lines = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
    assert all({'iter', 'tokens', 'time'} <= line.keys() for line in lines)
    assert not any('val/training_loss' in line for line in lines)  # It is val/loss.
    assert [line['iter'] for line in lines if 'val/loss' in line] == [0, 5, 10]
    assert all(line['tokens'] == line['iter'] * 4 * 32 for line in lines)
    described = json.loads((out / 'config.json').read_text())
    assert described['config']['learning_rate'] == 0.01 and described['provenance']['learning_rate'] == 'flag'
    assert described['provenance']['weight_decay'] == f'optimizer {name}'
    assert (described['provenance']['gamma'] == f'not a setting of {name}') == (name == 'adamw')
    run, = runs.find_runs([out])
    extra = (name == 'sophiag') / 6  # for a backward pass on half of the mini-batch in every second step
    assert run.flops_per_token() == pytest.approx(described['flops_per_token'] * (1 + extra))
    assert {'command', 'versions', 'git_commit', 'data'} <= described.keys() and ':' not in described['machine']['cpu']


def test_a_run_leaves_the_process_as_it_was(main, tmp_path, capsys):
    """This holds for finished runs, refused ones, and those that stop at their time limit."""
    def of_the_process():
        return [signal.getsignal(number) for number in LISTENED], sys.excepthook, torch.distributed.is_initialized(), [
            thread for thread in threading.enumerate() if 'loader' in thread.name and thread not in earlier]

    earlier = threading.enumerate()  # as of a run that an error has ended
    before = of_the_process()
    main(tmp_path, '--max_iters=1')
    with pytest.raises(SystemExit) as stopped:
        main(tmp_path, '--max_iters=3', '--init_from=resume', '--max_hours=1e-9')
    places = [*map(capsys.readouterr().out.index, (
        ' training tokens; ', '\nsaved ', '\ndone: lowest val loss ', '\nnext: ', '\nstopped at iteration 2 by max_'))]
    assert stopped.value.code == STOPPED and places == sorted(places)
    assert rejection(main, tmp_path / 'new', '--max_hours=1e-9') == str(STOPPED)
    assert 'stopped at iteration 0 by max_hours' in capsys.readouterr().out  # in its first evaluation
    assert not checkpoint.checkpoints(tmp_path / 'new') and not metrics(tmp_path / 'new', 'val/loss')
    for _ in range(2):
        assert 'holds checkpoints' in rejection(main, tmp_path, '--parallel=fsdp')
    assert of_the_process() == before and torch.get_float32_matmul_precision() == 'highest'


def test_logged_clipping_and_speed_add_up(finished):
    adamw = finished(*FLAGS['adamw'], name='adamw')
    norms = np.array(metrics(adamw, 'grad_norm'))
    assert norms.min() < 0.85 < norms.max()
    assert metrics(adamw, 'momentum_ratio') == pytest.approx(metrics(adamw, 'momentum_norm') / norms)
    assert metrics(adamw, 'grad_clipped') == pytest.approx(np.cumsum(norms > 0.85) / np.arange(1, 11))
    tokens = [per_second * ms / 1e3
              for per_second, ms in zip(metrics(adamw, 'tokens_per_sec'), metrics(adamw, 'step_ms'))]
    assert tokens == pytest.approx([4 * 32] * 10)


def test_the_time_of_an_iteration_includes_an_update_that_a_gpu_has_not_finished(main, tmp_path, monkeypatch):
    """An update takes 10 s of a fake clock, which advances when the program waits for the device."""
    clock, waits = dict(now=0.0, owed=0.0), []

    def wait(device=None):
        waits.append(device)
        clock.update(now=clock['now'] + clock['owed'], owed=0.0)

    def owe(*args, step=torch.amp.GradScaler.step):
        clock['owed'] += 10
        step(*args)

    monkeypatch.setattr(torch.amp.GradScaler, 'step', owe)
    monkeypatch.setattr(program.devices, 'synchronize', wait)
    monkeypatch.setattr(program.time, 'perf_counter', lambda: clock['now'])
    main(tmp_path, '--max_iters=4', '--eval_interval=4', '--log_interval=2', '--optimizer_name=torch:SGD')
    assert metrics(tmp_path, 'tokens_per_sec')[-1] == pytest.approx(4 * 32 / 10)
    assert metrics(tmp_path, 'time')[-1] == 40
    assert len(metrics(tmp_path)) == len(waits) == 3 and not metrics(tmp_path, 'momentum_ratio')  # at 0, 2 and the end


@pytest.mark.parametrize('name', ['adamw', 'sophiag'])
def test_a_step_and_a_log_line_wait_for_the_device_once_each(main, tmp_path, monkeypatch, name):
    """Python would wait to read a value, or to make a tensor of a number. The first step and estimates may wait."""
    seen, found = [], dict(train_step=[], metrics_of=[])

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default):
                seen.append(func)
            return func(*args, **(kwargs or {}))

    def counted(*args, function, counts):
        seen.clear()
        with Watch():
            result = function(*args)
        counts.append(len(seen))
        return result

    monkeypatch.setattr(torch.Tensor, 'tolist', lambda tensor, tolist=torch.Tensor.tolist: (
        seen.append('tolist'), tolist(tensor))[1])
    for key, counts in found.items():
        call = functools.partial(counted, function=getattr(program, key), counts=counts)
        monkeypatch.setattr(program, key, call)
    main(tmp_path, f'--optimizer_name={name}', '--max_iters=4')
    assert found['train_step'][1:] == [1, 1, 1] and found['metrics_of'] == [1, 1, 1, 1]


MASK = """
def forward(self, idx, targets=None, forward=model.GPT.forward):
    if targets is not None:
        targets[torch.arange(idx.size(1)) < 8 * (idx[:, :1] % 5)] = -1
    return forward(self, idx, targets)
model.GPT.forward = forward
"""


@pytest.mark.parametrize('name', ['sophiag', 'sophiah'])
def test_a_mean_is_over_the_predictions_however_they_are_split(main, train, tmp_path, monkeypatch, name):
    """Only some positions count, in some sequences none. A mini-batch without any stops the run."""
    monkeypatch.setattr(model.GPT, 'forward', model.GPT.forward)
    exec(MASK, dict(torch=torch, model=model))
    flags = ['--total_batch_size=8', '--max_iters=6', '--eval_iters=1', '--weight_decay=0.1', '--dropout=0.0',
             '--hessian_interval=2', '--hessian_batch_size=6']
    for size in 8, 2:
        main(tmp_path / f'{size}', *flags, f'--optimizer_name={name}', f'--batch_size={size}')
    train(tmp_path / 'ranks', *flags, '--batch_size=1', name=name, ranks=2, faults=MASK, check=True)
    for key in 'train/loss', 'grad_norm', 'param_norm', 'hessian_norm', 'tokens':
        whole = metrics(tmp_path / '8', key)
        for other in '2', 'ranks':
            assert metrics(tmp_path / other, key) == pytest.approx(whole, rel=1e-4), (key, other)
    monkeypatch.setattr(model.GPT, 'forward', lambda self, idx, targets, forward=model.GPT.forward: (
        targets.fill_(-1), forward(self, idx, targets))[1])
    with pytest.raises(SystemExit, match=str(NOT_FINITE)):
        main(tmp_path / 'none', *flags, f'--optimizer_name={name}')
    assert all(words in read_run(tmp_path / 'none').failed for words in ('iteration 0: ', ' --skip_nonfinite=1. '))


def test_a_run_knows_the_code_that_ran_it_and_says_when_it_resumes_with_another(main, tmp_path, monkeypatch, capsys):
    main(tmp_path, '--max_iters=1')
    described = json.loads((tmp_path / 'config.json').read_text())
    assert described['code'] == checkpoint.load_checkpoint(tmp_path)[1]['code']
    main(tmp_path, '--max_iters=2', '--init_from=resume')
    assert 'the code' not in capsys.readouterr().out
    monkeypatch.setattr(resume, 'code_hashes', lambda: described['code'] | {'loss.py': 'edited'})
    for T in (3, 4, 4):
        main(tmp_path, f'--max_iters={T}', '--init_from=resume')
    said = 'changed: the code has changed since the checkpoint (loss.py)\n'
    assert capsys.readouterr().out.count(said) == 1
    about = json.loads((tmp_path / 'config.json').read_text())
    assert about['code']['loss.py'] == 'edited'
    assert [change for change in about['changes'] if change['key'] == 'code'] == [
        dict(iter=2, key='code', files=['loss.py'])]
    assert read_run(tmp_path).code_changes == ['its code was changed at iteration 2 (loss.py)']


@pytest.mark.skipif(not shutil.which('git'), reason='needs git')
def test_a_copy_has_a_commit_only_if_its_repository_tracks_it(tmp_path):
    """A source archive may be unpacked in an unrelated repository."""
    def git(*words):
        command = ['git', '-c', 'user.name=a', '-c', 'user.email=b', *words]
        return subprocess.check_output(command, cwd=tmp_path, text=True)
    copy = shutil.copy(ROOT / 'runtime/files.py', tmp_path)
    git_commit = runpy.run_path(copy)['git_commit']
    git('init', '--quiet')
    git('commit', '--quiet', '--allow-empty', '--message=first')
    assert git_commit() is None
    git('add', 'files.py')
    git('commit', '--quiet', '--message=second')
    assert git_commit() == git('rev-parse', 'HEAD').strip()


def test_code_hashes_include_files_that_git_does_not_track(tmp_path, monkeypatch):
    copy = tmp_path / 'tests/repository/runtime/files.py'  # The name of a directory above does not matter.
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / 'runtime/files.py', copy)
    more = copy.parents[1] / 'experiment/more.py'
    more.parent.mkdir()
    monkeypatch.setitem(sys.modules, 'more', SimpleNamespace(__file__=str(more)))
    code_hashes, found = runpy.run_path(copy)['code_hashes'], []
    for text in 'one = 1', 'one = 2':
        more.write_text(text)
        found.append(code_hashes())
    assert differing_files(*found) == ['experiment/more.py'] and len(found[0]['runtime/files.py']) == 12


@pytest.mark.parametrize('owner, name', [(torch.amp.GradScaler, 'step'), (program.GPT, 'forward')])
def test_draws_from_global_generators_are_the_same_in_a_resumed_run(main, tmp_path, monkeypatch, owner, name):
    """An optimizer or a forward pass in training draws from any generator."""
    drawn, original = [], getattr(owner, name)

    def drawing(*args, **kwargs):
        if owner is not program.GPT or args[0].training:
            drawn.append((torch.rand(()).item(), np.random.random(), random.random()))
        return original(*args, **kwargs)
    monkeypatch.setattr(owner, name, drawing)
    main(tmp_path / 'a', '--max_iters=3', '--dropout=0.1')
    main(tmp_path / 'b', '--max_iters=2', '--dropout=0.1', '--lr_decay_iters=3')
    main(tmp_path / 'b', '--max_iters=3', '--dropout=0.1', '--init_from=resume')
    half = len(drawn) // 2
    assert drawn[:half] == drawn[half:] and len({number for numbers in drawn for number in numbers}) == 3 * half >= 9
    seed_all(keyed_seed(1337, DROPOUT, 0))  # An update has this seed on every rank, whatever the dropout has drawn.
    assert drawn[0][0] == torch.rand(()).item()


SKIP = '''
block, calls = model.Block.forward, []
def skipping(self, x, divisor):
    calls.append(x)
    return x if len(calls) > 9 and os.environ['RANK'] == '1' and self.training else block(self, x, divisor)
model.Block.forward = skipping
'''


@pytest.mark.parametrize('faults', ['model.MLP.forward = lambda self, x: x', SKIP])
def test_replicas_that_would_wait_for_a_gradient_end(train, tmp_path, faults):
    """A parameter is unused on all ranks from the start, or on one rank later, such as an expert of a mixture."""
    done = train(tmp_path, '--eval_iters=1', ranks=2, faults=faults)
    assert done.code == 1 and 'parameters that were not used in producing loss' in done.err


def test_a_group_that_is_left_out_is_one_line(main, tmp_path, monkeypatch):
    groups = program.optimizers.parameter_groups
    monkeypatch.setattr(program.optimizers, 'parameter_groups', lambda *args: groups(*args)[:-1])
    with pytest.raises(SystemExit, match='transformer.h.0.ln_1.weight: is in no group of parameter_groups'):
        main(tmp_path)


@pytest.mark.parametrize('persistent', [True, False])
def test_a_buffer_that_a_forward_makes_is_one_line_unless_checkpoints_omit_it(main, tmp_path, monkeypatch, persistent):
    def growing(self, *args, forward=program.GPT.forward):
        self.register_buffer('cache', torch.zeros(3), persistent=persistent)
        return forward(self, *args)

    monkeypatch.setattr(program.GPT, 'forward', growing)
    if persistent:
        assert "cache: the model's state_dict has it only before or only after" in rejection(main, tmp_path)
    else:
        main(tmp_path, '--max_iters=1', '--eval_iters=1')
    assert bool(checkpoint.checkpoints(tmp_path)) != persistent


@pytest.mark.parametrize('loses', [True, False])
def test_a_state_that_a_checkpoint_would_lose_is_one_line_after_the_first_update(main, tmp_path, monkeypatch, loses):
    class Momentum(torch.optim.SGD):
        def load_state_dict(self, saved):
            super().load_state_dict(dict(saved, state={} if loses else saved['state']))

    def build(groups, s):
        return Momentum(groups, s.learning_rate, momentum=0.9)

    ended = []
    monkeypatch.setitem(program.optimizers.OPTIMIZERS, 'mine', program.optimizers.Row(build, {}, 0.1))
    monkeypatch.setattr(program, 'close_run', ended.append)
    flags = '--optimizer_name=mine', '--max_iters=2', '--eval_iters=1'
    if loses:
        message = rejection(main, tmp_path, *flags)
        assert message.startswith('Momentum: a checkpoint would not restore its state (state.state.0 is missing)')
        assert len(metrics(tmp_path, 'val/loss')) == 1 and not metrics(tmp_path)
    else:
        main(tmp_path, *flags)
        assert ended[0].rest.fresh is None  # It would hold the memory of a second state.


def test_a_term_without_targets_is_the_same_in_evaluations_of_any_batch_size(main, tmp_path, monkeypatch):
    """The last batch has one sequence."""
    def forward(self, idx, targets=None, forward=program.GPT.forward):
        logits, loss = forward(self, idx, targets)
        loss = loss + 100 * self.transformer.wte(idx).square().mean()
        return logits, loss / (targets >= 0).any()  # NaN where no target counts, as nanoGPT's

    def padded(self, batches=program.ValidationLoader.__iter__):
        yield from batches(self)
        yield torch.zeros(1, 32, dtype=torch.int64), torch.full((1, 32), -1)  # where another rank has more sequences

    monkeypatch.setattr(program.GPT, 'forward', forward)
    for size in 4, 2:
        main(tmp_path / f'{size}', '--max_iters=1', '--eval_sequences=25', f'--batch_size={size}')
        monkeypatch.setattr(program.ValidationLoader, '__iter__', padded)
    one, two = (metrics(tmp_path / f'{size}', 'val/training_loss')[0] for size in (4, 2))
    assert one == pytest.approx(two, rel=1e-6)


def test_a_module_in_evaluation_mode_stays_there():
    """A frozen teacher must train without dropout."""
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    model[0].eval()
    with program.evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in (model, *model)] == [True, False, True]


def test_draws_in_evaluations_are_the_same_after_a_resume(main, tmp_path, monkeypatch):
    drawn, evaluate = [], program.evaluate
    monkeypatch.setattr(program, 'evaluate', lambda *args: (drawn.append(torch.rand(()).item()), evaluate(*args))[1])
    main(tmp_path, '--max_iters=2', '--lr_decay_iters=3', '--eval_interval=2', '--eval_iters=1')
    main(tmp_path, '--max_iters=3', '--eval_interval=3', '--eval_iters=1', '--init_from=resume')
    assert len(drawn) == 3 and len(set(drawn)) == 1


def test_a_loss_of_other_sequences_is_forgotten_at_a_resume(main, tmp_path, monkeypatch):
    """A fork's setting may choose them. eval_iters alone changes nothing."""
    for steps, flags in enumerate([[], ['--eval_domain=a'], ['--eval_domain=a'], ['--eval_domain=b']], start=1):
        main(tmp_path, f'--max_iters={steps}', '--eval_interval=9', '--eval_sequences=2', f'--eval_iters={steps}',
             '--auto_resume=True', *flags)
        monkeypatch.setitem(program.DEFAULTS, 'eval_domain', program.setting(str, role='eval'))
    lines = runs.read_metrics(tmp_path / 'metrics.jsonl')
    assert [line['iter'] for line in lines if 'val/loss' in line] == [0, 2, 4]  # At 1 and 3 the sequences were others.


@pytest.mark.parametrize('name', ['adamw', 'sophiag', 'sophiah'])
def test_a_forward_may_change_ids_in_place(main, tmp_path, monkeypatch, name):
    """Neither the first step, whose mini-batch also builds DDP's buckets, nor an estimate sees the change."""
    def in_place(self, idx, targets=None, forward=program.GPT.forward):
        idx[idx % 4 == 1] += 1
        return forward(self, idx, targets)

    def plain(self, idx, targets=None, forward=program.GPT.forward):
        return forward(self, torch.where(idx % 4 == 1, idx + 1, idx), targets)

    losses = []
    for forward in in_place, plain:
        monkeypatch.setattr(program.GPT, 'forward', forward)
        main(tmp_path / forward.__name__, f'--optimizer_name={name}', '--max_iters=2', '--log_interval=1')
        lines = runs.read_metrics(tmp_path / forward.__name__ / 'metrics.jsonl')
        losses.append([(line.get('train/loss'), line.get('hessian_norm'), line.get('val/loss')) for line in lines])
    assert losses[0] == losses[1]


def test_random_values_that_checkpoints_omit_are_those_of_the_first_seed(main, tmp_path, monkeypatch):
    """This holds after a start from a run with another seed, after a resume with a third one, and in scripts."""
    rotations, noises = [], []

    def rotated(self, config, init=program.GPT.__init__):
        init(self, config)
        self.register_buffer('rotation', torch.randn(9), persistent=False)
        rotations.append(self.rotation)
        noises.append(torch.rand(3).tolist())  # a list has values at once

    monkeypatch.setattr(program.GPT, '__init__', rotated)
    main(tmp_path / 'a', '--max_iters=1')
    main(tmp_path / 'b', f'--init_from={tmp_path / "a"}', '--max_iters=1', '--seed=2')
    main(tmp_path / 'b', '--init_from=resume', '--max_iters=2', '--seed=3')
    load(tmp_path / 'b')
    assert len(rotations) == 4 and all(torch.equal(rotations[0], other) for other in rotations)
    assert noises == noises[:1] * 4


def test_a_further_validation_set_does_not_count_in_the_loss(main, tmp_path, monkeypatch):
    """With a Bin's default weight val/loss would be the sum of two losses, which is an error."""
    def opened(*args, open_dataset=program.open_dataset, **weight):
        data, val = open_dataset(*args)
        return data, val | dict(other=Bin(next(iter(val.values())).path.parent, 'val', **weight))

    flags = '--max_iters=1', '--eval_iters=1'
    monkeypatch.setattr(program, 'open_dataset', opened)
    assert 'sum to 2' in rejection(main, tmp_path / 'a', *flags)
    monkeypatch.setattr(program, 'open_dataset', functools.partial(opened, weight=0))
    main(tmp_path / 'b', *flags)
    assert metrics(tmp_path / 'b', 'val/loss') == metrics(tmp_path / 'b', 'val/loss/other')


@pytest.mark.gpu
def test_gpu_agrees_with_cpu(train, tmp_path):
    assert train(tmp_path / 'cpu', '--dropout=0', name='sophiag').code == 0
    for dtype, compile, slack, parallel in (
            ('float32', False, 2e-2, 'ddp'), ('bfloat16', True, 5e-2, 'ddp'), ('float16', False, 5e-2, 'ddp'),
            ('float32', False, 2e-2, 'fsdp'), ('bfloat16', True, 5e-2, 'fsdp')):
        out = tmp_path / f'{dtype}-{parallel}'
        done = finish(start(out, '--dropout=0', '--device=cuda', f'--dtype={dtype}', f'--parallel={parallel}',
                            f'--compile={compile and can_compile("cuda")}', name='sophiag'))
        assert done.code == 0, done.err
        assert metrics(out) == pytest.approx(metrics(tmp_path / 'cpu'), abs=slack)


@pytest.mark.gpu
@pytest.mark.parametrize('name, dtype, parallel', [('adamw', 'float16', 'ddp'), ('sophiag', 'bfloat16', 'fsdp')])
def test_gpu_resumes(corpus, tmp_path, name, dtype, parallel):
    """The optimizer's state, fused AdamW's counters and the loss scale come back to the device."""
    flags = ['--device=cuda', '--compile=False', f'--dtype={dtype}', f'--parallel={parallel}', '--lr_decay_iters=10']
    for out, stops in ('whole', [10]), ('parts', [5, 10]):
        for stop in stops:
            done = finish(start(tmp_path / out, *flags, f'--max_iters={stop}', '--auto_resume=True', name=name))
            assert done.code == 0, done.err
    # The order of some kernels' sums is random.
    for key, slack in {'train/loss': 1e-2, 'val/loss': 1e-2, 'momentum_norm': 0.1}.items():
        assert metrics(tmp_path / 'parts', key) == pytest.approx(metrics(tmp_path / 'whole', key), rel=slack), key
    whole, parts = (checkpoint.load_checkpoint(tmp_path / out)[1] for out in ('whole', 'parts'))
    assert whole['scaler'] == parts['scaler'] and bool(whole['scaler']) == (dtype == 'float16')


def schedule(name, **settings):
    """Return the learning rates of 101 iterations: peak 1, warm-up 10, final 0.1."""
    c = SimpleNamespace(**{**dict(schedule=name, decay_lr=True, learning_rate=1.0, min_lr=0.1, warmup_iters=10,
                                  lr_decay_iters=100, cooldown_iters=20 * (name == 'wsd')), **settings})
    return [program.learning_rate_at(c, i) for i in range(101)]


def test_shapes_of_schedules():
    found = {name: schedule(name) for name in ('cosine', 'linear', 'wsd', 'constant')}
    for lrs in found.values():
        assert lrs[:10] == [(i + 1) / 11 for i in range(10)] and lrs[10] == 1
    assert found['cosine'][10:] == [0.1 + 0.5 * (1 + math.cos(math.pi * (i / 90))) * (1.0 - 0.1) for i in range(91)]
    assert found['linear'][55] == pytest.approx(0.55) and found['linear'][100] == pytest.approx(0.1)
    assert set(found['wsd'][10:81]) == {1.0} and found['wsd'][81] < 1
    assert found['wsd'][90] == pytest.approx(0.55) and found['wsd'][100] == pytest.approx(0.1)
    assert set(found['constant'][10:]) == {1.0}
    # With cooldown_iters any schedule decays at its end.
    cooled = schedule('cosine', cooldown_iters=20)
    assert set(cooled[10:81]) == {1.0} and cooled[90] == pytest.approx(0.55)
    assert cooled[85] - 0.1 == pytest.approx(0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    # After lr_decay_iters the learning rate stays at its final value.
    assert schedule('linear', lr_decay_iters=50)[70] == schedule('wsd', lr_decay_iters=50)[70] == pytest.approx(0.1)
    assert schedule('linear', lr_decay_iters=11)[11] == schedule('linear', lr_decay_iters=10)[11] == pytest.approx(0.1)
    assert schedule('wsd', decay_lr=False) == [1.0] * 101


def test_settings_of_schedules():
    def resolve(*flags):
        return program.resolve([*TINY, *flags])

    assert resolve('--schedule=wsd', '--max_iters=50').cooldown_iters == 10
    assert [resolve('--schedule=wsd', f'--warmup_iters={n}').cooldown_iters for n in (2, 9, 99)] == [2, 1, 0]
    assert resolve().cooldown_iters == 0
    assert resolve('--schedule=constant', '--warmup_iters=20').cooldown_iters == 0
    for flags, message in [
            (['--learning_rate=1e-3', '--min_lr=2e-3'], '--min_lr=0.002: must be at most learning_rate = 0.001'),
            (['--schedule=constant', '--cooldown_iters=9'], '--cooldown_iters=9: must be 0 for --schedule=constant'),
            (['--schedule=wsd', '--cooldown_iters=9'], '--cooldown_iters=9: must be at most 8')]:
        assert message in rejection(resolve, *flags)
