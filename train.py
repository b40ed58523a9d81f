"""Pre-train a GPT-2: the settings, the learning rate, the training step, evaluation, and one loop for every optimizer.
Edit any of these here; the model, the loss, the estimates and the optimizers have files of their own.

  python train.py config/quickstart.py                                   one process
  python train.py --model_size=125M --optimizer_name=sophiag             the paper's run, on one device
  torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_small_sophiag.py
  python train.py config/quickstart.py --show_config=True                every setting and its source

Config files apply in the order given, then flags --key=value.
"""

import math
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import configurator
import model as models
import optimizers
from configurator import setting
from data.loader import TrainLoader, ValidationLoader, fingerprint, open_dataset
from hessian import StepHook
from lifecycle import guards
from lifecycle.resume import check_command, find_origin, finetunes, pretrained_model
from lifecycle.run import Rest, abort, build_buckets, check_step, close_run, log_metrics, not_finite, open_log, save
from loss import Losses, cross_entropy
from model import GPT, GPTConfig
from runtime import checkpoint, optim
from runtime import device as devices
from runtime.distributed import World, one_message, ranks_from_environment
from runtime.gpt import HUB_MODELS, config_of, evaluation_mode, flops_per_token, model_args
from runtime.rng import DROPOUT, LOOP, keyed_seed, seed_all
from runtime.signals import StopSignals, protect_streams, undo_at_end
from runtime.speed import Speed

SIZES = getattr(models, 'SIZES', {})  # nanoGPT's model.py, which also works here, has no such table

# ----------------------------------------------------------------------------------------------------------------------
# Settings. `setting(value)` has that default; `setting(type)` has none, and `derive` fills it in. Roles matter when a
# run is resumed or compared. 'model' (a field of GPTConfig), 'protocol' and the fingerprint of 'data' must agree.
# 'tuned', the default role, and 'horizon' may differ. Runs are averaged over 'chance'. 'eval' and 'run' do not affect
# training. 'horizon' may also change on resume, before the learning rate decays.

