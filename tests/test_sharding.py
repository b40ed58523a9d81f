"""Runs whose model is spread over ranks (parallel = 'fsdp', 'hsdp'): the same losses, and the same promises."""

import functools
import json
import os
import pickle
import shutil
import signal

import pytest
import torch
from conftest import STOP_IN_EVALUATION, iterations, metrics, rejection

from analysis.load import load
from model import GPT, GPTConfig
from runtime import checkpoint, distributed, files, sharded
from runtime.distributed import World
from runtime.signals import NOT_FINITE, STOPPED
from scripts.consolidate import consolidate

RUN = ['--n_layer=2', '--total_batch_size=8', '--dropout=0', '--learning_rate=2e-3']
KEYS = ('train/loss', 'val/loss', 'grad_norm', 'momentum_norm', 'param_norm', 'hessian_norm', 'update_unclipped')


@pytest.fixture(scope='module')
def run(train, tmp_path_factory):
    """run(name, parallel, *flags): the out_dir of a run of two ranks, or as many as asked for, made once."""
    made = {}

    def get(name='sophiag', parallel='ddp', *flags, ranks=2, machines=1):
        key = name, parallel, flags, ranks
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f'{name}-{parallel}')
            done = train(made[key], *RUN, f'--parallel={parallel}', *flags, name=name, ranks=ranks, machines=machines)
            assert done.code == 0, done.err
        return made[key]
    return get


def assert_same_metrics(a, b, rel=1e-5):
    for key in KEYS:
        # One coordinate at the bound may be taken for clipped here and not there.
        slack = 1e-3 if key == 'update_unclipped' else rel
        assert metrics(a, key) == pytest.approx(metrics(b, key), rel=slack, abs=slack), key


@pytest.mark.parametrize('name', ['adamw', 'lion', 'sophiag', 'ef_clip', 'clip', 'normalize', 'gnb_noclip'])
def test_shards_train_as_replicas_do(run, name):
    """Losses, norms, h and the clipped fraction of 10 iterations with an estimate at every fourth."""
    eps = [] if name in ('lion', 'clip') else ['--eps=1e-2' if name == 'gnb_noclip' else '--eps=1e-6']
    # The sign of a momentum near 0 depends on its rounding.
    assert_same_metrics(run(name, 'fsdp', *eps), run(name, 'ddp', *eps), rel=1e-2 if name == 'clip' else 1e-5)


@pytest.mark.parametrize('parallel, flags, ranks, machines', [
    ('hsdp', ['--batch_size=1', '--eval_iters=8'], 4, 2), ('hsdp', [], 1, 1),
    ('fsdp', [], 1, 1), ('fsdp', [], 4, 1), ('fsdp', ['--activation_checkpointing=True'], 2, 1),
    ('ddp', ['--activation_checkpointing=True'], 2, 1),
    ('fsdp', ['--activation_checkpointing=True', '--compile=True'], 2, 1),
])
def test_how_a_model_is_spread_does_not_matter(run, parallel, flags, ranks, machines):
    assert_same_metrics(run('sophiag', parallel, *flags, ranks=ranks, machines=machines), run(), rel=1e-4)


def test_replicas_of_a_model_compiled_in_parts_train_as_eager_ones_do(run, train, tmp_path):
    """DDP has torch.compile cut a model at its buckets of gradients, of 1 MB and more. Gauss-Newton-Bartlett goes back
    through the parts twice, here for 3 of a rank's 4 sequences, in micro-batches of 2."""
    wide = ['--n_embd=192', '--batch_size=2', '--hessian_batch_size=6', '--max_iters=6']
    faults = """
import functools, torch._dynamo.backends.distributed as backends
torch.compile = functools.partial(torch.compile, backend='aot_eager')
def split(self, *args, compile_fn=backends.DDPOptimizer.compile_fn):
    found = compile_fn(self, *args)
    print(f'compiled in {len(self.buckets)} parts')
    return found
backends.DDPOptimizer.compile_fn = split
"""
    done = train(tmp_path, *RUN, *wide, '--compile=True', name='sophiag', ranks=2, faults=faults)
    assert done.code == 0 and 'compiled in 2 parts' in done.out, done.err + done.out
    assert_same_metrics(tmp_path, run('sophiag', 'ddp', *wide))


