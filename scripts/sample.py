"""Samples text from a trained model.

  python scripts/sample.py out/quickstart
  python scripts/sample.py out/gpt2-small-sophiag --start='Once upon a time' --num_samples=3 --top_p=0.95
  python scripts/sample.py gpt2 --prompt_file=prompts.txt --temperature=0

Text goes to standard output, everything else to standard error. The samples of a prompt are computed together: the
first one is written as it comes, the others once all are complete.
"""

import argparse
import io
import math
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.load import (
    MODEL_HELP,
    add_device_flags,
    add_tokenizer_flag,
    dtype_name,
    load,
    rows_at_once,
    with_tokenizer,
)
from runtime.device import DTYPES


def parse(argv):
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoint', nargs='?', help=f'{MODEL_HELP} (default: out)')
    parser.add_argument('--out_dir', help='the same, as a flag')
    parser.add_argument('--start', nargs='+', metavar='PROMPT', default=[],
                        help="one or several prompts; FILE:NAME reads the whole file NAME; '' starts a document "
                             '(default: a newline)')
    parser.add_argument('--prompt_file', type=Path, help='a file with one prompt on each line')
    parser.add_argument('--num_samples', type=int, default=10, help='samples of each prompt (default: 10)')
    parser.add_argument('--max_new_tokens', type=int, default=500, help='(default: 500)')
    parser.add_argument('--temperature', type=float, default=0.8, help='0: always the most likely token (default: 0.8)')
    parser.add_argument('--top_k', type=int, default=200, help='only the k most likely tokens; 0: all (default: 200)')
    parser.add_argument('--top_p', type=float, default=1.0,
                        help='only the most likely tokens that together have this probability (default: 1)')
    parser.add_argument('--seed', type=int, default=1337)
    add_device_flags(parser)
    add_tokenizer_flag(parser)
    args = parser.parse_args(argv)
    if args.checkpoint and args.out_dir:
        parser.error(f'{args.checkpoint} and --out_dir={args.out_dir}: give one of them')
    args.checkpoint = args.checkpoint or args.out_dir or 'out'
    if not 0 <= args.temperature < math.inf:
        parser.error(f'--temperature={args.temperature}: must be a finite number, 0 or more')
    if args.top_k < 0 or not 0 < args.top_p <= 1:
        parser.error('--top_k must be 0 or more, --top_p above 0 and at most 1')
    if min(args.num_samples, args.max_new_tokens) < 1:
        parser.error('--num_samples and --max_new_tokens must be at least 1')
    return args


def read(path):
    """The text of a file, without its byte order mark; SystemExit when it cannot be read."""
    try:
        return path.read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f'{path}: cannot be read as UTF-8 text ({error})') from None


def prompts(args):
    """The prompts that the flags ask for."""
    found = [read(Path(start[5:])) if start.startswith('FILE:') else start for start in args.start]
    if args.prompt_file:
        found += [line for line in read(args.prompt_file).split('\n') if line]
        if not found:
            raise SystemExit(f'{args.prompt_file}: holds no prompt')
    return found or ['\n']


def encode(prompt, loaded):
    """The ids of a prompt, (1, T); an empty prompt is the end-of-text id, after which a document begins."""
    ids = loaded.tokenizer.encode(prompt)
    if not len(ids):
        if loaded.tokenizer.eot_id is None:
            raise SystemExit(f'the tokenizer {loaded.tokenizer.name} has no end-of-text id to start from; '
                             'give a prompt with --start')
        ids = [loaded.tokenizer.eot_id]
    return torch.tensor([[int(i) for i in ids]], device=loaded.model.lm_head.weight.device)


class Writer:
    """Writes the text of a row of ids to standard output as the row grows: what follows the prompt in its document."""

    def __init__(self, tokenizer, prompt):
        self.tokenizer, self.start = tokenizer, len(prompt)
        self.written = len(tokenizer.decode(prompt))

    def __call__(self, ids, complete=False):
        """Writes what is new in `ids`, all of the row so far."""
        new = ids[self.start:]
        if self.tokenizer.eot_id in new:
            ids = ids[:self.start + new.index(self.tokenizer.eot_id)]
        # Some tokenizers write a space only between two tokens, so the row is decoded as a whole.
        text = self.tokenizer.decode(ids)
        # A character may take several tokens; until the last of them it decodes to U+FFFD.
        if complete or not text.endswith('\ufffd'):
            print(text[self.written:], end='', flush=True)
            self.written = len(text)


def write_samples(loaded, prompt, idx, rows, args, generator):
    """Writes `rows` continuations of `idx`, the ids (1, T) of `prompt`, and returns how many tokens they took."""
    ids = idx[0].tolist()
    eot_id = -1 if loaded.tokenizer.eot_id is None else loaded.tokenizer.eot_id
    write_first = Writer(loaded.tokenizer, ids)
    print(prompt, end='', flush=True)

    def stop(ids, lengths):
        write_first(ids[0, :lengths[0]].tolist())
        return ids.gather(1, lengths[:, None] - 1).squeeze(1) == eot_id

    found, lengths = loaded.model.generate(
        idx.expand(rows, -1), args.max_new_tokens, args.temperature, args.top_k or None,
        args.top_p if args.top_p < 1 else None, stop=stop, generator=generator)
    for number, (row, length) in enumerate(zip(found.tolist(), lengths.tolist())):
        if number > 0:
            print(prompt, end='')
        write = Writer(loaded.tokenizer, ids) if number > 0 else write_first
        write(row[:length], complete=True)
        print('\n---------------', flush=True)
    return int((lengths - len(ids)).sum())


def main(argv=None):
    args = parse(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may write characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors='replace')
    starts = prompts(args)
    loaded = with_tokenizer(load(args.checkpoint, args.device, args.tokenizer))
    loaded.model.to(DTYPES[dtype_name(args)])
    generator = torch.Generator(args.device).manual_seed(args.seed)
    encoded = [encode(prompt, loaded) for prompt in starts]
    print(f'{loaded.path}: {loaded.model.num_params():,} parameters, tokenizer {loaded.tokenizer.name}',
          file=sys.stderr)
    together = rows_at_once(loaded.model, loaded.model.config.block_size)
    tokens, started = 0, time.perf_counter()
    try:
        for prompt, idx in zip(starts, encoded):
            for done in range(0, args.num_samples, together):
                rows = min(together, args.num_samples - done)
                tokens += write_samples(loaded, prompt, idx, rows, args, generator)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return
    seconds = time.perf_counter() - started
    print(f'{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s on {args.device}', file=sys.stderr)


if __name__ == '__main__':
    main()
