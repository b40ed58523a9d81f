"""Exports a checkpoint as a Hugging Face GPT-2: config.json, model.safetensors, tokenizer, and a model card.

  python scripts/export_hf.py out/gpt2-small-sophiag hf/gpt2-small-sophiag

Then `GPT2LMHeadModel.from_pretrained` and `AutoTokenizer.from_pretrained` load DEST. Before it appears, transformers
has computed the same logits and ids from it: an edited model whose weights happen to have a GPT-2's shapes is rejected.
"""

import argparse
import dataclasses
import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.load import MODEL_HELP, add_tokenizer_flag, find_data, load, with_tokenizer
from analysis.runs import read_metrics, writable, write_errors
from data.loader import parts_of, read_meta
from data.tokenizer import Byte, Char
from runtime import hf

END_OF_TEXT = '<|endoftext|>'
TOLERANCE = 1e-4  # on logits, in float32
PROBES = ['The cat sat on the mat.', 'def f(x):\n    return x', ' two  spaces, 1,234 and é ü 中 😀\n\n']


def model_args_of(config):
    """The dict of a GPTConfig; SystemExit if it has a setting, not at its default, that GPT-2's config.json lacks."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in hf.FIELDS and value != field.default:
            raise SystemExit(f"{field.name} = {value!r}: Hugging Face's GPT-2 has no such setting; nothing was written")
    return {key: getattr(config, key) for key in hf.FIELDS}


def byte_characters():
    """The 256 characters that stand for bytes in GPT-2's tokenizer files: a printable byte is its own character, the
    others are U+0100, U+0101, … in order."""
    printable = {*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)}
    others = iter(range(256))
    return [chr(b) if b in printable else chr(256 + next(others)) for b in range(256)]


def merges_of(ranks):
    """GPT-2's merges, in order, from tiktoken's {bytes: rank}: the two parts into which earlier merges join a token."""
    merges = []
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.get):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        merges.append(tuple(parts))
    return merges


def hf_tokenizer(tokenizer):
    """`tokenizer` as one of the package tokenizers."""
    try:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Fast
    except ImportError:
        raise SystemExit('an export needs the package tokenizers: pip install -r requirements-hf.txt') from None
    if isinstance(tokenizer, Char):  # one id per character, nothing to merge
        fast = Fast(models.BPE(vocab=tokenizer.ids, merges=[]))
        fast.decoder = decoders.Fuse()
        return fast
    characters = byte_characters()
    if isinstance(tokenizer, Byte):
        vocab, merges = {character: i for i, character in enumerate(characters) if i != tokenizer.eot_id}, []
    elif hasattr(tokenizer.bpe, '_mergeable_ranks'):  # tiktoken
        ranks = tokenizer.bpe._mergeable_ranks
        written = {token: ''.join(characters[b] for b in token) for token in ranks}
        vocab = {written[token]: i for token, i in ranks.items()}
        merges = [(written[left], written[right]) for left, right in merges_of(ranks)]
    else:
        return tokenizer.bpe
    vocab[END_OF_TEXT] = tokenizer.eot_id
    fast = Fast(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not isinstance(tokenizer, Byte))
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return fast


def write_tokenizer(tokenizer, folder, block_size):
    """Writes tokenizer.json, tokenizer_config.json and, for GPT-2's, vocab.json and merges.txt."""
    fast = hf_tokenizer(tokenizer)
    fast.save(str(folder / 'tokenizer.json'))
    is_gpt2 = tokenizer.name == 'gpt2'
    config = dict(tokenizer_class='GPT2Tokenizer' if is_gpt2 else 'PreTrainedTokenizerFast',
                  model_max_length=block_size, clean_up_tokenization_spaces=False)
    if tokenizer.eot_id is not None:
        end = fast.id_to_token(tokenizer.eot_id)
        config |= dict(bos_token=end, eos_token=end, unk_token=end)
    (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=2), encoding='utf-8')
    if is_gpt2:
        fast.model.save(str(folder))


METRICS = {'val/loss': 'validation loss', 'train/loss': 'training loss',
           'grad_clipped': 'fraction of steps with a clipped gradient',
           'update_unclipped': 'fraction of coordinates whose update is not clipped'}


def metrics_of(loaded):
    """The last values of METRICS that the run logged up to the checkpoint; {} without a metrics.jsonl."""
    path = loaded.path.parent / 'metrics.jsonl'
    if 'iter_num' not in loaded.state or not path.is_file():
        return {}
    last = {}
    for line in read_metrics(path):
        if line['iter'] <= loaded.state['iter_num']:
            last |= line
    return {name: last[key] for key, name in METRICS.items() if key in last}


