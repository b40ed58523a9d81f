"""Pre-train a GPT-2: one loop for every optimizer.

  python train.py config/quickstart.py                                   one process
  python train.py --model_size=125M --optimizer_name=sophiag             the paper's run, on one device
  torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_small_sophiag.py
  python train.py config/quickstart.py --show_config=True                what would be trained, and why

Config files apply in the order given, then flags --key=value.
"""

import math
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

try:
    import numpy  # noqa: F401 - which torch works without, and the data loader does not
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed: run make install, then .venv/bin/python train.py') from None

import configurator
import optimizers
from configurator import derived
from data.loader import TrainLoader, ValidationLoader, accumulation_steps, fingerprint, open_dataset
from hessian import Hook
from loss import set_compile
from model import GPT, GPTConfig, size_settings
from runtime import checkpoint, optim
from runtime import device as devices
from runtime.distributed import World, one_message, ranks_from_environment
from runtime.rng import DROPOUT, keyed_seed
from runtime.runlog import loss_spike
from runtime.signals import SafeStream, StopSignals
from runtime.speed import Speed
from runtime.start import adopt_model_args, close_run, find_start, finetunes, give_up, inherit_settings, open_log

# ----------------------------------------------------------------------------------------------------------------------
# Settings. A value `derived(type)` comes from the tables of model.py and optimizers.py, or from other settings.

# output
out_dir = 'out'  # where checkpoints, metrics.jsonl and config.json go
eval_interval = 2000  # iterations between evaluations
log_interval = 10  # iterations between lines of metrics
eval_iters = 0  # micro-batches of validation sequences, over all devices; 0 = the whole validation set
eval_only = False  # evaluate once and exit
always_save_checkpoint = True  # save after every evaluation, not only after the best one
keep_checkpoints = 2  # newest checkpoints that stay (at least 2), besides the best one
init_from = 'scratch'  # or 'resume', 'auto' (resume if there is a checkpoint), 'gpt2', …, or a Hugging Face folder
ignore_data_change = False  # resume although the data set is not the one trained on before
max_hours = 0.0  # save and stop after so many hours; 0 = no limit
skip_nonfinite = 0  # iterations in a row that may be skipped for a loss or gradient that is not finite; 0 = stop
show_config = False  # print every setting with its source, and exit
# wandb and trackio logging, optional
wandb_log = False  # mirror the metrics to Weights & Biases
wandb_project = 'sophia'  # its project
wandb_run_name = ''  # its run name; empty = out_dir
trackio_log = False  # mirror them to trackio, which keeps them on this machine; project and name as above
# data
dataset = 'openwebtext'  # a directory under data/, or a path
total_batch_size = 480  # sequences per iteration over all devices
batch_size = 12  # sequences per micro-batch of one device
gradient_accumulation_steps = 0  # micro-batches per device and iteration; 0 = derived from total_batch_size
block_size = 1024  # tokens per sequence
# model
model_size = '125M'  # row of the tables of sizes and peak learning rates
n_layer = derived(int)  # blocks
n_head = derived(int)  # attention heads per block
n_embd = derived(int)  # width
dropout = 0.0  # dropout probability
bias = False  # biases in linear layers and norms
scale_attn_by_inverse_layer_idx = derived(bool)  # divide attention logits by layer index + 1
# optimizer
optimizer_name = 'adamw'  # a row of the table in optimizers.py, or LIBRARY:CLASS (torch:NAdam, …)
optimizer_args = ''  # more arguments of a library's optimizer, 'betas=(0.9, 0.95), amsgrad=True'
learning_rate = derived(float)  # peak learning rate
weight_decay = derived(float)  # decoupled, on matrices only
beta1 = derived(float)  # EMA of the gradient
beta2 = derived(float)  # EMA of the second moment, of the Hessian (Sophia), of the momentum (Lion)
eps = derived(float)  # lower bound of the denominator (Sophia), or added to it (AdamW, AdaHessian)
gamma = derived(float)  # Sophia's γ in clip(m / max(γ·h, ε), 1)
hessian_interval = derived(int)  # k, iterations between Hessian estimates
hessian_batch_size = derived(int)  # sequences, over all devices, that an estimate uses
hessian_sequences = derived(str)  # of an estimate: 'own', the first of the mini-batch (the paper's), or 'fresh', others
hessian_bias_correction = derived(bool)  # Sophia: divide h by 1 − β2ⁿ after n estimates; not the paper's
grad_clip = 1.0  # clip gradients at this norm; 0 = off
# schedule
max_iters = 100000  # T, number of iterations
schedule = 'cosine'  # after the warm-up: 'cosine', 'linear', 'constant', or 'wsd', linear in the last fifth
decay_lr = True  # warm-up and schedule; False = learning_rate throughout
warmup_iters = 2000  # linear warm-up
lr_decay_iters = derived(int)  # iteration at which the decay ends
cooldown_iters = derived(int)  # length of the decay, which ends at lr_decay_iters; 0 = all after the warm-up
branch_cooldown = 0  # start a new run from init_from, a checkpoint of a 'wsd' run, and decay in so many
min_lr = derived(float)  # final learning rate
min_lr_ratio = 0.05  # final / peak learning rate, where min_lr is not given
# system
parallel = 'ddp'  # a copy on each device; 'fsdp': shards over all of them; 'hsdp': over those of each machine
activation_checkpointing = False  # keep each block's input only, compute the rest again in the backward pass
backend = derived(str)  # 'nccl' or 'gloo'
device = derived(str)  # 'cuda', 'cuda:1', 'cpu', 'mps'
dtype = derived(str)  # 'bfloat16', 'float16' (with loss scaling) or 'float32'
compile = derived(bool)  # torch.compile the model
seed = 1337  # of the initial weights, the data order, sampled labels and dropout

