"""Resuming a run, or starting it from trained weights, and the checks of both."""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from configurator import HARMLESS
from data.tokenizer import check_same_tokenizer, folder_meta, tokenizer_from_meta
from model import GPTConfig
from optimizers import defaults_of
from runtime import checkpoint, gpt, optim
from runtime.files import code_hashes, differing_files
from runtime.rng import seed_all


@dataclass
class Origin:
    """The checkpoint from which a run resumes, or none if `path` is None.

    code: `files.code_hashes` of the current code.
    seed: the seed of the model's constructor, for tensors that no checkpoint holds. A resume does not change it.
    saved: the checkpoint, until `restore` has used it.
    config: the GPTConfig of its model.
    differences, changes: differences from the checkpoint's settings, see `compare`.
    """
    code: dict
    seed: int
    path: Path | None = None
    saved: dict | None = None
    config: Any = None
    differences: list = field(default_factory=list)
    changes: list = field(default_factory=list)

    def restore(self, run):
        """Load the checkpoint's tensors and progress into the `Run`."""
        if not self.path:
            return
        with run.world.exit_together():
            checkpoint.load_tensors(self.path, self.saved, run.raw_model, run.optimizer, run.scaler)
        optim.back_to_training(run.optimizer)  # checkpoints are saved in evaluation mode
        for key, value in self.saved['train_state'].items():
            if hasattr(run.state, key):  # another train.py may have saved more fields
                setattr(run.state, key, value)
        self.saved = None  # frees the memory


def finetunes(c):
    """Return whether the run starts from trained weights."""
    return c.init_from not in ('scratch', 'resume')


def needs_checkpoint(c):
    """Return whether the run requires a checkpoint in its out_dir: to continue it, or only to evaluate it."""
    return c.init_from == 'resume' or c.eval_only and not finetunes(c)


def check_command(c):
    """Exit if no data set is named, and the run in out_dir that is required has another one than the default."""
    about = Path(c.out_dir) / 'config.json'
    if 'dataset' not in c.given and needs_checkpoint(c) and about.is_file():
        about = json.loads(about.read_text(encoding='utf-8'))
        if about['config'].get('dataset') != c.dataset:
            raise SystemExit(f'{c.out_dir}: was started by "{shlex.join(about["command"])}"; repeat these arguments')


def find_origin(world, c, data, fingerprints, learning_rate_at):
    """Return the `Origin` of the run with the settings `c`, and lock its out_dir (see `checkpoint.open_run`).

    When resuming, init_from becomes the checkpoint's init_from. A run that only evaluates takes the newest checkpoint,
    unless init_from names pretrained weights. Exits if the checkpoint's model, optimizer or data set differs.
    `fingerprints`: {split: fingerprint of its data}.
    """
    path, saved = checkpoint.open_run(world, c.out_dir, must_resume=needs_checkpoint(c), may_resume=c.auto_resume,
                                      read_only=c.eval_only)
    code = code_hashes()
    if path is None:
        return Origin(code, c.seed)
    if saved.get('ended') and c.init_from != 'resume' and not c.eval_only:
        if world.is_master:
            print(f'{path}: the run has ended ({saved["ended"]}); --init_from=resume continues it')
        raise SystemExit
    with world.exit_together():
        if saved['iter_num'] > c.max_iters and not c.eval_only:
            raise SystemExit(f'{c.shown("max_iters")}: {path} is at iteration {saved["iter_num"]} already; set at '
                             'least that, or choose another --out_dir')
        config = continued_config(c, path, saved, data)
        check_same_tokenizer(data, saved.get('tokenizer'), path)
        differences, changes = compare(path, saved, c, fingerprints, learning_rate_at)
        if files := differing_files(saved.get('code'), code):
            differences.append(f'the code has changed since the checkpoint ({", ".join(files)})')
            changes.append(dict(iter=saved['iter_num'], key='code', files=files))
    before = {**c.defaults, **saved['config']}
    measured = c.having('eval') - {'eval_iters'}  # eval_iters only sets eval_sequences
    if saved['data']['val'] != fingerprints['val'] or any(c.values[key] != before.get(key) for key in measured):
        saved['train_state'] |= dict(best_val_loss=float('inf'), last_eval_iter=-1)  # these are for other sequences
    return Origin(code, checkpoint.model_seed(saved), path, saved, config, differences, changes)


def continued_config(c, path, saved, data):
    """Return the GPTConfig of the model in the checkpoint `saved` from `path`; set init_from to the checkpoint's.

    Exits if the settings `c` or the data ask for a different model.
    """
    args, started_from = {**gpt.default_args(GPTConfig), **saved['model_args']}, saved['config']['init_from']
    if 'init_from' in c.given and c.init_from != 'resume' and Path(c.init_from) != Path(started_from):
        raise SystemExit(f'{path}: was started from init_from = {started_from}; continue it with --init_from=resume, '
                         'or choose another --out_dir')
    if started_from != 'scratch':
        adopt_model_args(c, args, data)
    if started_from != c.init_from:
        c.set('init_from', started_from, str(path))
    asked = gpt.arguments(gpt.config_of(GPTConfig, c.values, data.vocab_size))
    if started_from != 'scratch':  # arguments without a setting also follow the pretrained weights
        asked |= {key: args[key] for key in asked.keys() & args.keys() - c.values.keys()}
    if differing := [key for key in asked | args if asked.get(key) != args.get(key)]:
        both = [f'{key} ({args.get(key)} in the checkpoint, {asked.get(key)} requested)' for key in differing]
        raise SystemExit(f'{path}: the model differs in {", ".join(both)}; resume with its settings, or choose another '
                         '--out_dir')
    return GPTConfig(**asked)


