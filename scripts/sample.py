"""Text from a trained model.

  python scripts/sample.py --out_dir=out/quickstart
  python scripts/sample.py --out_dir=out/gpt2-small-sophiag --start='Once upon a time' --num_samples=3 --top_p=0.95
  python scripts/sample.py --out_dir=gpt2 --prompt_file=prompts.txt --temperature=0

Text goes to standard output as it comes, the rest to standard error.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.tokenizer import TOKENIZERS
from scripts.load import DTYPES, MODEL_HELP, load, with_tokenizer


def parse(argv):
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out_dir', default='out', help=MODEL_HELP)
    parser.add_argument('--start', nargs='+', metavar='PROMPT', default=[],
                        help="one or several prompts; FILE:NAME takes the whole file NAME; '' is the beginning of a "
                             'document (default: a line end)')
    parser.add_argument('--prompt_file', type=Path, help='a file with one prompt on each line')
    parser.add_argument('--num_samples', type=int, default=10, help='samples of each prompt (default: 10)')
    parser.add_argument('--max_new_tokens', type=int, default=500, help='(default: 500)')
    parser.add_argument('--temperature', type=float, default=0.8, help='0: always the likeliest token (default: 0.8)')
    parser.add_argument('--top_k', type=int, default=200, help='only the k likeliest tokens; 0: all (default: 200)')
    parser.add_argument('--top_p', type=float, default=1.0,
                        help='only the likeliest tokens that have this probability together (default: 1)')
    parser.add_argument('--seed', type=int, default=1337)
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--dtype', choices=DTYPES, help='default: bfloat16 on cuda, else float32')
    parser.add_argument('--tokenizer', choices=TOKENIZERS,
                        help="needed only if the checkpoint's data set is not here any more")
    args = parser.parse_args(argv)
    if not 0 <= args.temperature < math.inf:
        parser.error(f'--temperature={args.temperature}: must be a finite number, 0 or more')
    if args.top_k < 0 or not 0 < args.top_p <= 1:
        parser.error('--top_k must be 0 or more, --top_p above 0 and at most 1')
    if min(args.num_samples, args.max_new_tokens) < 1:
        parser.error('--num_samples and --max_new_tokens must be at least 1')
    return args


def read(path):
    """The text of a file; SystemExit when there is none."""
    try:
        return path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f'{path}: cannot be read as UTF-8 text ({error})') from None


def prompts(args):
    """The prompts that the flags ask for."""
    found = [read(Path(start[5:])) if start.startswith('FILE:') else start for start in args.start]
    if args.prompt_file:
        found += [line for line in read(args.prompt_file).splitlines() if line]
        if not found:
            raise SystemExit(f'{args.prompt_file}: no prompt in it')
    return found or ['\n']


def encode(prompt, loaded):
    """The ids of a prompt, (1, T); an empty one is the end-of-text id, after which a document begins."""
    ids = loaded.tokenizer.encode(prompt)
    if not len(ids):
        if loaded.tokenizer.eot_id is None:
            raise SystemExit(f'the tokenizer {loaded.tokenizer.name} has no end-of-text id to begin from; '
                             'give a prompt with --start')
        ids = [loaded.tokenizer.eot_id]
    return torch.tensor([[int(i) for i in ids]], device=loaded.model.lm_head.weight.device)


def write_sample(loaded, idx, args, generator):
    """Writes one continuation of `idx` up to the end of the document, and returns how many tokens it took."""
    waiting, n = [], 0
    for new in loaded.model.stream(idx, args.max_new_tokens, args.temperature, args.top_k or None,
                                   args.top_p if args.top_p < 1 else None, generator=generator):
        n += 1
        if new.item() == loaded.tokenizer.eot_id:
            break
        # A character may need several tokens; until its last one comes, it decodes to U+FFFD.
        waiting.append(new.item())
        text = loaded.tokenizer.decode(waiting)
        if not text.endswith('\ufffd') or len(waiting) > 3:
            print(text, end='', flush=True)
            waiting.clear()
    print(loaded.tokenizer.decode(waiting) if waiting else '')
    return n


def main(argv=None):
    args = parse(argv)
    starts = prompts(args)
    loaded = with_tokenizer(load(args.out_dir, args.device, args.tokenizer))
    loaded.model.to(DTYPES[args.dtype or ('bfloat16' if args.device.startswith('cuda') else 'float32')])
    generator = torch.Generator(args.device).manual_seed(args.seed)
    encoded = [encode(prompt, loaded) for prompt in starts]
    print(f'{loaded.path}: {loaded.model.num_params():,} parameters, tokenizer {loaded.tokenizer.name}',
          file=sys.stderr)
    tokens, started = 0, time.perf_counter()
    try:
        for prompt, idx in zip(starts, encoded):
            for _ in range(args.num_samples):
                print(prompt, end='', flush=True)
                tokens += write_sample(loaded, idx, args, generator)
                print('---------------', flush=True)
    except BrokenPipeError:  # the reader has enough, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it ends
        return
    seconds = time.perf_counter() - started
    print(f'{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s on {args.device}', file=sys.stderr)


if __name__ == '__main__':
    main()
