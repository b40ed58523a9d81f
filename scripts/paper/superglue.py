"""Few-shot accuracy on SuperGLUE, as in the paper (section "Downstream Evaluation"): 2-shot prompts, greedy decoding.

  python scripts/paper/superglue.py out/gpt2-small-adamw out/gpt2-small-sophiag
  python scripts/paper/superglue.py out/gpt2-small-sophiag gpt2 --tasks boolq rte --output compare.png

A prompt is an instruction and two exemplars from the train split; accuracy on the validation split is averaged over 5
draws of exemplars, the same for every checkpoint. Data: the Hub's aps/super_glue, or a folder TASK/{train,val}.jsonl.
An answer is right if the first word that the model writes on the line is the right one. The table also has the accuracy
of always giving the most frequent answer, and of guessing. A bar chart goes to --output, the numbers beside it.
"""

import argparse
import json
import random
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.figures import figure, legend, plain, png_path, print_table, save
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
from scripts.paper.superglue_prompts import TASKS

HUB = 'aps/super_glue'


def parse(argv):
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoints', nargs='+', metavar='CHECKPOINT', help=MODEL_HELP)
    parser.add_argument('--tasks', nargs='+', choices=TASKS, default=list(TASKS), metavar='TASK',
                        help=f'of {" ".join(TASKS)} (default: all)')
    parser.add_argument('--data_dir', type=Path, help=f'folder of TASK/train.jsonl and TASK/val.jsonl (default: {HUB})')
    parser.add_argument('--shots', type=int, default=2, help='exemplars in a prompt (default: 2)')
    parser.add_argument('--draws', type=int, default=5, help='draws of exemplars (default: 5)')
    parser.add_argument('--limit', type=int, default=0, help='only so many validation rows of a task, drawn at random')
    parser.add_argument('--batch_size', type=int, default=32, help='prompts at once (default: 32)')
    parser.add_argument('--seed', type=int, default=1337, help='of the draws')
    parser.add_argument('--labels', nargs='+', metavar='LABEL', help='one per checkpoint (default: their names)')
    parser.add_argument('--output', default='superglue.png', help='PNG; the numbers go beside it as JSON and CSV')
    add_device_flags(parser)
    add_tokenizer_flag(parser)
    args = parser.parse_args(argv)
    if min(args.draws, args.batch_size) < 1 or min(args.shots, args.limit) < 0:
        parser.error('--draws and --batch_size must be at least 1, --shots and --limit 0 or more')
    if args.labels and len(args.labels) != len(args.checkpoints):
        parser.error(f'--labels: {len(args.labels)} labels for {len(args.checkpoints)} checkpoints')
    png_path(args.output)
    return args


# ----------------------------------------------------------------------------------------------------------------------
# Rows, from the Hub or from jsonl files


def read_rows(task, split, data_dir=None):
    """The rows of a task's 'train' or 'validation' split: dicts with the template's fields and `label`, an index."""
    if data_dir is None:
        import datasets
        try:
            rows = datasets.load_dataset(HUB, task.config, split=split)
        except Exception as error:  # whatever the network makes `datasets` raise
            raise SystemExit(f'{HUB}, {task.config}: unavailable from the Hub ({type(error).__name__}); '
                             'give --data_dir') from None
        return [row for raw in rows for row in flatten(task, raw)]
    name = {'train': 'train.jsonl', 'validation': 'val.jsonl'}[split]
    path = next((folder / name for folder in (data_dir / task.title, data_dir / task.config)
                 if (folder / name).is_file()), None)
    if path is None:
        raise SystemExit(f'{data_dir / task.title / name}: no such file; check --data_dir, or leave out the task')
    try:
        lines = path.read_text(encoding='utf-8-sig').split('\n')
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f'{path}: cannot be read as UTF-8 text ({error})') from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += flatten(task, json.loads(line)) if line.strip() else []
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise SystemExit(f'{path}:{number}: not a row of {task.title} ({error!r})') from None
    if not rows:
        raise SystemExit(f'{path}: no rows')
    return rows


def flatten(task, row):
    """The rows in one row of a file: several for MultiRC's nested form, else one. `label` becomes an index.

    Raises KeyError or ValueError if a field of the template is missing or the task has no such label.
    """
    if 'passage' in row and isinstance(row['passage'], dict):
        return [checked(task, dict(paragraph=row['passage']['text'], question=question['question'],
                                   answer=answer['text'], label=answer['label']))
                for question in row['passage']['questions'] for answer in question['answers']]
    return [checked(task, {**row, **row.get('target', {})})]


