"""Sample text from a trained model.

  python scripts/sample.py out/quickstart
  python scripts/sample.py out/gpt2-small-sophiag --start='Once upon a time' --num_samples=3 --top_p=0.95
  python scripts/sample.py gpt2 --start=FILE:prompt.txt --temperature=0

Text goes to standard output, notes to standard error.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.sources import lines
from data.tokenizer import END_OF_TEXT
from runtime.arguments import argument_parser, at_least
from runtime.device import autocast
from runtime.files import one_line_errors
from runtime.gpt import generate, num_params
from scripts.load import MODEL_HELP, add_model_flags, dtype_name, load, with_tokenizer


@one_line_errors()
def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument('checkpoint', nargs='?', help=f'{MODEL_HELP} (default: out)')
    parser.add_argument('--out_dir', help="the same, as nanoGPT's flag")
    parser.add_argument('--start', help="the prompt; FILE:NAME reads the whole file NAME; '' starts a document "
                                        '(default: a newline)')
    parser.add_argument('--num_samples', type=at_least(1), default=10, help='(default: %(default)s)')
    parser.add_argument('--max_new_tokens', type=at_least(1), default=500, help='(default: %(default)s)')
    parser.add_argument('--temperature', type=at_least(0, float), default=0.8,
                        help='0: always the likeliest token (default: %(default)s)')
    parser.add_argument('--top_k', type=at_least(0), default=200,
                        help='only the k likeliest tokens; 0: all (default: %(default)s)')
    parser.add_argument('--top_p', type=at_least(0, float, at_most=1), default=1.0,
                        help='only the most likely tokens with this cumulative probability; 0: all '
                             '(default: %(default)s)')
    parser.add_argument('--seed', type=int, default=1337)
    add_model_flags(parser)
    args = parser.parse_args(argv)
    prompt = args.start
    if prompt and prompt.startswith('FILE:'):
        prompt = ''.join(lines(Path(prompt.removeprefix('FILE:'))))
    loaded = with_tokenizer(load(args.checkpoint or args.out_dir or 'out', args.device, args.tokenizer))
    model, tokenizer = loaded.model, loaded.tokenizer
    if prompt is None or prompt == '' and tokenizer.eot_id is None:
        prompt = '\n'
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eot_id]  # a document follows the end of another
    if END_OF_TEXT in prompt:
        print(f"note: {END_OF_TEXT} in the prompt is ordinary text; --start='' starts a document", file=sys.stderr)
    print(f'{loaded.path}: {num_params(model):,} parameters, tokenizer {tokenizer.name}', file=sys.stderr)

    idx = torch.tensor([ids], device=args.device)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    for _ in range(args.num_samples if args.temperature else 1):  # greedy samples are all alike
        with autocast(args.device, dtype_name(args)):
            row = generate(model, idx, args.max_new_tokens, temperature=args.temperature, top_k=args.top_k or None,
                           top_p=args.top_p if 0 < args.top_p < 1 else None,
                           stop=lambda row: row[0, -1] == tokenizer.eot_id, generator=generator)[0].tolist()
        if row[-1] == tokenizer.eot_id:
            row.pop()
        # Decoded with the prompt, because some tokenizers write a space only between two tokens.
        print(prompt + tokenizer.decode(row)[len(tokenizer.decode(ids)):] + '\n---------------', flush=True)


if __name__ == '__main__':
    main()
