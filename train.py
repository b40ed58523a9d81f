"""Pre-train a GPT-2: one loop for every optimizer.

  python train.py config/quickstart.py                                   one process
  python train.py --model_size=125M --optimizer_name=sophiag             the paper's run, on one device
  torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_small_sophiag.py --batch_size=12
  python train.py config/quickstart.py --show_config=True                what would be trained, and why

Config files apply in the order given, then flags --key=value.
"""

import collections
import contextlib
import json
import math
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import configurator
import optimizers
from configurator import derived
from data.loader import DROPOUT, Bin, TrainLoader, ValidationLoader, accumulation_steps, data_dir, keyed_bits
from model import GPT, SIZES, GPTConfig, padded_vocab_size
from runtime import checkpoint, distributed, hf
from runtime.distributed import NOT_FINITE, STOPPED, Stops, World, ranks_from_environment, under_torchrun

# ----------------------------------------------------------------------------------------------------------------------
# Settings. A value `derived(type)` comes from the tables of model.py and optimizers.py, or from other settings.

# output
out_dir = 'out'  # where checkpoints, metrics.jsonl and config.json go
eval_interval = 2000  # iterations between evaluations
log_interval = 10  # iterations between lines of metrics
eval_iters = 0  # micro-batches of validation windows, over all devices; 0 = the whole validation set
eval_only = False  # evaluate once and exit
always_save_checkpoint = True  # save after every evaluation, not only after the best one
keep_checkpoints = 2  # newest checkpoints that stay (at least 2), besides the best one
init_from = 'scratch'  # or 'resume', 'auto' (resume if there is a checkpoint), 'gpt2', …, or a Hugging Face folder
ignore_data_change = False  # resume although the data set is not the one trained on before
max_hours = 0.0  # save and stop after so many hours; 0 = no limit
skip_nonfinite = 0  # iterations in a row to pass over whose loss or gradient is not finite; 0 = stop at the first
show_config = False  # print every setting with its source, and exit
# wandb logging, optional
wandb_log = False  # mirror the metrics to Weights & Biases
wandb_project = 'sophia'  # its project
wandb_run_name = ''  # its run name; empty = out_dir
# data
dataset = 'openwebtext'  # a directory under data/, or a path
total_batch_size = 480  # sequences per iteration over all devices
batch_size = 12  # sequences per micro-batch of one device
gradient_accumulation_steps = 0  # micro-batches per device and iteration; 0 = what total_batch_size makes it
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
optimizer_name = 'adamw'  # adamw lion adahessian sophiag sophiah, or ef_clip ah_clip clip normalize gnb_noclip
learning_rate = derived(float)  # peak learning rate
weight_decay = derived(float)  # decoupled, on matrices only
beta1 = derived(float)  # EMA of the gradient
beta2 = derived(float)  # EMA of the second moment, of the Hessian (Sophia), of the momentum (Lion)
eps = derived(float)  # lower bound of the denominator (Sophia), or added to it (AdamW, AdaHessian)
gamma = derived(float)  # Sophia's γ in clip(m / max(γ·h, ε), 1)
hessian_interval = derived(int)  # k, iterations between Hessian estimates; 0 = none
hessian_batch_size = derived(int)  # sequences of the mini-batch, over all devices, that an estimate uses
grad_clip = 1.0  # clip gradients at this norm; 0 = off
# schedule
max_iters = 100000  # T, number of updates
decay_lr = True  # warm-up and cosine decay; False = learning_rate throughout
warmup_iters = 2000  # linear warm-up
lr_decay_iters = derived(int)  # iterations to decay over
min_lr = derived(float)  # final learning rate
min_lr_ratio = 0.05  # final / peak learning rate, where min_lr is not given
# system
parallel = 'ddp'  # every device holds the model; 'fsdp': all of them together do; 'hsdp': those of each machine
activation_checkpointing = False  # keep each block's input only, compute the rest again in the backward pass
backend = derived(str)  # 'nccl' or 'gloo'
device = derived(str)  # 'cuda', 'cuda:1', 'cpu', 'mps'
dtype = derived(str)  # 'bfloat16', 'float16' (with loss scaling) or 'float32'
compile = derived(bool)  # torch.compile the model
seed = 1337  # of the initial weights, the data order, sampled labels and dropout

config = configurator.configure(globals(), sys.argv[1:])