def checked(task, row):
    """`row` with its label as an index into task.answers; KeyError if it lacks a field of the template."""
    task.template.format(**row)
    # On the Hub all labels are numbers; in files they are names, numbers or booleans (True == 1).
    label = task.labels.index(row['label']) if isinstance(row['label'], str) else int(row['label'])
    if label not in range(len(task.labels)):
        raise ValueError(f'label {row["label"]!r}')
    return {**row, 'label': label}


# ----------------------------------------------------------------------------------------------------------------------
# Prompts and scores


def draw_exemplars(name, rows, shots, draws, seed):
    """`draws` lists of `shots` different rows, a function of the arguments alone."""
    if shots > len(rows):
        raise SystemExit(f'{TASKS[name].title}: {len(rows)} training rows are too few for --shots={shots}')
    return [random.Random(f'{seed} {name} {draw}').sample(rows, shots) for draw in range(draws)]


def make_prompt(task, exemplars, row):
    """The text that the model continues, without the space before the answer."""
    shown = [f'{task.template.format(**e)} {task.answers[e["label"]]}' for e in exemplars]
    return '\n\n'.join([task.instruction, *shown, task.template.format(**row)])


def read_answer(task, text):
    """The index of the answer that the model wrote, the first word of its first line; None for any other word."""
    word = re.search(r'\w+', text.split('\n')[0])
    word = word.group().lower() if word else None
    return task.answers.index(word) if word in task.answers else None


def complete(model, tokenizer, prompts, max_new_tokens, batch_size, count=lambda n: None):
    """Greedy continuations of `prompts` up to the line's end, at most `max_new_tokens`; and how many were cut.

    A prompt longer than the context loses its beginning. Prompts of similar length share a batch, padded on the right,
    of at most `batch_size` rows; it ends as soon as all rows have come to the end of their line. `count` is told how
    many are done each time.
    """
    room = model.config.block_size - max_new_tokens
    if room < 1:
        raise SystemExit(f'block_size = {model.config.block_size} leaves no room for a prompt')
    encoded = [[int(i) for i in tokenizer.encode(prompt)] for prompt in prompts]
    cut = sum(len(ids) > room for ids in encoded)
    encoded = [ids[-room:] for ids in encoded]
    texts = [''] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(encoded[i]), reverse=True)
    while order:
        size = min(batch_size, rows_at_once(model, len(encoded[order[0]]) + max_new_tokens))
        batch, order = order[:size], order[size:]
        for i, text in zip(batch, complete_lines(model, tokenizer, [encoded[i] for i in batch], max_new_tokens)):
            texts[i] = text
        count(len(batch))
    return texts, cut


def complete_lines(model, tokenizer, rows, max_new_tokens):
    """The greedy continuation of each of `rows`, lists of ids, up to the end of its line, as text."""
    starts = [len(row) for row in rows]
    device = model.lm_head.weight.device

    def lines(ids, lengths):
        return [first_line(tokenizer, row[start:end])
                for row, start, end in zip(ids.tolist(), starts, lengths.tolist())]

    idx = torch.tensor([row + [0] * (max(starts) - len(row)) for row in rows], device=device)
    ids, lengths = model.generate(
        idx, max_new_tokens, temperature=0, lengths=torch.tensor(starts, device=device),
        stop=lambda *written: torch.tensor([ended for _, ended in lines(*written)], device=device))
    return [text for text, _ in lines(ids, lengths)]


def first_line(tokenizer, ids):
    """(text of `ids` up to the end of its line or document, whether that end has come)."""
    ended = tokenizer.eot_id in ids
    text, line_end, _ = tokenizer.decode(ids[:ids.index(tokenizer.eot_id)] if ended else ids).partition('\n')
    return text, ended or bool(line_end)


def score(task, rows, texts):
    """(accuracy, fraction of `texts` that are no answer)."""
    answers = [read_answer(task, text) for text in texts]
    return (sum(answer == row['label'] for answer, row in zip(answers, rows)) / len(rows),
            answers.count(None) / len(rows))


def baselines(task, rows):
    """(accuracy of always giving the most frequent answer of `rows`, of guessing evenly among the answers)."""
    return Counter(row['label'] for row in rows).most_common(1)[0][1] / len(rows), 1 / len(task.answers)


