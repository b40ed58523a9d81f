"""scripts/plan.py: its memory against what real steps allocate on CPU, its costs against formulas, its refusals."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import needs_compiler, refusal
from torch.testing._internal.distributed.fake_pg import FakeStore

import configurator
import optimizers
import sophia
from model import GPT
from scripts import plan

# Vocabulary, layers, tokens, sequences, width, heads: blocks, weights or logits are what most of the memory is for.
BLOCKS, WEIGHTS, LOGITS = (512, 4, 256, 2, 128, 4), (64, 4, 64, 2, 256, 4), (4096, 2, 128, 2, 128, 2)


def settings(shape, *flags, accumulation=1, ranks=1):
    """(train.py's settings for a model of this shape on CPU, its vocabulary)."""
    vocab_size, L, T, B, C, H = shape
    return configurator.resolve([
        '--model_size=tiny', '--device=cpu', f'--n_layer={L}', f'--n_head={H}', f'--n_embd={C}', f'--block_size={T}',
        f'--batch_size={B}', f'--total_batch_size={B * accumulation * ranks}', '--hessian_interval=5',
        '--learning_rate=1e-3', *flags]).values, vocab_size


def hold(values, vocab_size, ranks=1, per_node=1, rel=0.1):
    """The plan's peak is within `rel` of the measured one, and each of its largest terms is right by itself."""
    measured = plan.measure(values, vocab_size)
    moments = plan.memory(values, vocab_size, ranks, per_node)
    assert plan.peak(moments)[1] == pytest.approx(measured['peak'], rel=rel)
    after = moments['after the forward pass']
    assert after['parameters'] == measured['parameters']
    assert after['optimizer state'] == pytest.approx(measured['optimizer'], rel=0.001)
    kept = sum(after.get(term, 0) for term in ('activations', 'loss', 'copies'))
    assert kept == pytest.approx(measured['activations'], rel=0.06)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('checkpointing', [False, True])
@pytest.mark.parametrize('shape, name, accumulation', [
    (BLOCKS, 'adamw', 1), (BLOCKS, 'sophiag', 2), (WEIGHTS, 'sophiag', 1), (WEIGHTS, 'lion', 2),
    (LOGITS, 'ef_clip', 1)])
def test_memory_is_what_a_step_allocates(shape, name, accumulation, checkpointing, dtype):
    hold(*settings(shape, f'--optimizer_name={name}', f'--dtype={dtype}', f'--activation_checkpointing={checkpointing}',
                   accumulation=accumulation))


@needs_compiler
def test_memory_of_a_compiled_model():
    """Most of it logits and their softmax. (In 16 bits code compiled for CPUs keeps one more copy of them.)"""
    hold(*settings((16384, 1, 64, 8, 64, 1), '--optimizer_name=sophiag', '--compile=True'))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('shape, name, room', [
    ((512, 2, 256, 2, 128, 4), 'sophiah', 2 ** 29), ((512, 2, 256, 2, 128, 4), 'sophiah', 2 ** 19),
    (WEIGHTS, 'adahessian', 2 ** 29), (LOGITS, 'sophiah', 2 ** 29)])
def test_memory_of_a_hessian_vector_product(monkeypatch, shape, name, room, dtype):
    monkeypatch.setattr(optimizers, 'ATTENTION_WEIGHTS', room)  # for both sequences at once, or one at a time
    hold(*settings(shape, f'--optimizer_name={name}', f'--dtype={dtype}'), rel=0.04)


@pytest.fixture
def pretended_ranks(monkeypatch):
    """Has this process be rank 0 of eight on two machines whose other ranks send nothing (PyTorch's fake backend)."""
    for key, value in dict(RANK='0', LOCAL_RANK='0', WORLD_SIZE='8', LOCAL_WORLD_SIZE='4').items():
        monkeypatch.setenv(key, value)
    initialize = dist.init_process_group
    monkeypatch.setattr(dist, 'init_process_group',
                        lambda *args, **kwargs: initialize('fake', rank=0, world_size=8, store=FakeStore()))
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    # What was never sent may be anything.
    monkeypatch.setattr(sophia, 'may_enter', lambda *args: True)


@pytest.mark.parametrize('checkpointing', [False, True])
@pytest.mark.parametrize('shape, name, parallel, dtype', [
    (BLOCKS, 'sophiag', 'fsdp', 'bfloat16'), (WEIGHTS, 'adamw', 'fsdp', 'float32'),
    (WEIGHTS, 'sophiag', 'hsdp', 'bfloat16'), (LOGITS, 'lion', 'hsdp', 'float32')])
def test_memory_of_shards(pretended_ranks, shape, name, parallel, dtype, checkpointing):
    hold(*settings(shape, f'--optimizer_name={name}', f'--parallel={parallel}', f'--dtype={dtype}',
                   f'--activation_checkpointing={checkpointing}', accumulation=2, ranks=8), ranks=8, per_node=4)


# ----------------------------------------------------------------------------------------------------------------------


def plans(tmp_path, *argv):
    plan.main([*map(str, argv), f'--output={tmp_path / "plan.json"}'])
    return json.loads((tmp_path / 'plan.json').read_text())['plans']


def option(entry, parallel, checkpointing=False):
    return next(one for one in entry['options']
                if (one['parallel'], one['activation_checkpointing']) == (parallel, checkpointing))


def test_plan_of_the_papers_largest_model(tmp_path, capsys):
    config = 'config/train_neox_6.6b_sophiag.py'
    eight, = plans(tmp_path, config, '--gpus=8', '--gpu=h100', '--mfu=0.5')
    P, tokens = eight['parameters'], 1024 * 2048
    assert float(f'{P:.2e}') == 6.66e9
    assert sum(eight['state_bytes'].values()) == 16 * P
    with torch.device('meta'):
        model = GPT(plan.shape_of(configurator.resolve([config, '--device=cuda']).values, 50304))
    work = eight['flops_per_step']
    assert work['gradient'] == model.flops_per_token() * tokens
    assert work['hessian'] == pytest.approx(work['gradient'] / 2 * 2 / 3 / 10)  # half of the sequences, every 10 steps
    chosen = option(eight, 'fsdp')
    assert chosen['chosen'] and chosen['fits'] and not option(eight, 'ddp')['fits']
    assert chosen['seconds_per_step'] == pytest.approx((work['gradient'] + work['hessian']) / (8 * 989e12 * 0.5))
    assert chosen['days'] == pytest.approx(chosen['seconds_per_step'] * 100_000 / 86400)
    assert chosen['moments']['update']['parameters'] == 4 * P / 8
    assert option(eight, 'fsdp', True)['peak_bytes'] < chosen['peak_bytes']
    assert 1024 // 8 % chosen['largest_batch_size'] == 0 and chosen['largest_peak_bytes'] <= eight['limit_bytes']
    printed = capsys.readouterr().out
    assert '6,657,150,976 parameters' in printed and 'fsdp *' in printed

    # More GPUs: less of the states on each, the same FLOPs.
    sixty_four, = plans(tmp_path, config, '--gpus=64', '--gpu=h100', '--mfu=0.5')
    assert option(sixty_four, 'fsdp')['moments']['update']['parameters'] == 4 * P / 64
    assert option(sixty_four, 'hsdp')['moments']['update']['parameters'] == 4 * P / 8
    assert sixty_four['flops_per_step'] == work


def test_bytes_that_ranks_send(tmp_path):
    flags = ['config/train_neox_1.5b_adamw.py', '--gpus=16', '--gpu=a100', '--batch_size=4', '--network=100']
    entry, = plans(tmp_path, *flags)
    P, micro_batches = entry['parameters'], 512 // 16 // 4
    ddp, fsdp, hsdp = (option(entry, parallel) for parallel in ('ddp', 'fsdp', 'hsdp'))
    assert ddp['sent_bytes']['all-reduce of gradients'] == pytest.approx(2 * 15 / 16 * 4 * P)
    assert ddp['communication_seconds'] == pytest.approx(2 * 15 / 16 * 4 * P / 100e9)
    assert fsdp['sent_bytes']['reduce-scatter of gradients'] == pytest.approx(15 / 16 * 4 * P * micro_batches)
    gathered = fsdp['sent_bytes']['all-gather of parameters'] / (15 / 16 * 2 * P * micro_batches)
    assert 1.9 < gathered < 2  # forward and backward, but for embeddings and head, which stay
    assert hsdp['sent_bytes']['reduce-scatter of gradients'] == pytest.approx(7 / 8 * 4 * P * micro_batches)
    assert hsdp['sent_bytes']['all-reduce between nodes'] == pytest.approx(4 * P)
    assert ddp['communication_share'] == ddp['communication_seconds'] / ddp['seconds_per_step']


def test_hutchinson_is_planned_for_replicas_only(tmp_path):
    entry, = plans(tmp_path, 'config/train_gpt2_large_sophiah.py', '--gpus=8', '--batch_size=12')
    assert [o['parallel'] for o in entry['options']] == ['ddp']
    alone, = plans(tmp_path, 'config/train_gpt2_small_adamw.py', '--gpus=1')
    assert alone['options'][0]['sent_bytes'] == {} and alone['options'][0]['communication_share'] == 0


def test_refusals(monkeypatch, capsys):
    assert 'must be a multiple of the 24 devices' in refusal(
        plan.main, ['config/train_neox_1.5b_adamw.py', '--gpus=24'])
    assert 'no such config file' in refusal(plan.main, ['config/train_neox_1.5b_lion.py'])
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert '--device=cpu' in refusal(plan.main, ['--measure'])
    for argv, words in ((['--gpus=0'], 'above 0'), (['--gpus=12'], 'multiple of --gpus_per_node'),
                        (['--batch_size', '4'], '--batch_size: flags for train.py are written --key=value')):
        with pytest.raises(SystemExit):
            plan.main(argv)
        assert words in capsys.readouterr().err


def test_measure_compares(capsys):
    plan.main(['--measure', '--device=cpu', '--model_size=tiny', '--n_layer=1', '--block_size=64', '--batch_size=2',
               '--total_batch_size=2', '--dataset=pysource'])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ['GB', 'peak', 'parameters', 'optimizer', 'activations']
