"""Exports a checkpoint as a Hugging Face GPT-2: config.json, model.safetensors and, if it can, the tokenizer.

  python scripts/export_hf.py out/gpt2-small-sophiag hf/gpt2-small-sophiag

Then `GPT2LMHeadModel.from_pretrained` and `AutoTokenizer.from_pretrained` load DEST. Before it appears, transformers
has computed the same logits from it: an edited model whose weights happen to have a GPT-2's shapes is rejected.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.load import MODEL_HELP, add_tokenizer_flag, load, with_tokenizer
from data.tokenizer import END_OF_TEXT, GPT2, FileTokenizer
from model import ACTIVATIONS, TRANSPOSED

TOLERANCE = 1e-4  # on logits, in float32


def to_hf(model, eot_id):
    """The transformers GPT2LMHeadModel with the weights of a GPT; RuntimeError when it has other weights."""
    import transformers
    c = model.config
    activation = next(name for name, approximate in ACTIVATIONS.items() if approximate == c.gelu_approximate)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head,
        activation_function=activation, scale_attn_by_inverse_layer_idx=c.scale_attn_by_inverse_layer_idx,
        resid_pdrop=c.dropout, embd_pdrop=c.dropout, attn_pdrop=c.dropout, bos_token_id=eot_id, eos_token_id=eot_id,
        bias=c.bias))  # `bias` is for GPT.from_pretrained: Hugging Face's GPT-2 always has biases
    zeros = {key: torch.zeros_like(w) for key, w in theirs.state_dict().items() if key.endswith('.bias')}
    theirs.load_state_dict(zeros | {key: w.t() if key.endswith(TRANSPOSED) else w
                                    for key, w in model.state_dict().items()})
    return theirs


def merges_of(ranks):
    """GPT-2's merges, in order, from tiktoken's {bytes: rank}: the two parts into which earlier merges join a token."""
    merges = []
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.get):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        merges.append(parts)
    return merges


def gpt2_tokenizer(tokenizer):
    """GPT-2's tokenizer for the package tokenizers, which writes each byte as a character: the byte's own where it is
    printable, else U+0100, U+0101, …"""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    printable = {*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)}
    others = iter(range(256, 512))
    characters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    ranks = tokenizer.bpe._mergeable_ranks
    written = {token: ''.join(characters[byte] for byte in token) for token in ranks}
    vocab = {written[token]: i for token, i in ranks.items()} | {END_OF_TEXT: tokenizer.eot_id}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[(written[a], written[b]) for a, b in merges_of(ranks)]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return fast


def write_tokenizer(tokenizer, folder, block_size):
    """Writes tokenizer.json and its config, except for bytes and characters."""
    if not isinstance(tokenizer, (GPT2, FileTokenizer)):
        print(f'note: the tokenizer {tokenizer.name} is not exported', file=sys.stderr)
        return
    fast = tokenizer.bpe if isinstance(tokenizer, FileTokenizer) else gpt2_tokenizer(tokenizer)
    fast.save(str(folder / 'tokenizer.json'))
    config = dict(tokenizer_class='PreTrainedTokenizerFast', model_max_length=block_size,
                  clean_up_tokenization_spaces=False)
    if tokenizer.eot_id is not None:
        config['eos_token'] = config['bos_token'] = fast.id_to_token(tokenizer.eot_id)
    (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=2))


@torch.no_grad()
def export(loaded, dest):
    """Writes `loaded` to `dest`, a new folder; returns the largest difference between transformers' logits and ours.

    The folder gets its name when it is complete and checked; after an error nothing is left.
    """
    import transformers
    transformers.logging.disable_progress_bar()
    dest, model = Path(dest), loaded.model
    if dest.exists():
        raise SystemExit(f'{dest}: exists; give another folder, or remove it')
    partial = dest.with_name(f'{dest.name}.{os.getpid()}.partial')
    partial.mkdir(parents=True)
    try:
        to_hf(model, loaded.tokenizer.eot_id).save_pretrained(partial)
        if model.config.scale_attn_by_inverse_layer_idx:
            print('note: transformers before 5.4 scales attention by layer only with attn_implementation="eager", '
                  'which config.json asks for; do not override it there', file=sys.stderr)
            config = json.loads((partial / 'config.json').read_text()) | dict(_attn_implementation='eager')
            (partial / 'config.json').write_text(json.dumps(config, indent=2))
        write_tokenizer(loaded.tokenizer, partial, model.config.block_size)
        idx = torch.randint(model.config.vocab_size, (2, model.config.block_size))
        theirs = transformers.GPT2LMHeadModel.from_pretrained(partial).eval()(idx).logits
        difference = (theirs - model(idx)[0]).abs().max().item()
        if not difference <= TOLERANCE:  # NaN, too
            raise SystemExit(f'{dest}: not written; transformers computes other logits, by up to {difference:.2g}')
        partial.rename(dest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return difference


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoint', metavar='OUT_DIR', help=MODEL_HELP)
    parser.add_argument('dest', metavar='DEST', help='folder to write')
    add_tokenizer_flag(parser)
    args = parser.parse_args(argv)
    loaded = with_tokenizer(load(args.checkpoint, tokenizer=args.tokenizer))
    difference = export(loaded, args.dest)
    print(f'{args.dest}: {loaded.model.num_params():,} parameters, logits differ by at most {difference:.1e}')


if __name__ == '__main__':
    main()