def test_blocks_that_differ_are_all_compiled(train, tmp_path):
    """Five blocks, each with a factor of its own for attention, to train and to evaluate: 10 graphs of one function, of
    which PyTorch by itself compiles eight."""
    faults = """
import functools
torch.compile = functools.partial(torch.compile, backend='eager')
torch._dynamo.config.fail_on_recompile_limit_hit = True
"""
    done = train(tmp_path / 'out', '--n_layer=5', '--scale_attn_by_inverse_layer_idx=True', '--parallel=fsdp',
                 '--compile=True', '--max_iters=2', '--eval_interval=1', name='adamw', faults=faults)
    assert done.code == 0, done.err


def test_bfloat16_is_close(run):
    """Parameters are gathered in bfloat16, shards and their sums stay float32."""
    out, ddp = (run('sophiag', parallel, '--dtype=bfloat16') for parallel in ('fsdp', 'ddp'))
    assert metrics(out) == pytest.approx(metrics(ddp), abs=2e-2)
    assert metrics(out, 'hessian_norm') == pytest.approx(metrics(ddp, 'hessian_norm'), rel=0.1)
    assert all(t.dtype == torch.float32 for t in checkpoint.load(out)[1]['model'].values())


def test_sums_of_shards_are_float32_and_inputs_stay_as_they_are(monkeypatch):
    """Rounding would show neither in a few losses nor in the labels that uniform numbers draw."""
    found = []
    monkeypatch.setattr(distributed, 'init_device_mesh', lambda *args, **kwargs: None)
    monkeypatch.setattr(distributed, 'fully_shard', lambda module, mp_policy, **_: found.append(mp_policy))
    world = World('cpu', 'gloo')
    world.sharded, world.parallel = True, 'fsdp'
    model = GPT(GPTConfig(n_layer=2, n_head=1, n_embd=8, vocab_size=64))
    world.wrap(model, model.transformer.h, compute_dtype=torch.bfloat16)
    assert len(found) == 3 and {(p.param_dtype, p.reduce_dtype, p.cast_forward_inputs) for p in found} == {
        (torch.bfloat16, torch.float32, False)}


def test_an_estimate_that_is_not_finite_in_one_ranks_shards_stops_all(train, tmp_path):
    done = train(tmp_path, *RUN, '--parallel=fsdp', name='sophiag', ranks=2, faults="""
import sophia
estimate = sophia.GaussNewtonBartlett.estimate
def spoiled(self, *args):
    found = estimate(self, *args)
    found[0].to_local().fill_(float('inf'))
    return found
at(4, lambda: setattr(sophia.GaussNewtonBartlett, 'estimate', spoiled), rank=1)
""")
    assert done.code == NOT_FINITE and 'iteration 4: a Hessian estimate is not finite' in done.err, done.err
    assert not iterations(tmp_path)


@pytest.mark.parametrize('flags, name, words', [
    (['--parallel=fsdp'], 'sophiah', 'must be ddp for sophiah (Hessian-vector products)'),
    (['--activation_checkpointing=True'], 'sophiah', 'must be False for sophiah'),
    (['--parallel=fsdp', '--dtype=float16'], 'adamw', 'must be bfloat16 or float32 for --parallel=fsdp'),
    (['--parallel=tp'], 'adamw', 'must be ddp, fsdp or hsdp'),
])
def test_what_shards_cannot_do_is_rejected(train, tmp_path, flags, name, words):
    done = train(tmp_path / 'out', *flags, name=name, ranks=2)
    assert done.code == 1 and words in done.err and not (tmp_path / 'out').exists()


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.fixture(scope='module')
def stopped(train, tmp_path_factory):
    """stopped(name, parallel): the out_dir of a run of two ranks that was stopped after 7 iterations, made once."""
    @functools.cache
    def get(name, parallel):
        out = tmp_path_factory.mktemp(f'{name}-{parallel}-stopped')
        done = train(out, *RUN, f'--parallel={parallel}', ranks=2, name=name, faults='at(6, kill(signal.SIGTERM))')
        assert done.code == STOPPED and iterations(out) == [7, 5], done.err
        return out
    return get


