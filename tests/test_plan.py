"""scripts/plan.py: its memory against what real steps allocate on CPU, its costs against formulas, its errors."""

import json
import re
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, needs_compiler, rejection, write_bins
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import hessian
import loss
import model
import optimizers
import sophia
import train
from scripts import plan

# Vocabulary, layers, tokens, sequences, width, heads: blocks, weights or logits are what most of the memory is for.
BLOCKS, WEIGHTS, LOGITS = (512, 4, 256, 2, 128, 4), (64, 4, 64, 2, 256, 4), (4096, 2, 128, 2, 128, 2)


def settings(shape, *flags, accumulation=1, ranks=1):
    """(train.py's settings for a model of this shape on CPU, its vocabulary)."""
    vocab_size, L, T, B, C, H = shape
    first_order = any(f'--optimizer_name={name}' in flags for name in ('adamw', 'lion'))
    return train.resolve([
        '--model_size=tiny', '--device=cpu', f'--n_layer={L}', f'--n_head={H}', f'--n_embd={C}', f'--block_size={T}',
        f'--batch_size={B}', f'--total_batch_size={B * accumulation * ranks}', '--learning_rate=1e-3', *flags,
        *([] if first_order else ['--hessian_interval=5'])]), vocab_size


def check_memory(config, vocab_size, ranks=1, per_node=1, rel=0.1):
    """The plan's peak is within `rel` of the measured one, and its states are exact."""
    measured = plan.measure(config, vocab_size)
    planned = plan.memory(config, vocab_size, ranks, per_node)
    assert planned['peak'] == pytest.approx(measured['peak'], rel=rel)
    assert planned['peak'] == sum(planned['terms'].values())
    assert (planned['parameters'], planned['optimizer']) == (measured['parameters'], measured['optimizer'])


@pytest.mark.parametrize('shape, name, dtype, checkpointing, accumulation', [
    (BLOCKS, 'adamw', 'float32', False, 1), (BLOCKS, 'adamw', 'bfloat16', True, 1),
    (BLOCKS, 'sophiag', 'bfloat16', False, 2), (BLOCKS, 'sophiag', 'float32', True, 2),
    (WEIGHTS, 'sophiag', 'bfloat16', False, 1), (WEIGHTS, 'lion', 'float32', True, 2),
    (LOGITS, 'ef_clip', 'bfloat16', False, 1), (WEIGHTS, 'adahessian', 'float32', False, 1),
    (LOGITS, 'sophiah', 'bfloat16', False, 1), (BLOCKS, 'adamw', 'float16', False, 1)])
def test_memory_is_what_a_step_allocates(shape, name, dtype, checkpointing, accumulation):
    check_memory(*settings(shape, f'--optimizer_name={name}', f'--dtype={dtype}',
                           f'--activation_checkpointing={checkpointing}', accumulation=accumulation))


def test_memory_of_a_hessian_vector_product_taken_in_parts(monkeypatch):
    monkeypatch.setattr(hessian, 'PRODUCT_SIZE', 2 ** 21)
    config, vocab_size = settings(BLOCKS, '--optimizer_name=sophiah', accumulation=2)
    parts = plan.memory(config, vocab_size)['peak']
    check_memory(config, vocab_size)
    monkeypatch.undo()
    assert parts < 0.9 * plan.memory(config, vocab_size)['peak']


@needs_compiler
def test_memory_of_a_compiled_model():
    """Most of it logits and their softmax. (In 16 bits code compiled for CPUs keeps one more copy of them.)"""
    check_memory(*settings((16384, 1, 64, 8, 64, 1), '--optimizer_name=sophiag', '--compile=True'))