def model_card(loaded, data):
    """The text of README.md: what this model is, its data, settings and metrics. `data`: a meta.json's dict or None."""
    state, c = loaded.state, loaded.model.config
    settings, metrics = state.get('config', {}), metrics_of(loaded)
    rows = [('parameters', f'{loaded.model.num_params():,}'), ('layers, heads, width', f'{c.n_layer}, {c.n_head}, '
            f'{c.n_embd}'), ('context', f'{c.block_size} tokens'), ('vocabulary', f'{c.vocab_size:,} ids, tokenizer '
            f'{loaded.tokenizer.name}'), ('biases', 'yes' if c.bias else 'no (zeros in the file)'),
            ('attention logits divided by layer index + 1', 'yes' if c.scale_attn_by_inverse_layer_idx else 'no')]
    if 'dataset' in settings:
        rows += [('data set', ', '.join(f'{Path(name).name} ({share:.0%})' if share < 1 else Path(name).name
                                        for name, share in parts_of(settings['dataset']).items()))]
    if settings:
        rows += [('iterations', f'{state["iter_num"]:,} of {settings.get("max_iters", "?")}')]
    tokens = state.get('train_state', {}).get('tokens')
    if type(tokens) is int:  # nanoGPT's checkpoints do not say
        rows += [('optimizer', settings.get('optimizer_name', '?')), ('tokens seen', f'{tokens:,}')]
    if data:
        rows += [(f'data: {key}', data[key]) for key in ('source', 'revision', 'split') if data.get(key)]
        rows += [(f'data: {split}', f'{data[split]["tokens"]:,} tokens, sha256 {data[split]["sha256"]}')
                 for split in ('train', 'val') if split in data]
    table = '\n'.join(['| | |', '|---|---|', *(f'| {key} | {value} |' for key, value in rows)])
    text = [f'---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [gpt2]\n---\n\n# {loaded.name}\n',
            'A GPT-2 language model. It was not tuned to follow instructions, and nothing filters what it writes.\n',
            table]
    if c.scale_attn_by_inverse_layer_idx:
        text.append('\nThis model divides attention logits by the layer index + 1. transformers before 5.4 does so '
                    'only with `attn_implementation="eager"`, which config.json asks for: do not override it there.')
    if metrics:
        text += ['\n## Metrics\n', f'The last that the run had logged by iteration {state["iter_num"]:,}.\n', '| | |',
                 '|---|---|', *(f'| {key} | {value:.4f} |' for key, value in metrics.items())]
    if settings:
        # These are names and paths that mean nothing elsewhere and may be private.
        hidden = ('out_dir', 'dataset', 'init_from', 'wandb_log', 'wandb_project', 'wandb_run_name', 'trackio_log',
                  'show_config')
        text += ['\n## Settings\n', '```python', *(f'{key} = {value!r}' for key, value in settings.items()
                                                   if key not in hidden), '```']
    return '\n'.join(text) + '\n'


@torch.no_grad()
def check(loaded, folder):
    """Compares transformers' logits and ids from `folder` with ours. Returns one line; SystemExit if they differ."""
    import transformers
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    idx = torch.randint(loaded.model.config.vocab_size, (2, loaded.model.config.block_size),
                        generator=torch.Generator().manual_seed(0))
    difference = (theirs(idx).logits - loaded.model(idx)[0]).abs().max().item()
    if not difference <= TOLERANCE:
        raise SystemExit(f'transformers {transformers.__version__} computes other logits: they differ by up to '
                         f'{difference:.2g}; nothing was written')
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    probes = [''.join(c for c in text if not isinstance(loaded.tokenizer, Char) or c in loaded.tokenizer.ids)
              for text in PROBES]
    for text in probes:
        ids = [int(i) for i in loaded.tokenizer.encode(text)]
        if tokenizer.encode(text, add_special_tokens=False) != ids or \
                tokenizer.decode(ids) != loaded.tokenizer.decode(ids):
            raise SystemExit(f'transformers {transformers.__version__} tokenizes {text!r} differently '
                             f'from {loaded.tokenizer.name}; nothing was written')
    return f'transformers {transformers.__version__}: same ids, logits differ by at most {difference:.1e}'


def export(loaded, dest):
    """Writes `loaded` to the folder `dest`, which must not exist or be empty. Returns what `check` found.

    Everything is written to a temporary folder, checked, and renamed; after an error nothing is left.
    """
    dest = Path(dest)
    if not find_spec('transformers'):
        raise SystemExit('an export is compared with transformers, which is not installed: '
                         'pip install -r requirements-hf.txt')
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise SystemExit(f'{dest}: exists; give another folder, or remove it')
    model_args = model_args_of(loaded.model.config)
    writable(dest / 'config.json')
    folder = find_data(loaded.state)
    data = read_meta(folder) if folder and len(parts_of(loaded.state['config']['dataset'])) == 1 else None
    partial = dest.with_name(f'{dest.name}.partial{os.getpid()}')
    try:
        with write_errors(dest):
            partial.mkdir(parents=True)
            hf.write(partial, model_args, loaded.model.state_dict(), loaded.tokenizer.eot_id)
            write_tokenizer(loaded.tokenizer, partial, loaded.model.config.block_size)
            (partial / 'README.md').write_text(model_card(loaded, data), encoding='utf-8')
        checked = check(loaded, partial)
        with write_errors(dest):
            partial.replace(dest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return checked


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoint', metavar='OUT_DIR', help=MODEL_HELP)
    parser.add_argument('dest', metavar='DEST', help='folder to write')
    add_tokenizer_flag(parser)
    args = parser.parse_args(argv)
    loaded = with_tokenizer(load(args.checkpoint, tokenizer=args.tokenizer))
    checked = export(loaded, args.dest)
    print(f'{args.dest}: {loaded.path}, {loaded.model.num_params():,} parameters, {loaded.model.config.vocab_size:,} '
          f'ids of {loaded.tokenizer.name}')
    print(checked)
    if loaded.model.config.scale_attn_by_inverse_layer_idx:
        print('warning: transformers before 5.4 scales attention by layer only with attn_implementation="eager", which '
              'config.json asks for; do not override it there', file=sys.stderr)


if __name__ == '__main__':
    main()