@pytest.mark.parametrize('name, parallel, then_parallel, then_ranks', [
    ('sophiag', 'fsdp', 'fsdp', 2), ('sophiag', 'fsdp', 'fsdp', 4), ('sophiag', 'fsdp', 'ddp', 1),
    ('sophiag', 'fsdp', 'ddp', 2), ('sophiag', 'ddp', 'fsdp', 2), ('adamw', 'fsdp', 'fsdp', 2),
    ('adamw', 'fsdp', 'ddp', 1)])
def test_resume_onto_other_ranks(train, run, stopped, tmp_path, name, parallel, then_parallel, then_ranks):
    """Stopped in the midst, even of a Hessian interval, and resumed elsewhere."""
    shutil.copytree(stopped(name, parallel), tmp_path, dirs_exist_ok=True, symlinks=True)
    done = train(tmp_path, *RUN, f'--parallel={then_parallel}', '--init_from=auto', ranks=then_ranks, name=name)
    assert done.code == 0 and 'at iteration 7 of 10' in done.out, done.err
    if (then_parallel, then_ranks) == (parallel, 2):
        assert all(metrics(tmp_path, key) == metrics(run(name, parallel), key) for key in KEYS)
    assert_same_metrics(tmp_path, run(name), rel=1e-4)
    assert iterations(tmp_path) == [10, 7] and checkpoint.path_of(tmp_path, 10).is_dir() == (then_parallel == 'fsdp')


def test_scripts_take_a_directory_for_a_checkpoint(run):
    ours, theirs = load(run('adamw', 'fsdp')), load(run('adamw', 'ddp'))
    assert ours.path.name == 'ckpt_00000010' and theirs.path.name == 'ckpt_00000010.pt'
    for (name, p), (other, q) in zip(ours.model.named_parameters(), theirs.model.named_parameters()):
        assert name == other and torch.allclose(p, q, atol=1e-5)
    best = run('adamw', 'fsdp') / 'best'
    assert best.is_symlink() and load(best).state['iter_num'] == 10
    counts = [json.loads((run('adamw', p) / 'config.json').read_text())['parameters'] for p in ('fsdp', 'ddp')]
    assert counts[0] == counts[1] == ours.model.num_params()


def test_consolidate_makes_the_file_that_ddp_would_have_written(run, tmp_path):
    path = consolidate(run(parallel='fsdp'), tmp_path / 'ckpt_00000010.pt')
    ours, theirs = checkpoint.load(path)[1], checkpoint.load(run(parallel='ddp'))[1]
    assert ours.keys() == theirs.keys() and ours['model'].keys() == theirs['model'].keys()
    assert ours['optimizer']['state'].keys() == theirs['optimizer']['state'].keys()
    for index, entries in theirs['optimizer']['state'].items():
        assert entries.keys() == ours['optimizer']['state'][index].keys()
        assert all(torch.allclose(value, ours['optimizer']['state'][index][key], rtol=1e-3, atol=1e-5)
                   for key, value in entries.items())
    assert 'exists; remove it' in rejection(consolidate, run(parallel='fsdp'), path)
    assert 'one file already' in rejection(consolidate, path)


def test_a_consolidated_run_resumes(train, run, tmp_path):
    consolidate(run(parallel='fsdp'), tmp_path / 'ckpt_00000010.pt')
    done = train(tmp_path, *RUN, '--init_from=resume', '--max_iters=12', name='sophiag')
    assert done.code == 0 and 'resuming from' in done.out and len(metrics(tmp_path)) == 2, done.err


