"""Sharded runs (parallel = 'fsdp', 'hsdp'): their losses and resumes are those of replicas; their checkpoints."""

import errno
import functools
import pickle
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import iterations, metrics, rejection
from test_checkpoint import Exploit, built

from runtime import checkpoint, files, sharded
from runtime.distributed import World
from runtime.optimizer_state import first_difference
from runtime.signals import NOT_FINITE, STOPPED, undo_at_end
from scripts import curvature
from scripts.load import load

pytestmark = pytest.mark.filterwarnings('ignore:torch.distributed is disabled')
ALONE = SimpleNamespace(is_master=True, rank=0, device='cpu', gather=lambda tensor: tensor[None])
RUN = ['--n_layer=2', '--total_batch_size=8', '--dropout=0', '--learning_rate=2e-3', '--eval_sequences=6']
KEYS = ('train/loss', 'val/loss', 'grad_norm', 'momentum_norm', 'param_norm', 'hessian_norm', 'update_unclipped')


@pytest.fixture
def run(finished):
    """Return run(name, parallel, *flags), the out_dir of a run on two ranks or as many as asked for, made once."""
    def get(name='sophiag', parallel='ddp', *flags, ranks=2, machines=1):
        return finished(*RUN, f'--parallel={parallel}', *flags, name=name, ranks=ranks, machines=machines)
    return get


def assert_same_metrics(a, b):
    for key in KEYS:
        # A coordinate at the bound may be clipped in one run only.
        slack = 1e-3 if key == 'update_unclipped' else 1e-4
        assert metrics(a, key) == pytest.approx(metrics(b, key), rel=slack, abs=slack), key


@pytest.mark.parametrize('name, parallel, flags, ranks, machines', [
    ('sophiag', 'ddp', [], 2, 1), ('sophiag', 'fsdp', ['--activation_checkpointing=True'], 2, 1),
    ('sophiag', 'hsdp', ['--batch_size=1'], 4, 2), ('sophiah', 'ddp', [], 2, 1),
    ('muon', 'fsdp', [], 2, 1)])
def test_any_number_of_ranks_trains_as_one_does(run, name, parallel, flags, ranks, machines):
    """The 6 sequences of an evaluation do not divide into micro-batches of all ranks."""
    assert_same_metrics(run(name, parallel, *flags, ranks=ranks, machines=machines), run(name, ranks=1))


@pytest.mark.parametrize('parallel, checks', [('fsdp', []), ('ddp', [0, 1])])
def test_buffers_that_a_forward_changes_are_those_of_rank_0(train, tmp_path, parallel, checks):
    """The forwards that build DDP's buckets leave no trace."""
    done = train(tmp_path, *RUN, f'--parallel={parallel}', '--max_iters=2', ranks=2, check=True, faults="""
init, forward = model.GPT.__init__, model.GPT.forward
def with_buffer(self, config):
    init(self, config)
    self.register_buffer('seen', torch.zeros(()))
def counting(self, *args, **kwargs):
    print('seen', self.seen.item(), flush=True)
    self.seen += 1 + int(os.environ['RANK'])
    return forward(self, *args, **kwargs)
model.GPT.__init__, model.GPT.forward = with_buffer, counting
""")
    seen = [float(line.split()[1]) for line in done.out.splitlines() if line.startswith('seen ')]
    n = len(seen) // 2
    assert n > 6 and seen[:n] == [*checks, *range(n - len(checks))]
    assert parallel == 'ddp' or seen[n:] == seen[:n]


def test_replicas_of_a_model_compiled_in_parts_train_as_eager_ones_do(run, train, tmp_path):
    """torch.compile cuts a model at DDP's buckets of gradients; Gauss-Newton-Bartlett has two backward passes."""
    wide = ['--n_layer=1', '--n_embd=192', '--batch_size=2', '--hessian_batch_size=8', '--hessian_interval=1',
            '--max_iters=2', '--eval_interval=2']
    faults = """
import functools, torch._dynamo.backends.distributed as backends
torch.compile = functools.partial(torch.compile, backend='eager')
def split(self, *args, compile_fn=backends.DDPOptimizer.compile_fn):
    found = compile_fn(self, *args)
    print(f'compiled in {len(self.buckets)} parts')
    return found
backends.DDPOptimizer.compile_fn = split
"""
    done = train(tmp_path, *RUN, *wide, '--compile=True', name='sophiag', ranks=2, faults=faults)
    assert done.code == 0 and 'compiled in 2 parts' in done.out, done.err + done.out
    assert_same_metrics(tmp_path, run('sophiag', 'ddp', *wide))


