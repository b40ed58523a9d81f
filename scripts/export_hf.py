"""Export a checkpoint as a Hugging Face GPT-2: config.json, model.safetensors and, if possible, the tokenizer.

  python scripts/export_hf.py out/gpt2-small-sophiag hf/gpt2-small-sophiag

Then `GPT2LMHeadModel.from_pretrained` and `AutoTokenizer.from_pretrained` load DEST. It is written only if transformers
computes the same logits, because an edited model's weights may happen to have a GPT-2's shapes.
"""

import base64
import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.tokenizer import END_OF_TEXT, GPT2, Byte, FileTokenizer
from runtime.arguments import argument_parser
from runtime.files import local_path, one_line, one_line_errors
from runtime.gpt import ACTIVATIONS, TRANSPOSED, num_params
from scripts.load import MODEL_HELP, add_tokenizer_flag, load, with_tokenizer

TOLERANCE = 1e-4  # on logits, in float32


def to_hf(model, eot_id):
    """Return transformers' GPT2LMHeadModel with the weights of a GPT. Raises RuntimeError if they do not fit."""
    import transformers
    c, gelu = model.config, getattr(model.config, 'gelu_approximate', 'none')  # nanoGPT's config has fewer fields
    scaled = getattr(c, 'scale_attn_by_inverse_layer_idx', False)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head,
        activation_function=next(name for name, approximate in ACTIVATIONS.items() if approximate == gelu),
        scale_attn_by_inverse_layer_idx=scaled, attn_implementation='eager' if scaled else None,
        resid_pdrop=c.dropout, embd_pdrop=c.dropout, attn_pdrop=c.dropout, bos_token_id=eot_id, eos_token_id=eot_id,
        bias=c.bias))  # GPT.from_pretrained reads `bias`; Hugging Face's GPT-2 always has biases
    zeros = {key: torch.zeros_like(w) for key, w in theirs.state_dict().items() if key.endswith('.bias')}
    weights = {key: w.t() if key.endswith(TRANSPOSED) else w for key, w in model.state_dict().items()}
    theirs.load_state_dict(zeros | weights)
    return theirs.eval()


def fast_tokenizer(tokenizer):
    """Return a tokenizer of the package tokenizers; None for characters and for a fork's class."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode
    if isinstance(tokenizer, FileTokenizer):
        tokenizer.bpe.post_processor = None  # it may add tokens that training texts do not have
        return tokenizer.bpe
    if isinstance(tokenizer, GPT2):
        ranks = tokenizer.bpe._mergeable_ranks.items()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, 'gpt2.tiktoken')  # a file in tiktoken's own format
            path.write_text(''.join(f'{base64.b64encode(token).decode()} {rank}\n' for token, rank in ranks))
            fast = TikTokenConverter(vocab_file=str(path), pattern=tokenizer.bpe._pat_str).converted()
    elif isinstance(tokenizer, Byte):
        names = bytes_to_unicode() | {0: END_OF_TEXT}
        fast = Tokenizer(models.BPE(vocab={name: byte for byte, name in names.items()}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
    else:
        return None
    fast.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return fast


@torch.no_grad()
def export(loaded, dest):
    """Write `loaded` to `dest`, a new folder; return the largest difference between transformers' logits and ours."""
    import transformers
    dest, model, tokenizer = Path(dest), loaded.model, loaded.tokenizer
    if dest.exists():
        raise SystemExit(f'{dest}: exists; give another folder, or remove it')
    try:
        theirs = to_hf(model, tokenizer.eot_id)
    except RuntimeError as error:
        raise SystemExit(f"{dest}: not written; the weights are not a GPT-2's ({one_line(error)})") from None
    idx = torch.randint(model.config.vocab_size, (2, model.config.block_size))
    if tokenizer.eot_id is not None:  # an edited model may separate documents
        idx[:, 1::5] = tokenizer.eot_id
    difference = (theirs(idx).logits - model(idx, idx.clone())[0]).abs().max().item()
    if not difference <= TOLERANCE:  # NaN is rejected, too
        raise SystemExit(f'{dest}: not written; transformers computes other logits, by up to {difference:.2g}')
    theirs.save_pretrained(dest)
    if theirs.config.scale_attn_by_inverse_layer_idx:  # transformers before 5.4 only scales eager attention
        config = json.loads((dest / 'config.json').read_text()) | dict(_attn_implementation='eager')
        (dest / 'config.json').write_text(json.dumps(config, indent=2))
    if fast := fast_tokenizer(tokenizer):
        end = fast.id_to_token(tokenizer.eot_id)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=fast, bos_token=end, eos_token=end, model_max_length=model.config.block_size,
            clean_up_tokenization_spaces=False).save_pretrained(dest)
    else:
        print(f'note: the tokenizer {tokenizer.name} is not exported', file=sys.stderr)
    return difference


@one_line_errors()
def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument('checkpoint', metavar='OUT_DIR', help=MODEL_HELP)
    parser.add_argument('dest', metavar='DEST', type=local_path, help='folder to write')
    add_tokenizer_flag(parser)
    args = parser.parse_args(argv)
    loaded = with_tokenizer(load(args.checkpoint, tokenizer=args.tokenizer))
    difference = export(loaded, args.dest)
    print(f'{args.dest}: {num_params(loaded.model):,} parameters, logits differ by at most {difference:.1e}')


if __name__ == '__main__':
    main()