def test_retention_spares_the_best(train, tmp_path):
    """The loss grows soon after the fourth iteration; the best checkpoint stays, though others are newer."""
    done = train(tmp_path, *RUN, '--parallel=fsdp', '--eval_interval=2', '--warmup_iters=0', '--decay_lr=False',
                 '--learning_rate=0.01', ranks=2, faults="""
def worse():
    for group in [o for o in gc.get_objects() if isinstance(o, torch.optim.Optimizer)][0].param_groups:
        group['maximize'] = True
at(4, worse)
""")
    assert done.code == 0, done.err
    assert (tmp_path / 'best').resolve().name == 'ckpt_00000006' and iterations(tmp_path) == [10, 8, 6]


def test_killed_while_saving(train, run, tmp_path):
    """kill -9 of a rank whose shards of the second checkpoint are written but not yet in their place."""
    done = train(tmp_path, *RUN, '--parallel=fsdp', ranks=2, faults="""
checksum, calls = checkpoint.sharded.checksum, []
def interrupted(path):
    calls.append(path.name)
    if calls.count('.metadata') == 2:
        kill(signal.SIGKILL)()
    return checksum(path)
checkpoint.sharded.checksum = interrupted
""")
    assert done.code and iterations(tmp_path) == [5] and list(tmp_path.glob('*.partial'))
    done = train(tmp_path, *RUN, '--parallel=fsdp', '--init_from=auto', ranks=2)
    assert done.code == 0 and not list(tmp_path.glob('*.partial')), done.err
    assert metrics(tmp_path) == metrics(run('adamw', 'fsdp'))


@pytest.mark.parametrize('where', ['shutil.rmtree', 'Path.replace'])
def test_killed_while_a_checkpoint_replaces_another(train, run, tmp_path, where):
    """That of iteration 5 is saved before its evaluation, in which the run is stopped, and again after it."""
    sharded = [*RUN, '--parallel=fsdp']
    assert train(tmp_path, *sharded, ranks=2, faults=STOP_IN_EVALUATION).code == STOPPED
    assert iterations(tmp_path) == [5]
    owner, name = where.split('.')
    done = train(tmp_path, *sharded, '--init_from=auto', ranks=2, faults=f"""
owner = checkpoint.{owner}
{name} = owner.{name}
def interrupted(path, *args, **kwargs):
    if Path(path).name == 'ckpt_00000005.{dict(rmtree='old.', replace='')[name]}partial' and Path(path).exists():
        kill(signal.SIGKILL)()
    return {name}(path, *args, **kwargs)
owner.{name} = interrupted
""")
    assert done.code and list(tmp_path.glob('ckpt_00000005.old.partial'))
    done = train(tmp_path, *sharded, '--init_from=auto', ranks=2)
    assert done.code == 0 and 'at iteration 5 of' in done.out, done.err
    assert iterations(tmp_path) == [10, 5] and not list(tmp_path.glob('*.partial')), done.err
    assert metrics(tmp_path) == metrics(run('adamw', 'fsdp'))


def test_full_disk(train, run, tmp_path):
    """No file may grow beyond 20 kB for a while: it says so, continues, and saves later."""
    done = train(tmp_path, *RUN, '--parallel=fsdp', ranks=2, faults="""
import resource
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
for rank in range(2):
    at(4, lambda: limit(20_000), rank)
    at(7, lambda: limit(-1), rank)
""")
    assert done.code == 0 and iterations(tmp_path) == [10], done.err
    assert 'ckpt_00000005: could not be saved (rank' in done.err and 'older checkpoints are kept' in done.err
    assert not list(tmp_path.glob('*.partial')) and metrics(tmp_path) == metrics(run('adamw', 'fsdp'))