def test_blocks_are_compiled_one_by_one_within_shards(train, run, tmp_path):
    """Activation checkpointing stays inside the compiled blocks."""
    flags = ['--parallel=fsdp', '--activation_checkpointing=True', '--hessian_interval=1', '--max_iters=2']
    done = train(tmp_path, *RUN, *flags, '--compile=True', name='sophiag', ranks=2, check=True, faults="""
def compiled(f, compile=torch.compile, **options):
    print('compiled', getattr(f, 'func', f).__name__)
    return compile(f, backend='eager', **options)
torch.compile = compiled
torch._dynamo.config.fail_on_recompile_limit_hit = True
""")
    assert done.out.count('compiled checkpoint') == 2 * 2  # two blocks on either rank
    assert_same_metrics(tmp_path, run('sophiag', 'fsdp', *flags[1:]))


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
    assert not iterations(tmp_path) and len(done.err.splitlines()) == 1


@pytest.fixture(scope='module')
def stopped(train, tmp_path_factory):
    """Return stopped(parallel), the out_dir of a run on two ranks that was stopped after 7 iterations, made once."""
    @functools.cache
    def get(parallel):
        out = tmp_path_factory.mktemp(f'{parallel}-stopped')
        done = train(out, *RUN, f'--parallel={parallel}', ranks=2, name='sophiag', faults='at(6, kill(signal.SIGTERM))')
        assert done.code == STOPPED and iterations(out) == [7, 5], done.err
        return out
    return get


# load_state_dict moves all it gets to the GPU, so no rank may give it the whole state.
ONLY_SHARDS = """
load = torch.optim.Optimizer.load_state_dict
def load_shards(self, saved):
    tensors = [t for state in saved['state'].values() for t in state.values() if getattr(t, 'ndim', 0)]
    assert tensors and all(hasattr(t, 'placements') for t in tensors)
    load(self, saved)
torch.optim.Optimizer.load_state_dict = load_shards
"""


def test_the_curvature_script_reads_h_from_shards(stopped):
    found = []
    for parallel in 'fsdp', 'ddp':
        path, state = checkpoint.load_checkpoint(stopped(parallel))
        loaded = SimpleNamespace(path=path, state=state, model=torch.nn.Linear(1, 1))
        found.append(curvature.h_of_run(loaded, [*state['optimizer']['shapes']]))
    shards, whole = found
    torch.testing.assert_close(shards, whole, rtol=1e-3, atol=1e-3 * whole.abs().max().item())


@pytest.mark.parametrize('parallel, then_parallel, then_ranks', [
    ('fsdp', 'fsdp', 2), ('fsdp', 'ddp', 1), ('ddp', 'fsdp', 2)])
def test_resume_onto_other_ranks(train, run, stopped, tmp_path, parallel, then_parallel, then_ranks):
    """The run was stopped within a Hessian interval."""
    shutil.copytree(stopped(parallel), tmp_path, dirs_exist_ok=True, symlinks=True)
    done = train(tmp_path, *RUN, f'--parallel={then_parallel}', '--auto_resume=True', ranks=then_ranks, name='sophiag',
                 faults=ONLY_SHARDS if then_parallel == 'fsdp' else '')
    assert done.code == 0 and 'at iteration 7 of 10' in done.out, done.err
    if (then_parallel, then_ranks) == (parallel, 2):
        assert all(metrics(tmp_path, key) == metrics(run('sophiag', parallel), key) for key in KEYS)
    assert_same_metrics(tmp_path, run('sophiag'))
    assert iterations(tmp_path) == [10, 7] and checkpoint.path_of(tmp_path, 10).is_dir() == (then_parallel == 'fsdp')