# ----------------------------------------------------------------------------------------------------------------------
# What the tables say, and what follows from other settings

if model_size not in SIZES:
    raise SystemExit(f'model_size = {model_size!r}: no such size; choose from {", ".join(SIZES)}')
config.fill(SIZES[model_size], f'model size {model_size}')
config.fill(optimizers.settings(optimizer_name, total_batch_size), f'optimizer {optimizer_name}')
rate, where = optimizers.peak_learning_rate(optimizer_name, model_size)
own = init_from in ('scratch', 'resume', 'auto')  # else the weights of a Hugging Face model
config.require('init_from', own or init_from in hf.HUB_MODELS or Path(init_from).is_dir(),
               f'scratch, resume, auto, {", ".join(hf.HUB_MODELS)} or a Hugging Face folder')
if not own and not eval_only:
    rate, where = None, f'Table 3 is for training from scratch, not for init_from = {init_from}'
if rate is None and 'learning_rate' not in config.given:
    raise SystemExit(f'{where}; set --learning_rate')
config.fill(dict(learning_rate=rate), where)
config.fill(dict(scale_attn_by_inverse_layer_idx=optimizers.scales_attention(optimizer_name, n_layer)),
            f'{optimizer_name}, {n_layer} layers')
config.fill(dict(lr_decay_iters=max_iters), 'max_iters')
config.fill(dict(min_lr=min_lr_ratio * learning_rate), 'min_lr_ratio × learning_rate')
config.fill(dict(device='cuda' if torch.cuda.is_available() else 'cpu'), 'what this machine has')
config.fill(*distributed.settings_for(device))
rank, _, world_size = ranks_from_environment()
gradient_accumulation_steps = accumulation_steps(total_batch_size, batch_size, world_size, gradient_accumulation_steps)
hessian_rounded = math.ceil(min(hessian_batch_size, total_batch_size) / world_size) * world_size
if hessian_rounded != hessian_batch_size:
    config.set('hessian_batch_size', hessian_rounded, f'{hessian_batch_size} made to fit {world_size} device(s)')
config.check_ranges()
config.require('dtype', parallel == 'ddp' or dtype != 'float16', f'bfloat16 or float32 for parallel = {parallel}')
config.require('n_head', n_head > 0 and n_embd % n_head == 0, f'a divisor of n_embd = {n_embd}')
optimizers.check_settings(config)
config.finish()

# ----------------------------------------------------------------------------------------------------------------------
# Devices, data, model

sys.stdout, sys.stderr = distributed.Unbreakable(sys.stdout), distributed.Unbreakable(sys.stderr)
world = World(device, backend, parallel)
say = print if world.is_master else lambda *args, **kwargs: None
with world.together():
    train_data, val_data = (Bin(data_dir(dataset), split) for split in ('train', 'val'))
    for data in (train_data, val_data):
        data.check_length(block_size)
        data.check_ids(data.samples())
fingerprints = dict(train=train_data.fingerprint(), val=val_data.fingerprint())
torch.manual_seed(seed)
torch.set_float32_matmul_precision('high')  # TF32 where the hardware has it
low_precision = {'float32': None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}[dtype]
autocast = (torch.autocast(world.device.type, low_precision) if low_precision else contextlib.nullcontext())

model_args = dict(block_size=block_size, vocab_size=padded_vocab_size(train_data.vocab_size), n_layer=n_layer,
                  n_head=n_head, n_embd=n_embd, dropout=dropout, bias=bias,
                  scale_attn_by_inverse_layer_idx=scale_attn_by_inverse_layer_idx)


def take_shape(args):
    """`args`, the model_args of weights that are fine-tuned; the settings follow them, the data have to."""
    if not args['vocab_size'] - 64 < train_data.vocab_size <= args['vocab_size']:
        raise SystemExit(f'{train_data.path}: made with a tokenizer of {train_data.vocab_size} ids, but the weights of '
                         f'{init_from} have {args["vocab_size"]}; prepare the data with their tokenizer')
    for key in args.keys() & config.values.keys():
        if args[key] != config.values[key]:
            config.set(key, args[key], 'pretrained weights')
    return args


if not own:
    with world.together():
        pretrained = GPT.from_pretrained(init_from, block_size, dropout)
        model_args = take_shape(asdict(pretrained.config))