def damage(path, how):
    if how == 'truncated':
        os.truncate(path, path.stat().st_size // 2)
    elif how == 'missing':
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize('name', ['__0_0.distcp', '__1_0.distcp', '.metadata', 'state.json'])
@pytest.mark.parametrize('how', ['truncated', 'missing', 'flipped'])
def test_damage_is_noticed(run, tmp_path, name, how):
    """The newest intact one is taken, whatever has happened to the last."""
    for path in checkpoint.checkpoints(run(parallel='fsdp'))[:2]:
        (tmp_path / path.name).mkdir()
        for f in path.iterdir():
            (tmp_path / path.name / f.name).write_bytes(f.read_bytes())
    damage(tmp_path / 'ckpt_00000010' / name, how)
    assert checkpoint.newest(tmp_path).name == 'ckpt_00000005'


def test_damage_that_only_one_rank_sees(train, run, tmp_path):
    """Each rank compares its share of the files; all of them skip what one finds damaged."""
    shutil.copytree(run('adamw', 'fsdp'), tmp_path, dirs_exist_ok=True, symlinks=True)
    name = list(json.loads((tmp_path / 'ckpt_00000010/state.json').read_text())['state']['files'])[1]
    damage(tmp_path / 'ckpt_00000010' / name, 'flipped')
    done = train(tmp_path, *RUN, '--parallel=fsdp', '--init_from=resume', ranks=2)
    assert done.code == 0 and 'ckpt_00000005 at iteration 5' in done.out, done.err
    assert f'{name} does not fit its checksum); it is skipped' in done.err
    assert metrics(tmp_path) == metrics(run('adamw', 'fsdp'))


class Exploit:
    def __reduce__(self):
        return os.mkdir, ('exploited',)


def test_a_hostile_directory_runs_nothing(run, tmp_path, monkeypatch):
    """Metadata whose pickle runs code, or that announces pickled objects instead of tensors."""
    monkeypatch.chdir(tmp_path)
    good = checkpoint.path_of(run(parallel='fsdp'), 10)
    metadata = sharded.ShardReader(good).read_metadata()
    name = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[name] = torch.distributed.checkpoint.metadata.BytesStorageMetadata()
    for i, content in enumerate((Exploit(), metadata)):
        bad = tmp_path / f'ckpt_{i:08d}'
        bad.mkdir()
        for f in good.iterdir():
            (bad / f.name).write_bytes(f.read_bytes())
        (bad / '.metadata').write_bytes(pickle.dumps(content))
        state = json.loads((bad / 'state.json').read_text())['state']
        state['files']['.metadata'] = files.checksum(bad / '.metadata')
        (bad / 'state.json').write_text(sharded.with_checksum(state))
        assert 'could run code' in rejection(checkpoint.load, bad)
    assert not (tmp_path / 'exploited').exists()


@pytest.mark.parametrize(
    'how', ['no checksums', 'outside', 'checksum outside', 'too large', 'damaged with its checksum'])
def test_a_directory_is_read_as_far_as_its_checksums_go(run, tmp_path, how):
    """Paths that leave the directory are not followed; nothing is read that has no checksum."""
    good, bad = checkpoint.path_of(run(parallel='fsdp'), 10), tmp_path / 'ckpt_00000010'
    shutil.copytree(good, bad)
    state = json.loads((bad / 'state.json').read_text())['state']
    metadata = sharded.ShardReader(good).read_metadata()
    metadata.storage_meta = None
    words = 'has no checksum'
    if how == 'no checksums':
        state['files'] = {}
    elif how == 'damaged with its checksum':  # torch's exception is a BaseException
        os.truncate(bad / '__0_0.distcp', 100)
        state['files']['__0_0.distcp'] = files.checksum(bad / '__0_0.distcp')
        words = 'not a checkpoint of this repository'
    else:
        if how == 'too large':
            next(iter(metadata.state_dict_metadata.values())).size = torch.Size([2 ** 36])
            words = 'its tensors are larger than its files'
        for info in metadata.storage_data.values() if 'outside' in how else ():
            info.relative_path = '../' + info.relative_path
        (bad / '.metadata').write_bytes(pickle.dumps(metadata))
        state['files']['.metadata'] = files.checksum(bad / '.metadata')
        if how == 'checksum outside':
            state['files'] |= {'../' + f.name: files.checksum(shutil.copy(f, tmp_path)) for f in good.glob('*.distcp')}
            words = 'is no file of this directory'
    (bad / 'state.json').write_text(sharded.with_checksum(state))
    assert words in rejection(checkpoint.load, bad)


TOY = """
class Toy(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr, k=0))
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group['k'] += 1
            for p in group['params']:
                state = self.state[p]
                state['step'] = state.get('step', 0) + 1
                state['pair'] = [0.9 * state['pair'][0] + p.grad if 'pair' in state else p.grad.clone(), None]
                MORE
                p.sub_(state['pair'][0], alpha=group['lr'] * (1 + 1 / group['k'] + 1 / state['step']))
optimizers.build_optimizer = lambda name, params, *, lr, **kwargs: Toy(params, lr)
"""


def test_an_optimizer_with_numbers_in_its_state_resumes_sharded(train, tmp_path):
    """Python numbers and lists in the state, and a counter in the groups; onto one rank as well."""
    faults = TOY.replace('MORE', '')
    flags = [*RUN, '--init_from=auto', '--log_interval=1']
    done = train(tmp_path / 'a', *flags, '--parallel=fsdp', ranks=2, faults=faults)
    assert done.code == 0, done.err
    stopped = train(tmp_path / 'b', *flags, '--parallel=fsdp', ranks=2, faults=faults + 'at(6, kill(signal.SIGTERM))')
    assert stopped.code == STOPPED, stopped.err
    shutil.copytree(tmp_path / 'b', tmp_path / 'c')
    assert train(tmp_path / 'b', *flags, '--parallel=fsdp', ranks=2, faults=faults).code == 0
    assert metrics(tmp_path / 'b') == metrics(tmp_path / 'a')
    assert train(tmp_path / 'c', *flags, faults=faults).code == 0
    assert metrics(tmp_path / 'c') == pytest.approx(metrics(tmp_path / 'a'), rel=1e-4)
    path = consolidate(tmp_path / 'a', tmp_path / 'whole.pt')
    optimizer = checkpoint.load(path)[1]['optimizer']
    assert optimizer['param_groups'][0]['k'] == 10 and {s['step'] for s in optimizer['state'].values()} == {10}


def test_a_directory_of_tensors_alone_resumes(train, run, tmp_path):
    """As this repository wrote them before: of the optimizer no more than its tensors."""
    shutil.copytree(checkpoint.path_of(run('adamw', 'fsdp'), 5), tmp_path / 'ckpt_00000005')
    path = tmp_path / 'ckpt_00000005' / 'state.json'
    state = json.loads(path.read_text())['state']
    del state['optimizer']
    path.write_text(sharded.with_checksum(state))
    assert 'does not say in which order' in rejection(consolidate, tmp_path)
    done = train(tmp_path, *RUN, '--parallel=fsdp', '--init_from=auto', ranks=2)
    assert done.code == 0 and metrics(tmp_path) == metrics(run('adamw', 'fsdp'))[5:], done.err


def test_a_state_that_shards_cannot_hold_is_never_said_to_be_saved(train, tmp_path):
    faults = TOY.replace('MORE', "state['rows'] = torch.ones(2)")
    done = train(tmp_path, *RUN, '--parallel=fsdp', ranks=2, faults=faults)
    assert done.code == 1 and 'saved' not in done.out and not iterations(tmp_path)
    (line,) = [line for line in done.err.splitlines() if 'Toy' in line]
    assert 'Toy: its state cannot be saved' in line and '.rows is a tensor that each rank has for itself' in line


def test_a_stop_during_evaluation_stops_all_ranks(train, tmp_path):
    """One rank of two gets the signal while all of them take part in every forward."""
    done = train(tmp_path, *RUN, '--parallel=fsdp', ranks=2, faults=STOP_IN_EVALUATION)
    assert done.code == STOPPED and iterations(tmp_path) == [5] and signal.SIGTERM.name not in done.err, done.err


def test_every_rank_evaluates_as_often(train, tmp_path):
    """Three sequences for two ranks: the second one's last batch counts for nothing."""
    flags = ['--eval_iters=3', '--batch_size=1', '--max_iters=1', '--eval_interval=1']
    for parallel in ('ddp', 'fsdp'):
        assert train(tmp_path / parallel, *RUN, *flags, f'--parallel={parallel}', ranks=2).code == 0
    assert metrics(tmp_path / 'fsdp', 'val/loss') == pytest.approx(metrics(tmp_path / 'ddp', 'val/loss'), abs=1e-5)