def test_scripts_take_a_directory_for_a_checkpoint(run):
    ours, theirs = load(run(parallel='fsdp')), load(run(parallel='ddp'))
    assert ours.path.name == 'ckpt_00000010' and theirs.path.name == 'ckpt_00000010.pt'
    for (name, p), (other, q) in zip(ours.model.named_parameters(), theirs.model.named_parameters()):
        assert name == other and torch.allclose(p, q, atol=1e-4)
    assert load(run(parallel='fsdp') / 'best.pt').state['iter_num'] == 10


def test_a_second_save_of_an_iteration_leaves_the_first_until_it_is_complete(tmp_path, monkeypatch):
    """A directory that is complete gets its name at the next start."""
    def failing(*args):
        raise OSError(errno.EIO, 'Input/output error')

    path, state = tmp_path / 'ckpt_00000010', dict(model_args={}, iter_num=10, config={}, best=False)

    def save(model):
        sharded.write(ALONE, path, model, state, {})

    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    save(first)
    for name, kept in ('save_pt', first), ('put_in_place', second):
        with monkeypatch.context() as patch, pytest.raises(OSError, match='Input'):
            patch.setattr(sharded, name, failing)
            save(second)
        with undo_at_end():
            assert checkpoint.open_run(World('cpu', 'gloo'), tmp_path, may_resume=True)[0] == path
        assert torch.equal(checkpoint.load_checkpoint(path)[1]['model']['weight'], kept.weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['ckpt_00000010', 'lock']


@pytest.mark.parametrize('name', ['__0_0.distcp', '__1_0.distcp', '.metadata', 'state.pt'])
def test_damage_is_noticed(run, tmp_path, name):
    """The newest intact checkpoint is loaded."""
    for path in checkpoint.checkpoints(run(parallel='fsdp')):
        shutil.copytree(path, tmp_path / path.name)
    path = tmp_path / 'ckpt_00000010' / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert checkpoint.load_checkpoint(tmp_path)[0].name == 'ckpt_00000005'
    path.unlink()
    assert checkpoint.load_checkpoint(tmp_path)[0].name == 'ckpt_00000005'


def test_a_hostile_directory_runs_nothing(run, tmp_path, monkeypatch):
    """Its metadata runs code, or announces pickled objects instead of tensors."""
    monkeypatch.chdir(tmp_path)
    good = checkpoint.path_of(run(parallel='fsdp'), 10)
    metadata = sharded.ShardReader(good).read_metadata()
    name = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[name] = torch.distributed.checkpoint.metadata.BytesStorageMetadata()
    for i, content in enumerate((Exploit(), metadata)):
        bad = tmp_path / f'ckpt_{i:08d}'
        shutil.copytree(good, bad)
        (bad / '.metadata').write_bytes(pickle.dumps(content))
        state = torch.load(bad / 'state.pt', weights_only=True)
        state['files']['.metadata'] = files.checksum(bad / '.metadata')
        files.save_pt(bad / 'state.pt', state)
        assert 'could run code' in rejection(checkpoint.load_checkpoint, bad)
    assert not (tmp_path / 'exploited').exists()


class Counting(torch.optim.SGD):
    """An optimizer with a number and a list of shards in its state, and a counter in its groups."""

    def step(self):
        super().step()
        for group in self.param_groups:
            group['k'] = group.get('k', 0) + 1
            for p in group['params']:
                self.state[p]['pair'] = group['k'], [p.grad.clone(), None]


def test_numbers_and_lists_in_an_optimizers_state_come_back(tmp_path):
    with undo_at_end():
        world = World('cpu', 'gloo', 'hsdp')  # on one machine as fsdp
        state = dict(model_args={}, iter_num=1, config={}, train_state={}, scaler={})
        models = [torch.nn.Sequential(torch.nn.Linear(3, 2)) for _ in range(2)]
        for model in models:
            world.wrap(model, model, [model[0]])
        ours, theirs = (built(Counting, model.parameters()) for model in models)
        models[0](torch.ones(1, 3)).sum().backward()
        ours.step()
        path = checkpoint.save_run(world, tmp_path, models[0], ours, state)
        checkpoint.load_tensors(*checkpoint.load_checkpoint(path), models[1], theirs, None)
        assert not first_difference(ours.state_dict()['state'], theirs.state_dict()['state'])
        assert theirs.param_groups[0]['k'] == 1 and models[0][0].weight.device_mesh.ndim == 1