def pretrained_model(cls, c, data, origin):
    """Return a model `cls` with the weights of init_from, which names a Hugging Face model or a checkpoint."""
    if checkpoint.exists(c.init_from):
        return weights_of_run(cls, c, data, origin)
    model = cls.from_pretrained(c.init_from, c.block_size, c.dropout)
    rows = model.config.vocab_size
    meta = folder_meta(c.init_from, rows)
    adopt_model_args(c, vars(model.config), data, at_least=0 if meta else rows - 63)  # fewer ids mean another tokenizer
    check_same_tokenizer(data, meta, c.init_from)
    return model


def weights_of_run(cls, c, data, origin):
    """Return a model `cls` with the weights and the size of the checkpoint that init_from names.

    Tensors that the checkpoint lacks keep their initial values, and are listed in origin.differences: embeddings of ids
    that its tokenizer does not have, and weights that model.py has added.
    """
    path, saved = checkpoint.load_checkpoint(c.init_from)
    if missing := [key for key in ('train_state', 'tokenizer') if key not in saved]:
        raise SystemExit(f'--init_from={c.init_from}: was saved by another program (no {missing[0]} in it); convert it '
                         'with scripts/export_hf.py, and pass the folder')
    check_same_tokenizer(data, saved['tokenizer'], path)
    args, notes = {**gpt.default_args(GPTConfig), **saved['model_args']}, origin.differences
    rows = args['vocab_size']
    if saved['tokenizer'] != data.tokenizer:
        rows = tokenizer_from_meta(saved['tokenizer']).vocab_size  # without the padding
    if data.vocab_size > rows:
        args['vocab_size'] = max(args['vocab_size'], gpt.padded_vocab_size(data.vocab_size))
        notes.append(f'the ids {rows} to {data.vocab_size - 1} are new, and so are their embeddings')
    else:
        rows = args['vocab_size']
    if 'block_size' in c.given:
        most = args['block_size'] if 'transformer.wpe.weight' in saved['model'] else c.block_size
        c.require('block_size', c.block_size <= most, f'at most {most}, the number of position embeddings in {path}')
        args['block_size'] = c.block_size
    adopt_model_args(c, args, data)
    if 'model.py' in differing_files(saved.get('code'), origin.code):
        notes.append(f'model.py has changed since {path}')
    origin.seed = checkpoint.model_seed(saved)  # for tensors that no checkpoint holds
    seed_all(origin.seed)
    model = cls(GPTConfig(**{**args, 'dropout': c.dropout}))
    added = gpt.take_weights(model, saved['model'], rows)
    notes.extend(f'{name} is new, because {path} does not have it' for name in added)
    return model


def adopt_model_args(c, args, data, at_least=0):
    """Set the settings `c` to `args`, the model arguments of pretrained weights, except dropout.

    Exits if a config file or a flag contradicts them, or if the data set `data` has fewer ids than `at_least` or more
    than the weights, which may include padding.
    """
    if not at_least <= data.vocab_size <= args['vocab_size']:
        raise SystemExit(f'{data.path}: made with a tokenizer of {data.vocab_size} ids, but the pretrained weights '
                         f'have {args["vocab_size"]}; prepare the data with their tokenizer')
    for key, value in args.items():
        if key in c.values and key != 'dropout' and value != c.values[key]:
            c.require(key, key not in c.given, f'{value}, as in the pretrained weights')
            c.set(key, value, 'pretrained weights')


def compare(path, saved, c, fingerprints, learning_rate_at):
    """Compare the settings `c` and the data with the checkpoint `saved` from `path`.

    Returns (lines, changes). lines: the settings that differ, as text. changes: for config.json and later checkpoints,
    a list of dicts (iter, key, from, to) of all changes at this and earlier resumes, without harmless ones. A change of
    the horizon is harmless if it leaves the learning rates of all past iterations the same.
    Exits if the optimizer or the data set differs.
    """
    before = {**defaults_of(c), **saved['config']}
    for key in 'optimizer_name', 'optimizer_args':
        if before[key] != c.values[key]:
            raise SystemExit(f'{path}: was trained with --{key}={before[key]}; resume with it, or choose another '
                             '--out_dir')
    other = [split for split in fingerprints if saved['data'].get(split) != fingerprints[split]]
    if other and not c.ignore_data_change:
        raise SystemExit(f'{path}: was not trained on --dataset={c.dataset} ({", ".join(other)}.bin '
                         'differs); name its data set, or switch to this one with --ignore_data_change=True')
    changed = {key: (before[key], value) for key, value in c.values.items() if key in before and before[key] != value}
    lines = {key: f'{key} = {now!r}, was {was!r}' for key, (was, now) in changed.items()
             if key not in ('auto_resume', 'out_dir')}
    past = SimpleNamespace(**before)
    horizon = [key for key in changed if key in c.having('horizon')]
    same_rates = horizon and all(learning_rate_at(past, i) == learning_rate_at(c, i) for i in range(saved['iter_num']))
    harmless = c.having(*HARMLESS, *(['horizon'] if same_rates else []))
    kept = {key: both for key, both in changed.items() if key not in harmless}
    kept |= {f'data {split}': (saved['data'].get(split), fingerprints[split]) for split in other}
    changes = [{'iter': saved['iter_num'], 'key': key, 'from': was, 'to': now} for key, (was, now) in kept.items()]
    return [*lines.values()], saved.get('changes', []) + changes