# output
out_dir = setting('out', role='run')  # directory for checkpoints, metrics.jsonl and config.json
eval_interval = setting(2000, at_least=1, role='run')  # iterations between evaluations
log_interval = setting(10, at_least=1, role='run')  # iterations between lines of metrics
eval_iters = setting(0, at_least=0, role='eval')  # nanoGPT's name: sets eval_sequences to this × total_batch_size
eval_sequences = setting(int, at_least=0, role='eval')  # sequences of each validation set to evaluate on; 0 = all
eval_only = setting(False, role='run')  # evaluate and exit: pretrained weights of init_from, else the newest checkpoint
always_save_checkpoint = setting(True, role='run')  # save after every evaluation, not only after the best one
keep_checkpoints = setting(2, at_least=2, role='run')  # newest checkpoints to keep, in addition to the best one
init_from = setting('scratch', role='protocol')  # resume; or weights: gpt2, …, a Hugging Face folder, another out_dir
auto_resume = setting(False, role='run')  # resume if out_dir has a checkpoint; if not, start from init_from
ignore_data_change = setting(False, role='run')  # resume although the data set is not the one trained on before
max_hours = setting(0.0, at_least=0, role='run')  # save and stop after this many hours; 0 = no limit
skip_nonfinite = setting(0, at_least=0, role='chance')  # iterations in a row to skip if loss or gradient is not finite
show_config = setting(False, role='run')  # print every setting with its source, and exit
# wandb logging, optional
wandb_log = setting(False, role='run')  # mirror the metrics to Weights & Biases
wandb_project = setting('sophia', role='run')  # W&B project
wandb_run_name = setting('', role='run')  # W&B run name; empty = out_dir
# data
dataset = setting('openwebtext', role='data')  # a directory under data/, or a path; A:0.7,B:0.3 is a mixture
total_batch_size = setting(480, at_least=1, role='protocol')  # sequences per iteration, over all devices
batch_size = setting(15, at_least=1, role='run')  # sequences per micro-batch of one device
gradient_accumulation_steps = setting(0, at_least=0, role='run')  # micro-batches per device and iteration; 0 = derived
block_size = setting(1024, at_least=1, role='model')  # tokens per sequence
# model
model_size = setting('125M', choices=SIZES)  # key in the tables of sizes and peak learning rates
n_layer = setting(int, at_least=1, role='model')  # blocks
n_head = setting(int, at_least=1, role='model')  # attention heads per block
n_embd = setting(int, at_least=1, role='model')  # width
dropout = setting(0.0, at_least=0, below=1, role='model')  # dropout probability
bias = setting(False, role='model')  # biases in linear layers and norms
scale_attn_by_inverse_layer_idx = setting(bool, role='model')  # divide attention logits by layer index + 1
# optimizer
optimizer_name = 'adamw'  # a name in optimizers.py's table, or LIBRARY:CLASS (torch:NAdam, …)
optimizer_args = ''  # extra arguments for a library's optimizer, such as 'nesterov=True, momentum=0.9'
learning_rate = setting(float, at_least=0)  # peak learning rate
weight_decay = setting(float, at_least=0)  # decoupled, on matrices only
beta1 = setting(float, at_least=0, below=1)  # EMA of the gradient
beta2 = setting(float, at_least=0, below=1)  # EMA of the second moment, Hessian (Sophia), momentum (Lion)
eps = setting(float, at_least=0)  # lower bound of the denominator (Sophia), or added to it (AdamW, …)
gamma = setting(float, at_least=0)  # Sophia's γ in clip(m / max(γ·h, ε), 1)
hessian_interval = setting(int, at_least=0)  # k, iterations between Hessian estimates
hessian_batch_size = setting(int, at_least=0)  # sequences of the mini-batch that an estimate uses, over all devices
hessian_parts = setting(int, at_least=0)  # number of parts that are squared separately; 1 = Algorithm 2
hessian_clip = setting(float, at_least=0)  # clip ĝ at this norm before it is squared; 0 = off, official script: 1
grad_clip = setting(1.0, at_least=0, role='protocol')  # clip gradients at this norm; 0 = off
# schedule
max_iters = setting(100000, at_least=1, below=10 ** 10, role='horizon')  # T, number of iterations
schedule = setting('cosine', choices=('cosine', 'linear', 'constant', 'wsd'), role='protocol')  # see `learning_rate_at`
decay_lr = setting(True, role='protocol')  # warm-up and schedule; False = learning_rate throughout
warmup_iters = setting(2000, at_least=0)  # linear warm-up
lr_decay_iters = setting(int, at_least=0, role='horizon')  # iteration at which the decay ends
cooldown_iters = setting(int, at_least=0, role='horizon')  # iterations of decay; 0 = all after the warm-up
min_lr = setting(float, at_least=0)  # final learning rate
min_lr_ratio = setting(0.05, at_least=0)  # final / peak learning rate, if min_lr is not given
# system
parallel = setting('ddp', choices=('ddp', 'fsdp', 'hsdp'), role='run')  # fsdp: shards; hsdp: shards within each machine
activation_checkpointing = setting(False, role='run')  # store only each block's input, and recompute the rest
backend = setting(str, choices=('nccl', 'gloo'), role='run')  # backend of torch.distributed
device = setting(str, role='run')  # cuda, cuda:1, cpu or mps
dtype = setting(str, choices=tuple(devices.DTYPES), role='protocol')  # precision of matmuls; float32 disables TF32
compile = setting(bool, role='run')  # torch.compile the model
seed = setting(1337, at_least=-2 ** 63, below=2 ** 64, role='chance')  # seeds weights, data, sampled labels, dropout

# All settings above: names in capitals are constants.
DEFAULTS = {key: value for key, value in globals().items() if isinstance(value, configurator.Setting) or (
    isinstance(value, (bool, int, float, str)) and not key.isupper() and not key.startswith('_'))}