path, resumed = checkpoint.begin(world, out_dir, init_from, read_only=eval_only)
if resumed:
    with world.together():
        if resumed['model_args'].keys() > model_args.keys():  # a fine-tuned model
            model_args = take_shape(resumed['model_args'] | dict(block_size=block_size, dropout=dropout))
        changes = checkpoint.compare(path, resumed, config.values, model_args, fingerprints, ignore_data_change)
    say(f'resuming from {path} at iteration {resumed["iter_num"]} of {max_iters}')
    for change in changes:
        say(f'changed: {change}')

raw_model = GPT(GPTConfig(**model_args)) if own else pretrained
model = world.wrap(raw_model, compile, activation_checkpointing, low_precision)
params = [p for p in raw_model.parameters() if p.requires_grad]

# ----------------------------------------------------------------------------------------------------------------------
# Optimizer and its Hessian hook

optimizer = optimizers.build_optimizer(optimizer_name, raw_model.parameter_groups(weight_decay), lr=learning_rate,
                                       beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, gamma=gamma,
                                       compile=compile)
assert {id(p) for group in optimizer.param_groups for p in group['params']} == {id(p) for p in params}
hessian = optimizers.build_hessian_hook(
    optimizer_name, raw_model, optimizer, interval=hessian_interval, batch_size=hessian_batch_size, seed=seed,
    rank=world.rank, world_size=world.size, accumulation_steps=gradient_accumulation_steps, autocast=autocast,
    compile=compile)
scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == 'float16')
iter_num, tokens, seconds = 0, 0, 0.0
clipped, passed_over = 0, 0  # iterations with clipped gradients; iterations in a row that were not finite
best_val_loss, evaluated = float('inf'), -1  # evaluated: iteration of the latest evaluation
latest_losses = collections.deque(maxlen=100)
if resumed:
    with world.together():
        checkpoint.restore(path, resumed, raw_model, optimizer, scaler)
    iter_num, tokens, seconds = resumed['iter_num'], resumed['tokens'], resumed['seconds']
    clipped, passed_over = resumed['clipped'], resumed['passed_over']
    latest_losses.extend(resumed['latest_losses'])
    before = resumed['config']  # losses of other windows, or other data, are not to be compared with
    if resumed['data']['val'] == fingerprints['val'] and eval_iters * batch_size == (
            before['eval_iters'] * before['batch_size']):
        best_val_loss, evaluated = resumed['best_val_loss'], resumed['evaluated']
    resumed = None  # frees the memory