def run_task(loaded, task, rows, draws, batch_size, count=lambda n: None):
    """The scores of a checkpoint on one task, a dict; `draws` are the lists of exemplars, `count` as in `complete`."""
    # One token more than the longest answer, to see where the word ends.
    max_new_tokens = 1 + max(len(loaded.tokenizer.encode(f' {answer}')) for answer in task.answers)
    accuracies, unparsed, cut = [], 0, 0
    for exemplars in draws:
        prompts = [make_prompt(task, exemplars, row) for row in rows]
        texts, n = complete(loaded.model, loaded.tokenizer, prompts, max_new_tokens, batch_size, count)
        accuracy, none = score(task, rows, texts)
        accuracies.append(accuracy)
        unparsed, cut = unparsed + none, cut + n
    accuracy = statistics.mean(accuracies)
    return dict(accuracy=accuracy, draws=accuracies, stdev=statistics.stdev(accuracies) if len(draws) > 1 else 0.0,
                # The error from the choice of validation rows, which are the same in every draw.
                standard_error=(accuracy * (1 - accuracy) / len(rows)) ** 0.5,
                no_answer=unparsed / len(draws), prompts_cut=cut / len(draws) / len(rows))


def draw_figure(results, names):
    """Bars of accuracy, a group for each task and a color for each checkpoint; lines for the baselines."""
    fig, (ax,) = figure(width=max(4.5, 1.2 * len(results) * (1 + len(names) / 4)), height=3.8)
    width = 0.8 / len(names)
    for i, result in enumerate(results.values()):
        for j, name in enumerate(names):
            found = result['checkpoints'][name]
            bars = ax.bar(i + (j + 0.5) * width - 0.4, 100 * found['accuracy'], width, yerr=100 * found['stdev'],
                          capsize=2, color=f'C{j}', label=plain(name) if i == 0 else None)
            ax.bar_label(bars, fmt='{:.0f}', label_type='center', color='white', fontsize=7)
        for key, what, style in (('majority', 'most frequent answer', '--'), ('random', 'guessing', ':')):
            ax.hlines(100 * result[key], i - 0.45, i + 0.45, colors='black', linestyles=style, linewidth=1.2,
                      label=what if i == 0 else None)
    ax.set_xticks(range(len(results)), results)
    ax.set(ylabel='accuracy, %', title='Few-shot accuracy on SuperGLUE')
    ax.set_ylim(0, 100)
    ax.grid(False, axis='x')
    legend(fig, ax)
    return fig


def main(argv=None):
    args = parse(argv)
    results, data = {}, {}
    for name in args.tasks:
        task = TASKS[name]
        train, rows = (read_rows(task, split, args.data_dir) for split in ('train', 'validation'))
        if args.limit:
            rows = random.Random(f'{args.seed} {name}').sample(rows, min(args.limit, len(rows)))
        majority, chance = baselines(task, rows)
        data[name] = rows, draw_exemplars(name, train, args.shots, args.draws, args.seed)
        results[task.title] = dict(rows=len(rows), training_rows=len(train), majority=majority, random=chance,
                                   checkpoints={})
    names, about = [], {}
    for number, path in enumerate(args.checkpoints):
        loaded = with_tokenizer(load(path, args.device, args.tokenizer))
        loaded.model.to(DTYPES[dtype_name(args)])
        label = args.labels[number] if args.labels else loaded.name
        label = label if label not in names else f'{label} ({path})'
        names.append(label)
        about[label] = dict(path=str(loaded.path), iter=loaded.state.get('iter_num'),
                            parameters=loaded.model.num_params())
        with tqdm(total=args.draws * sum(len(rows) for rows, _ in data.values()), desc=label, unit='prompt',
                  leave=False, disable=not sys.stderr.isatty()) as progress:
            for done, name in enumerate(args.tasks, number * len(args.tasks) + 1):
                rows, draws = data[name]
                found = run_task(loaded, TASKS[name], rows, draws, args.batch_size, progress.update)
                results[TASKS[name].title]['checkpoints'][label] = found
                tqdm.write(f'{done}/{len(args.checkpoints) * len(args.tasks)} {label}: {TASKS[name].title} '
                           f'{found["accuracy"]:.1%}', file=sys.stderr)
    table = [dict(task=title, checkpoint=name, rows=result['rows'], **{key: result['checkpoints'][name][key] for key in
             ('accuracy', 'stdev', 'standard_error')}, majority=result['majority'], random=result['random'],
             **{key: result['checkpoints'][name][key] for key in ('no_answer', 'prompts_cut')})
             for title, result in results.items() for name in names]
    print_table(table)
    save(args.output, draw_figure(results, names), table, tasks=results, checkpoints=about, shots=args.shots,
         draws=args.draws, seed=args.seed, limit=args.limit, data=str(args.data_dir or HUB))


if __name__ == '__main__':
    main()