def resolve(argv, world_size=None):
    """Return the `Config` of `python train.py ARGV…` on `world_size` ranks, by default torchrun's number."""
    c = configurator.configure(DEFAULTS, argv, __file__)
    derive(c, world_size or ranks_from_environment()[2])
    return c


def derive(c, ranks):
    """Set the settings that neither a config file nor a flag has set. Exit if settings conflict."""
    if finetunes(c) and c.init_from not in HUB_MODELS:
        c.require('init_from', Path(c.init_from).is_dir() or checkpoint.exists(c.init_from),
                  f'scratch, resume, {", ".join(HUB_MODELS)}, a Hugging Face folder, an out_dir, or a checkpoint')
    c.fill(SIZES.get(c.model_size, {}), f'model size {c.model_size}')
    if None in (c.n_layer, c.n_head, c.n_embd):
        raise SystemExit('model.py: has no table SIZES; set --n_layer, --n_head and --n_embd')
    c.require('n_head', c.n_embd % c.n_head == 0, f'a divisor of n_embd = {c.n_embd}')
    optimizers.fill_settings(c)
    for key in c.having('model') - {one.name for one in fields(GPTConfig)}:
        c.require(key, not getattr(c, key), f'{c.declared[key].type()} because GPTConfig in model.py has no {key}')
    if 'learning_rate' not in c.given:
        if finetunes(c) and not c.eval_only:
            raise SystemExit(f'--init_from={c.init_from}: set --learning_rate; the table is for training from scratch')
        lr, table = optimizers.peak_learning_rate(c.optimizer_name, c.model_size)
        if lr is None:
            raise SystemExit(f'{table} has no learning rate for {c.optimizer_name} at {c.model_size}; set '
                             '--learning_rate')
        c.fill(dict(learning_rate=lr), f'{table}: {c.optimizer_name}, {c.model_size}')

    c.fill(dict(lr_decay_iters=c.max_iters), 'max_iters')
    most = max(0, c.lr_decay_iters - c.warmup_iters)
    cooldown = min(most, c.lr_decay_iters // 5) if c.schedule == 'wsd' else 0
    c.fill(dict(cooldown_iters=cooldown), f'schedule {c.schedule}')
    c.fill(dict(min_lr=c.min_lr_ratio * c.learning_rate), 'min_lr_ratio × learning_rate')
    c.require('min_lr', c.min_lr <= c.learning_rate or not c.decay_lr, f'at most learning_rate = {c.learning_rate}')
    c.require('cooldown_iters', c.schedule != 'constant' or not c.cooldown_iters, '0 for --schedule=constant')
    c.require('cooldown_iters', c.cooldown_iters <= most or not c.decay_lr,
              f'at most {most}, because the decay ends at {c.lr_decay_iters} and the warm-up at {c.warmup_iters}')

    c.fill(dict(device='cuda' if torch.cuda.is_available() else 'cpu'), 'this machine')
    c.fill(*devices.device_defaults(c.device))
    c.require('dtype', c.parallel == 'ddp' or c.dtype != 'float16', f'bfloat16 or float32 for --parallel={c.parallel}')
    optimizers.check_settings(c)
    share, rest = divmod(c.total_batch_size, ranks)
    c.require('total_batch_size', not rest, f'a multiple of {ranks}, the number of devices')
    steps, rest = divmod(share, c.batch_size)
    micro_steps = c.gradient_accumulation_steps or 1
    wanted = (f'; for {micro_steps} × {c.batch_size} sequences on each set total_batch_size = '
              f'{micro_steps * c.batch_size * ranks}')
    c.require('batch_size', not rest, f'a divisor of {share}, the sequences of each device{wanted}')
    c.require('gradient_accumulation_steps', c.gradient_accumulation_steps in (0, steps),
              f'0 or {steps}: total_batch_size = {c.total_batch_size} / ({c.batch_size} × {ranks} devices){wanted}')
    c.set('gradient_accumulation_steps', steps, 'total_batch_size / (batch_size × devices)')
    optimizers.fit_estimate(c, ranks)
    overridden = c.sources['eval_iters'] == 'flag' and c.sources['eval_sequences'] != 'flag'
    if overridden or 'eval_sequences' not in c.given:
        c.set('eval_sequences', c.eval_iters * c.total_batch_size, 'eval_iters × total_batch_size')


def learning_rate_at(c, iteration):
    """Return the learning rate of an iteration.

    It rises linearly in the warm-up, and stays at the peak until cooldown_iters are left, if these are set ('wsd': a
    fifth of the run). Then it decays to min_lr at lr_decay_iters, as half a cosine or linearly. 'constant' keeps the
    peak. Without decay_lr there is no warm-up either, as in nanoGPT.
    """
    if not c.decay_lr:
        return c.learning_rate
    if iteration < c.warmup_iters:
        return c.learning_rate * (iteration + 1) / (c.warmup_iters + 1)
    decay_start = c.lr_decay_iters - c.cooldown_iters if c.cooldown_iters else c.warmup_iters
    if c.schedule == 'constant' or iteration <= decay_start:
        return c.learning_rate
    decay_ratio = min(1.0, (iteration - decay_start) / max(1, c.lr_decay_iters - decay_start))
    coeff = 0.5 * (1 + math.cos(math.pi * decay_ratio)) if c.schedule == 'cosine' else 1 - decay_ratio
    return c.min_lr + coeff * (c.learning_rate - c.min_lr)


# ----------------------------------------------------------------------------------------------------------------------
# The run


@dataclass(slots=True)
class TrainState:
    """The progress of a run, saved and restored as a whole. It holds only plain numbers and lists. Tensors belong in
    the model's buffers or the optimizer's state."""
    iter: int = 0  # iterations made, including skipped ones
    tokens: int = 0
    seconds: float = 0.0  # time spent in iterations
    clipped: int = 0  # iterations whose gradient was clipped
    skipped_in_a_row: int = 0  # latest consecutive iterations without an update
    best_val_loss: float = float('inf')
    last_eval_iter: int = -1
    lowest_hessian_norm: float = float('inf')  # for guards.warn_of_runaway


@dataclass(slots=True)
class Run:
    """The objects of a run. Checkpoints hold only `state` and the tensors of `raw_model` and `optimizer`, so later
    iterations may depend on earlier ones only through these."""
    config: configurator.Config
    world: World
    raw_model: GPT  # neither compiled nor replicated
    model: Any  # `Losses` of raw_model, perhaps compiled and replicated; training calls it
    optimizer: torch.optim.Optimizer
    hessian: StepHook
    scaler: torch.amp.GradScaler
    autocast: Any
    params: list
    cross_entropy: Any  # loss.cross_entropy, perhaps compiled
    state: TrainState = field(default_factory=TrainState)
    val_data: dict = field(default_factory=dict)
    log: Any = None
    stops: Any = None
    rest: Any = None  # lifecycle.run.Rest, for saving and for checking the first update


def make_model(c, origin, data):
    """Return a GPT with random weights or the pretrained ones of init_from, and its `model_args`. When resuming,
    `origin` overwrites the weights later. Tensors that are not in the checkpoint keep their values from here.

    Exits if pretrained weights do not fit the settings or the training `data`.
    """
    seed_all(origin.seed)
    if finetunes(c) and not origin.path:
        model = pretrained_model(GPT, c, data, origin)
        return model, model_args(model.config)
    config = origin.config or config_of(GPTConfig, c.values, data.vocab_size)
    args = model_args(config)  # saved first, because the constructor may change the config
    return GPT(config), args


@one_message()
def set_up(c, world, model):
    """Move the model to its device, compile and wrap it, and build its optimizer. Return the `Run`."""
    autocast = devices.autocast(world.device, c.dtype)
    wrapped = world.wrap(Losses(model), model, model.transformer.h, c.compile, c.activation_checkpointing,
                         devices.DTYPES[c.dtype] if c.dtype != 'float32' else None)
    optimizer = make_optimizer(c, model)
    params = [p for p in model.parameters() if p.requires_grad]
    hessian = optimizers.row(c.optimizer_name).hook(
        model, optimizer, seed=c.seed, interval=c.hessian_interval, batch_size=c.hessian_batch_size,
        parts=c.hessian_parts, clip=c.hessian_clip, rank=world.rank, world_size=world.size, autocast=autocast,
        compile=c.compile)
    scaler = torch.amp.GradScaler(world.device.type, enabled=c.dtype == 'float16')
    return Run(c, world, model, wrapped, optimizer, hessian, scaler, autocast, params,
               torch.compile(cross_entropy) if c.compile else cross_entropy,
               rest=Rest(make_optimizer(c, model), {*model.state_dict()}))


def make_optimizer(c, model):
    """Build the optimizer that the settings `c` describe, for the parameters of `model`."""
    settings = {key: getattr(c, key) for key in optimizers.row(c.optimizer_name).settings}
    groups = optimizers.parameter_groups(model, settings.get('weight_decay'))
    return optimizers.build_optimizer(c.optimizer_name, groups, lr=c.learning_rate, compile=c.compile, **settings)


def begin(c):
    """Return the `Run`, new or resumed, and its `TrainLoader`.

    The order matters: pretrained weights and a checkpoint decide the model's shape, the optimizer is built for the
    model on its device, and a checkpoint is loaded into both. The log is opened last, when all of this has succeeded.
    """
    world = World(c.device, c.backend, c.parallel)
    devices.set_matmul_precision(c.dtype)
    torch.set_flush_denormal(True)  # sharp attention produces many denormals, and they halve the speed of a CPU
    with world.exit_together():
        check_command(c)
        data, val_data = open_dataset(c.dataset, c.block_size)
        guards.check_validation(val_data)
    fingerprints = dict(train=fingerprint(data.bins), val=fingerprint(val_data.values()))
    origin = find_origin(world, c, data, fingerprints, learning_rate_at)
    with world.exit_together():
        model, args = make_model(c, origin, data)
    run = set_up(c, world, model)
    origin.restore(run)
    run.val_data, run.stops = val_data, StopSignals(world, c.max_hours)
    run.rest.about = dict(model_args=args, data=fingerprints, tokenizer=data.tokenizer, changes=origin.changes,
                          code=origin.code, model_seed=origin.seed)
    loader = TrainLoader(data, c.seed, c.total_batch_size, c.block_size, world.rank, world.size, world.device,
                         run.state.iter)
    with world.exit_together():
        run.log = open_log(run, origin, data)
    return run, loader


# ----------------------------------------------------------------------------------------------------------------------
# The training step


class Step(NamedTuple):
    """The result of a training step."""
    loss: float  # mean over the predictions of the mini-batch
    tokens: int  # over all devices
    grad_norm: float  # before clipping
    estimated: bool  # whether it estimated the Hessian
    problem: str  # why the update was skipped, or ''


def train_step(run, sequences, iter_num):
    """Make one iteration of Algorithm 3: gradient, clipping, every k iterations the Hessian estimate, update. Nothing
    enters the weights or the optimizer's state unless loss, gradient and estimate are finite.

    Args:
        sequences: (B, T + 1) token ids, this rank's share of the mini-batch; all ranks have the same B and T.
    """
    c, world, hessian, scaler = run.config, run.world, run.hessian, run.scaler
    seed_all(keyed_seed(c.seed, DROPOUT, iter_num, world.rank))
    estimating = hessian.start(iter_num, scaler.get_scale())  # the scale is 1 unless float16

    micro_batches = hessian.split(len(sequences), c.batch_size)  # sizes may differ when an estimate is due
    positions, total = sequences[:, 1:].numel(), world.zeros(2)  # total: summed loss, number of predictions
    for micro_step, rows in enumerate(micro_batches):
        # Clone them, because GPT.forward may change them in place, and nanoGPT's calls `view` on them.
        X, Y = sequences[rows, :-1].clone(), sequences[rows, 1:].clone()
        world.set_gradient_sync(micro_step == len(micro_batches) - 1, estimating)
        with run.autocast:
            # For AdamW this is run.model(X, Y). In an iteration with an estimate Sophia-G also gets the loss on labels
            # that it samples from the logits. Other terms of the loss belong in `token_loss` or GPT.forward, so that
            # evaluation and Sophia-H see them, too.
            _, loss, *loss_hat = run.model(X, Y, **hessian.labels(X, Y, rows))
        if loss_hat:
            hessian.add(*loss_hat)  # a second backward pass through the same forward
        count = (Y >= 0).sum()  # counted after the forward, which may mask some
        total += torch.stack([loss.detach() * count, count])
        scaler.scale(loss * (count / positions)).backward()  # sums over the predictions, so micro-batches add up
    world.check_reduced()

    seed_all(keyed_seed(c.seed, DROPOUT, iter_num))  # from here on random numbers are the same on every rank
    scaler.unscale_(run.optimizer)
    loss, predictions = world.sum(total)
    # Each rank has divided its sum by its positions, and DDP has averaged over ranks. Divide by predictions instead.
    optim.scale_gradients(run.params, positions * world.size / predictions)
    grad_norm = optim.clip_gradients(run.params, c.grad_clip)
    mean_loss, grad_norm = torch.stack([loss / predictions, grad_norm]).tolist()  # the only sync except the scaler's

    problem = not_finite(loss=mean_loss, gradient=grad_norm)
    if estimating and not problem:
        problem = hessian.update()  # h ← β2·h + (1−β2)·ĥ (Algorithm 3, line 9)
    if not problem:
        scaler.step(run.optimizer)
    scaler.update()
    world.zero_grad(run.optimizer)
    return Step(mean_loss, positions * world.size, grad_norm, estimating, problem)


# ----------------------------------------------------------------------------------------------------------------------
# Evaluating and saving


@torch.no_grad()
def evaluate(run, data):
    """Return (mean cross-entropy, mean training loss) over the validation set `data`. Each rank evaluates its share.
    Stops early if a rank was asked to stop."""
    c, world = run.config, run.world
    total = world.zeros(4)  # sum and count of val/loss, sum and count of the training loss
    batches = ValidationLoader(data, c.eval_sequences, c.batch_size, c.block_size, world.rank, world.size,
                               world.device, one_shape=c.compile)
    # On a terminal, a progress bar appears after five seconds.
    for X, Y in tqdm(batches, 'evaluating', leave=False, delay=5, disable=None if world.is_master else True):
        run.stops.exchange()
        if run.stops.stopping:
            break
        with run.autocast:
            targets = Y.clone()  # a copy, because GPT.forward may mask targets in place
            logits, training_loss = run.model(X, targets)
            val_loss = run.cross_entropy(logits, Y).sum()
        count = (targets >= 0).sum()
        # A rank's last batches may be padding only; their mean training loss is 0 / 0.
        training_loss = torch.where(count > 0, training_loss * count, 0)
        total += torch.stack([val_loss, (Y >= 0).sum(), training_loss, count]).to(total)
    world.reshard(run.raw_model)
    val_loss, n, training_loss, m = world.sum(total)
    return torch.stack([val_loss / n, training_loss / m]).tolist()


def evaluate_and_save(run):
    """Log the validation loss, and save unless only the best checkpoints are wanted. A run that is asked to stop
    meanwhile does neither; it evaluates again when it resumes."""
    c, state = run.config, run.state
    seed_all(keyed_seed(c.seed, LOOP, 0))  # an experiment's random choices are the same in each evaluation
    with optim.evaluating(run.optimizer), evaluation_mode(run.raw_model):
        losses = {name: evaluate(run, data) for name, data in run.val_data.items()}
    if run.stops.stopping:
        return
    state.last_eval_iter = state.iter
    val_loss = sum(run.val_data[name].weight * val for name, (val, _) in losses.items())
    training_loss = sum(run.val_data[name].weight * training for name, (_, training) in losses.items())
    metrics = {'val/loss': val_loss}
    if len(losses) > 1:  # a mixture
        metrics |= {f'val/loss/{name}': val for name, (val, _) in losses.items()}
    if abs(training_loss - val_loss) > 1e-4 * val_loss:  # the training loss is not the plain cross-entropy
        metrics['val/training_loss'] = training_loss
    run.log.record(state, f'iter {state.iter}: val loss {val_loss:.4f}', metrics)

    if c.eval_only:
        return
    last = state.iter >= c.max_iters
    if last and not math.isfinite(val_loss):
        abort(run, 'the validation loss is not finite')
    best = val_loss < state.best_val_loss
    if state.iter > 0 and (best or last or c.always_save_checkpoint):
        before, state.best_val_loss = state.best_val_loss, min(state.best_val_loss, val_loss)
        save(run, best)
        if not run.rest.saved:
            state.best_val_loss = before  # this is the lowest loss of a saved checkpoint


# ----------------------------------------------------------------------------------------------------------------------
# The loop


def main(argv):
    """Train with the config files and flags in `argv`."""
    with one_message():
        c = resolve(argv)
    if c.show_config:
        print('\n'.join(c.lines(everything=True)))
    else:
        train(c)


@undo_at_end()
def train(c):
    """Train with the settings `c`."""
    run, loader = begin(c)
    world, state, stops = run.world, run.state, run.stops
    speed = Speed(flops_per_token(run.raw_model), world)
    if not c.eval_only:
        build_buckets(run, loader.first()[:c.batch_size])

    while not stops.stopping:
        lr = learning_rate_at(c, state.iter)
        optim.set_learning_rate(run.optimizer, lr)

        # Evaluate on the validation set and save, every eval_interval iterations and at the end.
        last = state.iter >= c.max_iters
        due = (last or state.iter % c.eval_interval == 0) and state.last_eval_iter != state.iter
        if due or c.eval_only:
            evaluate_and_save(run)
        if last or stops.stopping or c.eval_only:
            break

        started = time.perf_counter()
        seed_all(keyed_seed(c.seed, LOOP, state.iter))  # for an experiment's random choices, such as a length
        sequences = next(loader)
        step = train_step(run, sequences, state.iter)
        check_step(run, step)
        logs = state.iter % c.log_interval == 0 or state.iter == c.max_iters - 1
        if logs or world.size > 1:
            devices.synchronize(world.device)  # otherwise a later, untimed call would wait for the update
        seconds = time.perf_counter() - started
        speed.add(seconds, step.tokens, step.estimated)
        if logs:
            log_metrics(run, metrics_of(run, step, lr) | speed.metrics())
        state.iter += 1
        state.tokens += step.tokens
        state.seconds += seconds
        if stops.exchange() and not stops.stopping:
            save(run)

    loader.close()
    if stops.stopping and state.iter > 0 and not c.eval_only:
        save(run)
    close_run(run)


def metrics_of(run, step, lr):
    """Return the step's metrics, without timing."""
    measured = optimizers.optimizer_metrics(run.optimizer, run.raw_model)
    measured['param_norm'] = optim.global_norm(run.params)
    numbers = dict(zip(measured, torch.stack([*measured.values()]).tolist()))  # one device sync
    if 'momentum_norm' in numbers and step.grad_norm:
        numbers['momentum_ratio'] = numbers['momentum_norm'] / step.grad_norm
    return {'train/loss': step.loss, 'lr': lr, 'grad_norm': step.grad_norm,
            'grad_clipped': run.state.clipped / (run.state.iter + 1), **numbers}


if __name__ == '__main__':
    protect_streams()
    main(sys.argv[1:])