def learning_rate_at(iteration):
    """Linear warm-up, then cosine decay to min_lr at lr_decay_iters; constant without decay_lr, as in nanoGPT."""
    if not decay_lr:
        return learning_rate
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / (warmup_iters + 1)
    progress = min(1.0, (iteration - warmup_iters) / max(1, lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (learning_rate - min_lr)


@torch.no_grad()
def evaluate():
    """Mean loss over the validation windows, each rank its share, one reduction at the end.

    None when a rank was asked to stop meanwhile; then the evaluation is to be made again by the resumed run.
    """
    raw_model.eval()
    total = world.zeros(3)
    for X, Y in ValidationLoader(val_data, eval_iters * batch_size, batch_size, block_size,
                                 world.rank, world.size, world.device):
        if world.any(stops.stop):
            total[2] = 1
            break
        with autocast:
            loss = model(X, Y, return_logits=False)[1]
        count = (Y >= 0).sum()
        total[:2] += torch.stack((torch.where(count > 0, loss.to(total) * count, 0), count.to(total)))
    raw_model.train()
    loss_sum, count, stopping = world.sum(total).tolist()
    return None if stopping else loss_sum / count


def save_checkpoint(best=False):
    """Saves everything the run needs to go on from iter_num. False when that failed."""
    if not optimizers.param_norm(params).isfinite():
        give_up('the parameters are not finite')
    path = checkpoint.save_run(world, out_dir, raw_model, optimizer, dict(
        model_args=model_args, iter_num=iter_num, best_val_loss=best_val_loss, config=config.values,
        scaler=scaler.state_dict(), evaluated=evaluated, tokens=tokens, seconds=seconds, clipped=clipped,
        passed_over=passed_over, latest_losses=list(latest_losses), data=fingerprints,
        tokenizer=train_data.tokenizer), best, keep_checkpoints)
    if path:
        say(f'saved {path}', flush=True)
    return path is not None


def give_up(what, otherwise=''):
    """Ends all ranks with one line, also in failed.txt; nothing is saved."""
    if world.is_master:
        line = f'iteration {iter_num}: {what}; nothing of it was saved; go on with a lower --learning_rate{otherwise}'
        print(line, file=sys.stderr)
        checkpoint.write_text(Path(out_dir) / checkpoint.FAILED, line + '\n')
    raise SystemExit(NOT_FINITE)


# ----------------------------------------------------------------------------------------------------------------------
# Logs: metrics.jsonl, one object a line; config.json; the terminal; wandb if asked for

metrics_path = Path(out_dir) / 'metrics.jsonl'
writes = world.is_master and not eval_only
if writes:
    checkpoint.rewind_log(metrics_path, iter_num, evaluated)
    checkpoint.describe_run(
        out_dir, config.values, config.sources, world_size=world.size, parameters=raw_model.num_params(),
        data=fingerprints, device=distributed.device_name(world.device))
    if wandb_log:
        import wandb
        wandb.init(project=wandb_project, name=wandb_run_name or out_dir, config=config.values)
progress = tqdm(total=max_iters, initial=iter_num, unit='it', smoothing=0.05,
                disable=not (world.is_master and sys.stderr.isatty()))
tokens_per_iter = total_batch_size * block_size


def log(line, **metrics):
    """Writes one object to metrics.jsonl (and wandb), and the text `line` to the terminal; rank 0 only."""
    if not world.is_master:
        return
    entry = dict(iter=iter_num, tokens=tokens, time=round(seconds, 3),
                 **{key: value for key, value in metrics.items() if math.isfinite(value)})
    if writes:
        checkpoint.append_line(metrics_path, json.dumps(entry))
        if wandb_log:
            wandb.log(entry, step=iter_num)
    progress.write(line) if not progress.disable else print(line, flush=True)


for line in config.lines():
    say(line)
if decay_lr and warmup_iters >= max_iters:
    say(f'note: the run of {max_iters} iterations ends in its warm-up of {warmup_iters}; see --warmup_iters')
say(f'{raw_model.num_params():,} parameters; {len(train_data):,} training tokens; {tokens_per_iter:,} tokens per '
    f'iteration = {world.size} device(s) × {gradient_accumulation_steps} × {batch_size} × {block_size}')

# ----------------------------------------------------------------------------------------------------------------------
# The loop

loader = TrainLoader(train_data, seed, total_batch_size, block_size, world.rank, world.size, world.device, iter_num)
recent = {due: collections.deque(maxlen=50) for due in (True, False)}  # seconds of iterations with and without estimate
since_log = []  # seconds of the iterations since the last line of metrics
flops_per_iter = raw_model.flops_per_token() * tokens_per_iter
peak = distributed.peak_flops(world.device)
raw_model.train()
stops, stopping, saved = Stops(max_hours), False, True

while True:
    lr = learning_rate_at(iter_num)
    for group in optimizer.param_groups:
        group['lr'] = lr

    # Once in a while, and at the end: evaluate on the validation set, and save.
    due = (iter_num % eval_interval == 0 or iter_num == max_iters) and evaluated != iter_num
    if eval_only or (due and not stopping):
        val_loss = evaluate()
        stopping = val_loss is None
        if not stopping:
            evaluated = iter_num
            log(f'iter {iter_num}: val loss {val_loss:.4f}', **{'val/loss': val_loss})
            best = val_loss < best_val_loss
            best_val_loss = min(best_val_loss, val_loss)
            if iter_num > 0 and (best or always_save_checkpoint or iter_num == max_iters) and not eval_only:
                saved = save_checkpoint(best)
    if stopping or iter_num >= max_iters or eval_only:
        break

    # Gradients: the mean over the whole mini-batch, one micro-batch at a time.
    started = time.perf_counter()
    if dropout:
        torch.manual_seed(int(keyed_bits(seed, DROPOUT, iter_num, world.size)[world.rank] >> 1))
    due, loss_scale, losses = hessian.start(iter_num), scaler.get_scale(), []
    micro_batches = next(loader).split(batch_size)
    for micro_step, windows in enumerate(micro_batches):
        X, Y = windows[:, :-1], windows[:, 1:]
        with world.gradient_sync(model, micro_step == gradient_accumulation_steps - 1, due):
            with autocast:
                loss = hessian.loss(model, X, Y) / gradient_accumulation_steps
            hessian.backward(loss_scale)
            scaler.scale(loss).backward()
        losses.append(loss.detach())

    # Clip. Then all ranks learn the loss, and whether one of them was asked to stop or to save: one reduction, and the
    # device is asked once.
    scaler.unscale_(optimizer)
    grad_norm = optimizers.clip_gradients(optimizer, params, grad_clip)
    losses = torch.stack(losses)
    shared = torch.stack([losses.sum() / world.size, *(losses.new_full((), note) for note in stops.notes())])
    train_loss, stopping, save_now, grad_norm = torch.cat((world.sum(shared), grad_norm.view(1))).tolist()

    # Nothing enters the optimizer's state unless all of it is finite: the Hessian every k iterations, of the same
    # mini-batch, before the update (Algorithm 3); then the step.
    trouble = ('the loss is not finite' if not math.isfinite(train_loss) else
               'the gradient is not finite' if not math.isfinite(grad_norm) else '')
    if not trouble:
        try:
            hessian.finish(optimizer, loss_scale)
        except FloatingPointError as error:
            trouble = str(error)
    if trouble:
        passed_over += 1
        # float16's overflows are how its loss scale is found: from 2^16 it takes no 40 halvings.
        overflow = scaler.is_enabled() and math.isfinite(train_loss) and not math.isfinite(grad_norm)
        if passed_over > max(skip_nonfinite, 40 * overflow):
            give_up(f'{trouble} ({loader.describe(iter_num, world.gather(losses))})',
                    f', or pass over it by --skip_nonfinite={passed_over}')
        if not overflow:
            say(f'iter {iter_num}: {trouble}; passed over ({loader.describe(iter_num, world.gather(losses))})')
    else:
        passed_over = 0
        clipped += bool(grad_clip and grad_clip < grad_norm)
        scaler.step(optimizer)
    scaler.update()
    world.zero_grad(optimizer)
    elapsed = time.perf_counter() - started
    seconds += elapsed
    since_log.append(elapsed)
    recent[due].append(elapsed)

    # Metrics: the device is asked once more.
    if len(latest_losses) == 100 and train_loss > np.mean(latest_losses) + 5 * np.std(latest_losses):
        log(f'iter {iter_num}: loss spike, {train_loss:.4f} after {np.mean(latest_losses):.4f}', loss_spike=train_loss)
    if not trouble:
        latest_losses.append(train_loss)
    if iter_num % log_interval == 0 or iter_num == max_iters - 1:
        measured = dict(optimizers.statistics(optimizer), param_norm=optimizers.param_norm(params))
        metrics = {'train/loss': train_loss, 'lr': lr, 'grad_norm': grad_norm, 'grad_clipped': clipped / (iter_num + 1),
                   **dict(zip(measured, torch.stack([*measured.values()]).tolist())),
                   'step_ms': 1e3 * statistics.mean(since_log)}
        if recent[True] and recent[False]:
            metrics['hessian_ms'] = 1e3 * (statistics.median(recent[True]) - statistics.median(recent[False]))
        metrics['tokens_per_sec'] = tokens_per_iter / statistics.mean(since_log)
        if peak:
            metrics['mfu'] = flops_per_iter / statistics.mean(since_log) / (peak * world.size)
        metrics['memory_gb'] = distributed.peak_memory(world.device) / 1e9
        log(f'iter {iter_num}: loss {train_loss:.4f}, lr {lr:.2e}, grad norm {grad_norm:.2f}, '
            f'{metrics["step_ms"]:.0f} ms, {metrics["tokens_per_sec"]:,.0f} tokens/s', **metrics)
        since_log.clear()
    iter_num += 1
    tokens += tokens_per_iter
    progress.update()
    if save_now and not stopping:
        save_checkpoint()

progress.close()
loader.close()
if stopping:
    if iter_num > 0 and not eval_only:
        saved = save_checkpoint()
    say(f'stopped at iteration {iter_num} by {stops.reason or "another rank"}')
world.close()
if not saved:
    raise SystemExit(f'{out_dir}: the last checkpoint could not be saved; the one before it is the newest')
if stopping and not under_torchrun():  # which takes anything but 0 for a failure
    raise SystemExit(STOPPED)