# Every number, text, bool and `derived` above is a setting.
DEFAULTS = {key: value for key, value in globals().items() if not key.startswith('_')}


# What fills in the settings that nobody has set, in this order; see configurator.derive.
TABLES = [
    size_settings,
    optimizers.unused_settings, optimizers.optimizer_settings, optimizers.learning_rate_settings,
    optimizers.attention_settings,
    lambda c: (dict(lr_decay_iters=c.max_iters), 'max_iters'),
    lambda c: (dict(cooldown_iters=c.lr_decay_iters // 5 if c.schedule == 'wsd' else 0), f'schedule {c.schedule}'),
    lambda c: (dict(min_lr=c.min_lr_ratio * c.learning_rate), 'min_lr_ratio × learning_rate'),
    lambda c: (dict(device='cuda' if torch.cuda.is_available() else 'cpu'), 'what this machine has'),
    lambda c: devices.device_defaults(c.device),
]


def resolve(argv):
    """The settings of `python train.py ARGV…`, a configurator.Config. SystemExit with one line when one is wrong."""
    c = configurator.configure(DEFAULTS, argv, script=__file__)
    inherit_settings(c)
    configurator.derive(c, TABLES)
    world_size = ranks_from_environment()[2]
    steps = accumulation_steps(c.total_batch_size, c.batch_size, world_size, c.gradient_accumulation_steps)
    c.set('gradient_accumulation_steps', steps, c.sources['gradient_accumulation_steps'])
    rounded = math.ceil(min(c.hessian_batch_size, c.total_batch_size) / world_size) * world_size
    if rounded != c.hessian_batch_size:
        c.set('hessian_batch_size', rounded, f'{c.hessian_batch_size} made to fit {c.total_batch_size} sequences on '
              f'{world_size} device(s)')
    c.require('dtype', c.parallel == 'ddp' or c.dtype != 'float16', f'bfloat16 or float32 for --parallel={c.parallel}')
    c.require('n_head', c.n_embd % c.n_head == 0, f'a divisor of n_embd = {c.n_embd}')
    c.require('schedule', c.schedule in SCHEDULES, f'one of {", ".join(SCHEDULES)}')
    decays = SCHEDULES[c.schedule](1.0) < 1
    c.require('cooldown_iters', decays or not c.cooldown_iters, f'0 for --schedule={c.schedule}')
    c.require('cooldown_iters', c.cooldown_iters <= c.lr_decay_iters, f'at most lr_decay_iters = {c.lr_decay_iters}')
    optimizers.check_settings(c)
    return c


# ----------------------------------------------------------------------------------------------------------------------
# The learning rate

# Schedule → the learning rate, from 1 (the peak) to 0 (min_lr), after the share t (0 to 1) of the decay.
SCHEDULES = {
    'cosine': lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    'linear': lambda t: 1 - t,
    'wsd': lambda t: 1 - t,
    'constant': lambda t: 1.0,
}


def learning_rate_at(c, iteration):
    """The learning rate of an iteration: linear warm-up, the peak until cooldown_iters are left if these are set, then
    c.schedule until lr_decay_iters, then min_lr (for 'constant' the peak). Without decay_lr not even a warm-up, as in
    nanoGPT."""
    if not c.decay_lr:
        return c.learning_rate
    if iteration < c.warmup_iters:
        return c.learning_rate * (iteration + 1) / (c.warmup_iters + 1)
    first = c.lr_decay_iters - c.cooldown_iters if c.cooldown_iters else c.warmup_iters
    left = SCHEDULES[c.schedule](min(1.0, max(0.0, (iteration - first) / max(1, c.lr_decay_iters - first))))
    return c.learning_rate if left == 1 else c.min_lr + left * (c.learning_rate - c.min_lr)  # the peak exactly


# ----------------------------------------------------------------------------------------------------------------------
# The run: what a step works with, and where it is


@dataclass
class Run:
    """What a training step works with. `model` is what training calls: `raw_model`, perhaps compiled and wrapped."""
    config: configurator.Config
    world: World
    raw_model: GPT
    model: Any
    optimizer: torch.optim.Optimizer
    hessian: Hook
    scaler: torch.amp.GradScaler
    autocast: Any
    params: list


def set_up(c, world, model):
    """The `Run` of a model: it is moved to its devices, compiled and wrapped as the settings `c` say."""
    set_compile(c.compile)
    autocast = devices.autocast(world.device, c.dtype)
    wrapped = world.wrap(model, model.transformer.h, c.compile, c.activation_checkpointing,
                         devices.DTYPES[c.dtype] if c.dtype != 'float32' else None)
    optimizer = optimizers.build_optimizer(
        c.optimizer_name, optimizers.parameter_groups(model, c.weight_decay, c.optimizer_name), lr=c.learning_rate,
        compile=c.compile, **{key: c.values[key] for key in optimizers.NEUTRAL})
    params = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in optim.parameters(optimizer)} == {id(p) for p in params}
    hessian = optimizers.build_hook(
        c.optimizer_name, model, optimizer, seed=c.seed, interval=c.hessian_interval, batch_size=c.hessian_batch_size,
        fresh=c.hessian_sequences == 'fresh', rank=world.rank, world_size=world.size,
        accumulation_steps=c.gradient_accumulation_steps, autocast=autocast, compile=c.compile)
    scaler = torch.amp.GradScaler(world.device.type, enabled=c.dtype == 'float16')
    model.train()
    return Run(c, world, model, wrapped, optimizer, hessian, scaler, autocast, params)


def make_model(c, world, start, data, fingerprints):
    """The GPT with random or pretrained weights; those of a checkpoint are restored later.

    SystemExit with one line when the checkpoint of `start` does not fit the settings, or the `data` the weights.
    """
    torch.manual_seed(c.seed)
    with world.exit_together():
        model, defaults = None, asdict(GPTConfig())
        if finetunes(c):
            model = GPT.from_pretrained(c.init_from, c.block_size, c.dropout)
            args = adopt_model_args(c, asdict(model.config), data)
        elif start.finetuned:
            saved = {key: start.saved['model_args'].get(key, default) for key, default in defaults.items()}
            args = adopt_model_args(c, saved, data)
        else:
            args = asdict(GPTConfig.from_settings(c.values, data.vocab_size))
        if start.saved:
            start.compare(c, args, fingerprints, defaults)
        return model or GPT(GPTConfig(**args))


@dataclass
class TrainState:
    """Where a run is; saved and restored as a whole."""
    iter: int = 0  # iterations made, skipped ones among them
    tokens: int = 0
    seconds: float = 0.0  # spent in iterations
    clipped: int = 0  # iterations whose gradient was clipped
    skipped_in_a_row: int = 0  # iterations, up to now, whose loss or gradient was not finite
    best_val_loss: float = float('inf')  # the lowest
    last_eval_iter: int = -1
    latest_losses: list = field(default_factory=list)  # up to 100


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def evaluate(run, val_data, stops, progress=iter):
    """Mean loss over the validation sequences, each rank its share, one reduction at the end.

    None when a rank was asked to stop meanwhile; then the resumed run evaluates again. `progress` passes the batches
    on, and may show how far they are.
    """
    c, world = run.config, run.world
    run.raw_model.eval()
    total = world.zeros(3)  # the sum of losses, their number, requests to stop
    batches = ValidationLoader(val_data, c.eval_iters * c.batch_size, c.batch_size, c.block_size, world.rank,
                               world.size, world.device)
    for X, Y in progress(batches):
        if world.any_if_sharded(stops.stop):
            total[2] = 1
            break
        with run.autocast:
            mean_loss = run.model(X, Y, return_logits=False)[1]
        count = (Y >= 0).sum()
        total[:2] += torch.stack((torch.where(count > 0, mean_loss.to(total) * count, 0), count.to(total)))
    run.raw_model.train()
    loss_sum, count, stopping = world.sum(total).tolist()
    return None if stopping else loss_sum / count


# ----------------------------------------------------------------------------------------------------------------------
# The training step


class Step(NamedTuple):
    """What a training step has found."""
    loss: float  # mean over the mini-batch
    grad_norm: float  # before clipping
    estimated: bool  # whether it estimated the Hessian
    problem: str  # why the update was skipped, or ''
    overflow: bool  # whether that was an overflow of float16's loss scaling
    requests: list  # how many ranks made each of the `requests`
    losses: torch.Tensor  # this rank's shares of `loss`, by micro-batch


def train_step(run, sequences, iter_num, requests=()):
    """One iteration of Algorithm 3: the gradient of the mini-batch, clipping, the Hessian every k iterations, the
    update.

    Args:
        sequences: (B, block_size + 1) token ids, this rank's share of the mini-batch; after these its share of the
            hook's `fresh_sequences`, if there are any.
        requests: this rank's requests to stop or to save, 0.0 or 1.0 each: they travel with the loss.

    Nothing enters the optimizer's state or the weights unless loss, gradient and estimate are finite.
    """
    c, world, hessian, optimizer = run.config, run.world, run.hessian, run.optimizer
    torch.manual_seed(keyed_seed(c.seed, DROPOUT, iter_num, world.rank))
    estimating = hessian.start(iter_num)
    loss_scale = run.scaler.get_scale()  # 1 unless float16
    n_fresh = hessian.fresh_sequences(iter_num) // world.size
    own, fresh = sequences.split([len(sequences) - n_fresh, n_fresh])
    for tokens in fresh.split(c.batch_size) if n_fresh else ():  # for the estimate alone
        world.set_gradient_sync(run.model, False, estimating)
        hessian.add_fresh(run.model, tokens[:, :-1], tokens[:, 1:], loss_scale)

    micro_batches, losses = own.split(c.batch_size), []
    for micro_step, tokens in enumerate(micro_batches):
        X, Y = tokens[:, :-1], tokens[:, 1:]
        world.set_gradient_sync(run.model, micro_step == len(micro_batches) - 1, estimating)
        with run.autocast:
            # Through the hook, which may sample labels from the same logits. Divided because gradients add up. A term
            # added here escapes evaluation and Sophia-H: it belongs at the end of GPT.forward, or in loss.py.
            loss = hessian.forward(run.model, X, Y) / len(micro_batches)
        hessian.backward(loss_scale)
        run.scaler.scale(loss).backward()
        losses.append(loss.detach())

    # All ranks learn the loss and the requests by one reduction, and the device is asked once.
    run.scaler.unscale_(optimizer)
    grad_norm = optim.clip_gradients(run.params, c.grad_clip)
    losses = torch.stack(losses)
    shared = world.sum(torch.stack([losses.sum() / world.size, *(losses.new_full((), n) for n in requests)]))
    mean_loss, *requested, grad_norm = torch.cat((shared, grad_norm.view(1))).tolist()

    problem, overflow = '', False
    if not math.isfinite(mean_loss):
        problem = 'the loss is not finite'
    elif not math.isfinite(grad_norm):
        problem, overflow = 'the gradient is not finite', run.scaler.is_enabled()
    else:
        try:
            hessian.finish(loss_scale)
        except FloatingPointError as error:
            problem = str(error)
        else:
            torch.manual_seed(keyed_seed(c.seed, DROPOUT, iter_num))  # an optimizer that draws: alike on every rank
            run.scaler.step(optimizer)
    run.scaler.update()
    world.zero_grad(optimizer)
    return Step(mean_loss, grad_norm, estimating, problem, overflow, requested, losses)


# ----------------------------------------------------------------------------------------------------------------------
# The loop


def main(argv):
    """Trains as the config files and flags `argv` say. SystemExit with one line where they are invalid."""
    sys.stdout, sys.stderr = SafeStream(sys.stdout), SafeStream(sys.stderr)
    with one_message():
        c = resolve(argv)
    if c.show_config:
        print('\n'.join(c.lines(everything=True)))
        return

    # Devices, data, model
    world = World(c.device, c.backend, c.parallel)
    torch.set_float32_matmul_precision('high')  # TF32 where the hardware has it
    torch.set_flush_denormal(True)  # sharp attention produces many, and they halve the speed of a CPU
    with world.exit_together():
        train_data, val_data = open_dataset(c.dataset, c.block_size)
    fingerprints = dict(train=train_data.fingerprint(), val=fingerprint([*val_data.values()]))
    start = find_start(world, c)
    raw_model = make_model(c, world, start, train_data, fingerprints)
    run, state = set_up(c, world, raw_model), TrainState()
    if start.saved:
        with world.exit_together():
            checkpoint.restore(start.path, start.saved, raw_model, run.optimizer, run.scaler)
        optim.back_to_training(run.optimizer)
        state = TrainState(**start.saved['train_state'])
        if not start.losses_are_comparable(c, fingerprints):
            state.best_val_loss, state.last_eval_iter = float('inf'), -1
        start.saved = None  # frees the memory

    with world.exit_together():
        log = open_log(c, world, start, state, raw_model, train_data, fingerprints)

    def record(line, **metrics):
        log.write(dict(iter=state.iter, tokens=state.tokens, time=round(state.seconds, 3), **metrics), line)

    def save(best=False):
        if not optim.global_norm(run.params).isfinite():
            give_up(c, world, log, state.iter, 'the parameters are not finite')
        with optim.evaluating(run.optimizer):
            saved_as = checkpoint.save_run(world, c.out_dir, raw_model, run.optimizer, dict(
                model_args=raw_model.config.model_args(), iter_num=state.iter, best_val_loss=state.best_val_loss,
                config=c.values, train_state=asdict(state), scaler=run.scaler.state_dict(), data=fingerprints,
                tokenizer=train_data.tokenizer, finetuned=finetunes(c) or start.finetuned, changes=start.changes),
                best, c.keep_checkpoints)
        if saved_as:
            log.print(f'saved {saved_as}')
        return saved_as is not None

    if start.branch:
        record(f'a branch of {start.path}', branched_from=c.init_from)
    loader = TrainLoader(train_data, c.seed, c.total_batch_size, c.block_size, world.rank, world.size, world.device,
                         state.iter, run.hessian.fresh_sequences)
    tokens_per_iter = c.total_batch_size * c.block_size
    speed = Speed(raw_model.flops_per_token() * tokens_per_iter, tokens_per_iter, world)
    stops = StopSignals(c.max_hours, speaks=world.is_master, saves=not c.eval_only)
    stopping, is_saved = False, True

    while True:
        lr = learning_rate_at(c, state.iter)
        optim.set_learning_rate(run.optimizer, lr)

        # Once in a while, and at the end: evaluate on the validation set, and save.
        last = state.iter == c.max_iters
        eval_due = (last or state.iter % c.eval_interval == 0) and state.last_eval_iter != state.iter
        if c.eval_only or (eval_due and not stopping):
            with optim.evaluating(run.optimizer):
                losses = {name: evaluate(run, data, stops, log.evaluating) for name, data in val_data.items()}
            stopping = None in losses.values()
            if not stopping:
                state.last_eval_iter = state.iter
                val_loss = sum(data.weight * losses[name] for name, data in val_data.items())
                parts = {f'val/loss/{name}': part for name, part in losses.items() if len(losses) > 1}
                record(f'iter {state.iter}: val loss {val_loss:.4f}', **{'val/loss': val_loss}, **parts)
                best = val_loss < state.best_val_loss
                if state.iter > 0 and not c.eval_only and (best or last or c.always_save_checkpoint):
                    lowest, state.best_val_loss = state.best_val_loss, min(state.best_val_loss, val_loss)
                    is_saved = save(best)
                    if not is_saved:
                        state.best_val_loss = lowest  # of what was saved
        if stopping or state.iter >= c.max_iters or c.eval_only:
            break

        started = time.perf_counter()
        step = train_step(run, next(loader), state.iter, stops.poll())
        stopping, save_now = map(bool, step.requests)
        if step.problem:
            state.skipped_in_a_row += 1
            where = loader.describe(state.iter, world.gather(step.losses))
            # float16's loss scale starts at 2^16 and is halved at each overflow: up to 40 in a row are no fault.
            if state.skipped_in_a_row > (max(c.skip_nonfinite, 40) if step.overflow else c.skip_nonfinite):
                give_up(c, world, log, state.iter, f'{step.problem} ({where})',
                        f', or skip it by --skip_nonfinite={state.skipped_in_a_row}')
            if not step.overflow:
                log.print(f'iter {state.iter}: {step.problem}; skipped ({where})')
        else:
            state.skipped_in_a_row = 0
            state.clipped += bool(c.grad_clip and c.grad_clip < step.grad_norm)
            usual = loss_spike(state.latest_losses, step.loss)
            if usual is not None:
                record(f'iter {state.iter}: loss spike, {step.loss:.4f} after {usual:.4f}', loss_spike=step.loss)
        seconds = time.perf_counter() - started
        speed.add(seconds, step.estimated)
        state.seconds += seconds

        if state.iter % c.log_interval == 0 or state.iter == c.max_iters - 1:
            measured = dict(optimizers.optimizer_metrics(run.optimizer), param_norm=optim.global_norm(run.params))
            metrics = {'train/loss': step.loss, 'lr': lr, 'grad_norm': step.grad_norm,
                       'grad_clipped': state.clipped / (state.iter + 1),
                       **dict(zip(measured, torch.stack([*measured.values()]).tolist())), **speed.metrics()}
            record(log.progress_line(state.iter, metrics), **metrics)
        log.update(step.loss)
        state.tokens += tokens_per_iter
        state.iter += 1
        if save_now and not stopping:
            save()

    loader.close()
    if stopping and state.iter > 0 and not c.eval_only:
        is_saved = save()
    close_run(c, world, log, state.iter, state.best_val_loss, is_saved,
              (stops.reason or 'another rank') if stopping else '')


if __name__ == '__main__':
    main(sys.argv[1:])