class RMSNormGPT(model.GPT):
    """What a fork may do: other norms, an untied head."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        for block in self.transformer.h:
            block.ln_1, block.ln_2 = nn.RMSNorm(config.n_embd), nn.RMSNorm(config.n_embd)


def test_memory_and_flops_follow_another_architecture_loss_and_optimizer(monkeypatch):
    def z_loss(logits, targets):
        logits = logits.float()
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction='none') + 1e-4 * logits.logsumexp(-1) ** 2

    config, vocab_size = settings(LOGITS, '--optimizer_name=adamw')
    before = plan.memory(config, vocab_size), plan.flops(config, vocab_size)
    monkeypatch.setattr(plan, 'GPT', RMSNormGPT)
    monkeypatch.setattr(loss, 'token_loss', z_loss)
    monkeypatch.setitem(optimizers.OPTIMIZERS, 'adamw', optimizers.Row(
        lambda groups, s: torch.optim.SGD(groups, lr=s.learning_rate, momentum=0.9), dict(optimizers.NEUTRAL), 1e-3))
    check_memory(config, vocab_size)
    after = plan.memory(config, vocab_size), plan.flops(config, vocab_size)
    assert after[0]['parameters'] > before[0]['parameters'] and after[0]['optimizer'] == after[0]['parameters']
    assert after[1]['gradient'] > before[1]['gradient']  # the checkpointed head takes its logits twice


@pytest.fixture
def pretended_ranks(monkeypatch):
    """Has this process be rank 0 of eight on two machines whose other ranks send nothing (PyTorch's fake backend)."""
    for key, value in dict(RANK='0', LOCAL_RANK='0', WORLD_SIZE='8', LOCAL_WORLD_SIZE='4', MASTER_ADDR='127.0.0.1',
                           MASTER_PORT='1').items():
        monkeypatch.setenv(key, value)
    initialize = dist.init_process_group
    monkeypatch.setattr(dist, 'init_process_group',
                        lambda *args, **kwargs: initialize('fake', rank=0, world_size=8, store=FakeStore()))
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    # What was never sent may be anything.
    monkeypatch.setattr(sophia, 'check_finite', lambda *args: True)
    monkeypatch.setattr(train.math, 'isfinite', lambda x: True)


@pytest.mark.parametrize('shape, name, parallel, dtype, checkpointing', [
    (BLOCKS, 'sophiag', 'fsdp', 'bfloat16', False),
    pytest.param(WEIGHTS, 'adamw', 'fsdp', 'float32', False, marks=pytest.mark.skipif(
        torch.__version__ < '2.13', reason='plans too much before PyTorch 2.13, and says so')),
    (WEIGHTS, 'sophiag', 'hsdp', 'bfloat16', True), (LOGITS, 'lion', 'hsdp', 'float32', False)])
def test_memory_of_shards(pretended_ranks, shape, name, parallel, dtype, checkpointing):
    check_memory(*settings(shape, f'--optimizer_name={name}', f'--parallel={parallel}', f'--dtype={dtype}',
                           f'--activation_checkpointing={checkpointing}', accumulation=2, ranks=8), ranks=8, per_node=4)


def test_memory_of_ddp(fork):
    """Two real ranks: the fake backend does not serve DDP."""
    done = fork('scripts/plan.py', '--measure', '--device=cpu', '--model_size=tiny', '--block_size=64',
                '--batch_size=2', '--total_batch_size=8', '--optimizer_name=sophiag', '--dataset=nowhere', ranks=2,
                check=True)
    differences = dict(re.findall(r'^ *(\w+) .* ([+-][\d.]+)%$', done.out, re.M))
    assert abs(float(differences['peak'])) < 10 and differences['optimizer'] == '+0.0'


# ----------------------------------------------------------------------------------------------------------------------


def plans(tmp_path, *argv):
    plan.main([*map(str, argv), f'--output={tmp_path / "plan.json"}'])
    return json.loads((tmp_path / 'plan.json').read_text())['plans']


def option(entry, parallel, checkpointing=False):
    return next(one for one in entry['options']
                if (one['parallel'], one['activation_checkpointing']) == (parallel, checkpointing))


# The paper's largest model, but for depth and mini-batch: a plan of all 32 layers takes minutes.
SHALLOW = ['config/train_neox_6.6b_sophiag.py', '--n_layer=2', '--block_size=256', '--total_batch_size=32']


def test_plan_of_a_sharded_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    eight, = plans(tmp_path, *SHALLOW, '--gpus=8', '--gpu=h100', '--mfu=0.5')
    config, tokens = train.resolve([*SHALLOW, '--device=cuda']), 32 * 256
    model_, work = plan.make_model(config, 50304, 'meta'), eight['flops_per_step']
    P = model_.num_params()
    assert eight['parameters'] == P and sum(eight['state_bytes'].values()) == 16 * P
    assert work['gradient'] == model_.flops_per_token() * tokens
    blocks = work['gradient'] - 6 * model_.lm_head.weight.numel() * tokens
    # On half of the sequences, every 10 steps: a backward pass through the blocks, two thirds of their FLOPs.
    assert work['hessian'] == pytest.approx(blocks * 2 / 3 / 2 / 10)
    chosen, checkpointed = option(eight, 'fsdp'), option(eight, 'fsdp', True)
    assert chosen['chosen'] and chosen['fits'] and chosen['peak_bytes'] < option(eight, 'ddp')['peak_bytes']
    seconds = (work['gradient'] + work['hessian']) / (8 * 989e12 * 0.5)
    assert chosen['seconds_per_step'] == pytest.approx(seconds)
    # The blocks' forward once more, but for their last matmul, whose output no gradient needs.
    again = (checkpointed['seconds_per_step'] - seconds) * 8 * 989e12 * 0.5
    assert 0.6 * blocks / 3 < again < 0.8 * blocks / 3
    assert chosen['days'] == pytest.approx(chosen['seconds_per_step'] * 100_000 / 86400)
    assert chosen['gpu_hours'] == pytest.approx(8 * 24 * chosen['days'])
    assert chosen['parameter_bytes'] == pytest.approx(4 * P / 8, rel=1e-3)
    assert checkpointed['peak_bytes'] < chosen['peak_bytes']
    assert chosen['largest_batch_size'] == 32 // 8 and chosen['largest_peak_bytes'] <= eight['limit_bytes']
    printed = capsys.readouterr().out
    assert f'{P:,} parameters' in printed and 'fsdp *' in printed and 'GPU-hours' in printed


@pytest.mark.parametrize('limit, expected', [(9, None), (10, 1), (65, 6), (65.9, 6), (119, 10), (120, 12), (999, 60)])
def test_the_largest_micro_batch_divides_and_fits(monkeypatch, limit, expected):
    monkeypatch.setattr(plan, 'memory', lambda config, *rest: dict(peak=10 * config.batch_size))
    config = train.resolve(['--device=cpu', '--batch_size=6'])
    found = plan.largest_micro_batch(config, 64, 8, 8, limit, 60)
    assert found == (expected and (expected, 10 * expected))


def test_bytes_that_ranks_send(monkeypatch):
    monkeypatch.chdir(ROOT)
    argv = ['config/train_neox_1.5b_adamw.py', '--device=cuda', '--batch_size=4']
    with plan.environment(16, 8):
        config = train.resolve(argv)

    def sent(parallel):
        return {what: (size, link) for what, size, link in plan.traffic(
            plan.changed(config, parallel=parallel), 50304, 16, 8)}

    P, micro_batches = plan.make_model(config, 50304, 'meta').num_params(), 512 // 16 // 4
    ddp, fsdp, hsdp = map(sent, ('ddp', 'fsdp', 'hsdp'))
    assert ddp['all-reduce of gradients'] == (pytest.approx(2 * 15 / 16 * 4 * P), 'network')
    assert fsdp['reduce-scatter of gradients'] == (pytest.approx(15 / 16 * 4 * P * micro_batches), 'network')
    gathered = fsdp['all-gather of parameters'][0] / (15 / 16 * 2 * P * micro_batches)
    assert 1.9 < gathered < 2  # forward and backward, but for embeddings and head, which stay
    assert hsdp['reduce-scatter of gradients'] == (pytest.approx(7 / 8 * 4 * P * micro_batches), 'nvlink')
    assert hsdp['all-reduce between nodes'] == (pytest.approx(4 * P), 'network')


def test_hutchinson_is_planned_for_replicas_only(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    tiny = ['--n_layer=1', '--n_embd=64', '--n_head=1', '--block_size=64', '--batch_size=12',
            '--total_batch_size=96']
    entry, = plans(tmp_path, 'config/train_gpt2_large_sophiah.py', '--gpus=8', *tiny, '--network=100')
    replicas, = entry['options']
    assert replicas['parallel'] == 'ddp'
    assert replicas['communication_share'] == replicas['communication_seconds'] / replicas['seconds_per_step'] > 0
    alone, = plans(tmp_path, 'config/train_gpt2_small_adamw.py', '--gpus=1', *tiny)
    assert alone['options'][0]['sent_bytes'] == {} and alone['options'][0]['communication_share'] == 0


def test_the_vocabulary_is_that_of_a_data_set_outside_of_data(tmp_path, monkeypatch):
    dataset = write_bins(tmp_path / 'elsewhere', [0] * 100, [0] * 100, vocab_size=65)
    monkeypatch.chdir(tmp_path)  # from where train.py would open it
    for name in (dataset, 'elsewhere', '../' + tmp_path.name + '/elsewhere'):
        assert plan.vocabulary(train.resolve([f'--dataset={name}'])) == 65
    assert plan.vocabulary(train.resolve(['--dataset=nowhere'])) == 50304


def test_errors(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert 'must be a multiple of the 24 devices' in rejection(
        plan.main, ['config/train_neox_1.5b_adamw.py', '--gpus=24'])
    assert 'no such config file' in rejection(plan.main, ['config/train_neox_1.5b_lion.py'])
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert '--device=cpu' in rejection(plan.main, ['--measure'])
    for argv, words in ((['--gpus=0'], 'above 0'), (['--gpus=12'], 'multiple of --gpus_per_node'),
                        (['--batch_size', '4'], '--batch_size: flags for train.py are written --key=value')):
        with pytest.raises(SystemExit):
            plan.main(argv)
        assert words in capsys.readouterr().err


def test_measure_compares(capsys):
    plan.main(['--measure', '--device=cpu', '--model_size=tiny', '--n_layer=1', '--block_size=64', '--batch_size=2',
               '--total_batch_size=2', '--dataset=nowhere'])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ['GB', 'peak', 'parameters', 'optimizer']
