"""Few-shot accuracy on SuperGLUE, as in the paper (section "Downstream Evaluation"): 2-shot prompts, greedy decoding.

  python scripts/paper/superglue.py out/gpt2-small-adamw out/gpt2-small-sophiag
  python scripts/paper/superglue.py out/gpt2-small-sophiag gpt2 --tasks boolq rte --output compare.png

A prompt is an instruction and two exemplars from the train split; accuracy on the validation split is averaged over 5
draws of exemplars, the same for every checkpoint. Data: the Hub's aps/super_glue, or a folder TASK/{train,val}.jsonl.
An answer is right if the first word that the model writes on the line is the right one. The table also has the accuracy
of always giving the most frequent answer, and of guessing. A bar chart goes to --output, the numbers next to it.
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
from analysis.load import MODEL_HELP, add_model_flags, dtype_name, load, with_tokenizer
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
    parser.add_argument('--limit', type=int, default=0, help='validation examples of a task, drawn at random; 0: all')
    parser.add_argument('--batch_size', type=int, default=8, help='prompts at once (default: 8)')
    parser.add_argument('--seed', type=int, default=1337, help='of the draws')
    parser.add_argument('--output', default='superglue.png', help='PNG; the numbers go next to it as JSON and CSV')
    add_model_flags(parser)
    args = parser.parse_args(argv)
    if min(args.draws, args.batch_size) < 1 or min(args.shots, args.limit) < 0:
        parser.error('--draws and --batch_size must be at least 1, --shots and --limit 0 or more')
    png_path(args.output)
    return args


# ----------------------------------------------------------------------------------------------------------------------
# Examples, from the Hub or from jsonl files


def read_examples(task, split, data_dir=None):
    """The examples of a task's 'train' or 'validation' split: dicts with the template's fields and `label`, an index.

    In a file they have SuperGLUE's own format, which nests the examples of MultiRC.
    """
    if data_dir is None:
        import datasets
        try:
            return [as_example(task, row) for row in datasets.load_dataset(HUB, task.config, split=split)]
        except Exception as error:  # whatever the network makes `datasets` raise
            raise SystemExit(f'{HUB}, {task.config}: unavailable from the Hub ({type(error).__name__}); '
                             'give --data_dir') from None
    path = data_dir / task.title / {'train': 'train.jsonl', 'validation': 'val.jsonl'}[split]
    found = []
    try:
        for row in map(json.loads, filter(str.strip, path.read_text(encoding='utf-8-sig').split('\n'))):
            if isinstance(row.get('passage'), dict):  # MultiRC
                row = [dict(paragraph=row['passage']['text'], question=question['question'], answer=answer['text'],
                            label=answer['label'])
                       for question in row['passage']['questions'] for answer in question['answers']]
            found += [as_example(task, one) for one in (row if isinstance(row, list) else [row])]
        if not found:
            raise ValueError('it is empty')
    except OSError as error:
        raise SystemExit(f'{path}: {error.strerror}; check --data_dir, or leave out the task') from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f'{path}: not examples of {task.title} ({error!r:.200})') from None
    return found


def as_example(task, row):
    """A row as an example; KeyError or ValueError if it lacks a field of the template or the task has no such label."""
    row = {**row, **row.get('target', {})}  # where the files of WSC have the spans
    task.template.format(**row)
    # On the Hub all labels are numbers; in files they are names, numbers or booleans (True == 1).
    label = task.labels.index(row['label']) if isinstance(row['label'], str) else int(row['label'])
    if label not in range(len(task.labels)):
        raise ValueError(f'label {row["label"]!r}')
    return {**row, 'label': label}


# ----------------------------------------------------------------------------------------------------------------------
# Prompts and scores


def draw_exemplars(name, examples, shots, draws, seed):
    """`draws` lists of `shots` different examples, a function of the arguments alone."""
    if shots > len(examples):
        raise SystemExit(f'{TASKS[name].title}: {len(examples)} training examples are too few for --shots={shots}')
    return [random.Random(f'{seed} {name} {draw}').sample(examples, shots) for draw in range(draws)]


def make_prompt(task, exemplars, example):
    """The text that the model continues, without the space before the answer."""
    shown = [f'{task.template.format(**e)} {task.answers[e["label"]]}' for e in exemplars]
    return '\n\n'.join([task.instruction, *shown, task.template.format(**example)])


def read_answer(task, text):
    """The index of the answer that the model wrote, the first word of its first line; None for any other word."""
    word = re.search(r'\w+', text.split('\n')[0])
    word = word.group().lower() if word else None
    return task.answers.index(word) if word in task.answers else None


@torch.no_grad()
def complete(model, prompts, n):
    """The greedy continuations of `prompts`, lists of ids, by `n` ids. A prompt too long for that loses its beginning.

    Prompts are padded on the right, which in a causal model changes nothing to the left of the padding.
    """
    prompts = [prompt[n - model.config.block_size:] for prompt in prompts]
    device, rows = model.lm_head.weight.device, torch.arange(len(prompts))
    ends = torch.tensor([len(prompt) for prompt in prompts])
    idx = torch.zeros(len(prompts), int(ends.max()) + n, dtype=torch.int64)
    for row, prompt in zip(idx, prompts):
        row[:len(prompt)] = torch.tensor(prompt)
    for _ in range(n):
        logits = model(idx[:, :ends.max()].to(device))[0]
        idx[rows, ends] = logits[rows, ends - 1].argmax(-1).cpu()
        ends += 1
    return [row[end - n:end].tolist() for row, end in zip(idx, ends)]


def run_task(loaded, task, examples, draws, batch_size, count=lambda n: None):
    """The scores of a checkpoint on one task, a dict. `draws`: lists of exemplars. `count` is told how many prompts of
    a batch are done."""
    model, tokenizer = loaded.model, loaded.tokenizer
    # One token more than the longest answer, to see where the word ends.
    n = 1 + max(len(tokenizer.encode(f' {answer}')) for answer in task.answers)
    if n >= model.config.block_size:
        raise SystemExit(f'{loaded.path}: block_size = {model.config.block_size} is too short for a prompt')
    accuracies, no_answer, cut = [], 0, 0
    for exemplars in draws:
        prompts = [[int(i) for i in tokenizer.encode(make_prompt(task, exemplars, example))] for example in examples]
        cut += sum(len(prompt) > model.config.block_size - n for prompt in prompts)
        right, order = 0, sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for batch in (order[i:i + batch_size] for i in range(0, len(order), batch_size)):
            for i, ids in zip(batch, complete(model, [prompts[i] for i in batch], n)):
                end = ids.index(tokenizer.eot_id) if tokenizer.eot_id in ids else n
                answer = read_answer(task, tokenizer.decode(ids[:end]))
                right += answer == examples[i]['label']
                no_answer += answer is None
            count(len(batch))
        accuracies.append(right / len(examples))
    accuracy, prompts = statistics.mean(accuracies), len(draws) * len(examples)
    return dict(accuracy=accuracy, stdev=statistics.stdev(accuracies) if len(draws) > 1 else 0.0,
                # The error from the choice of validation examples, which are the same in every draw.
                standard_error=(accuracy * (1 - accuracy) / len(examples)) ** 0.5,
                no_answer=no_answer / prompts, prompts_cut=cut / prompts)


def draw_figure(table, names):
    """Bars of accuracy, a group for each task and a color for each checkpoint; lines for the baselines."""
    tasks = list(dict.fromkeys(row['task'] for row in table))
    fig, (ax,) = figure(width=max(4.5, 1.2 * len(tasks) * (1 + len(names) / 4)), height=3.8)
    width = 0.8 / len(names)
    for row in table:
        i, j = tasks.index(row['task']), names.index(row['checkpoint'])
        bars = ax.bar(i + (j + 0.5) * width - 0.4, 100 * row['accuracy'], width, yerr=100 * row['stdev'], capsize=2,
                      color=f'C{j}', label=plain(names[j]) if i == 0 else None)
        ax.bar_label(bars, fmt='{:.0f}', label_type='center', color='white', fontsize=7)
        for key, text, style in (('majority', 'most frequent answer', '--'), ('random', 'guessing', ':')):
            ax.hlines(100 * row[key], i - 0.45, i + 0.45, colors='black', linestyles=style, linewidth=1.2,
                      label=text if i == j == 0 else None)
    ax.set_xticks(range(len(tasks)), tasks)
    ax.set(ylabel='accuracy, %', title='Few-shot accuracy on SuperGLUE', ylim=(0, 100))
    ax.grid(False, axis='x')
    legend(fig, ax)
    return fig


def main(argv=None):
    args = parse(argv)
    data, table, names = {}, [], []
    for name in args.tasks:
        train, examples = (read_examples(TASKS[name], split, args.data_dir) for split in ('train', 'validation'))
        if args.limit:
            examples = random.Random(f'{args.seed} {name}').sample(examples, min(args.limit, len(examples)))
        data[name] = examples, draw_exemplars(name, train, args.shots, args.draws, args.seed)
    for path in args.checkpoints:
        loaded = with_tokenizer(load(path, args.device, args.tokenizer))
        loaded.model.to(DTYPES[dtype_name(args)])
        names.append(loaded.name if loaded.name not in names else f'{loaded.name} ({path})')
        with tqdm(total=args.draws * sum(len(examples) for examples, _ in data.values()), desc=names[-1], unit='prompt',
                  disable=not sys.stderr.isatty()) as progress:
            for name, (examples, draws) in data.items():
                task = TASKS[name]
                majority = Counter(example['label'] for example in examples).most_common(1)[0][1] / len(examples)
                table.append(dict(task=task.title, checkpoint=names[-1], examples=len(examples),
                                  **run_task(loaded, task, examples, draws, args.batch_size, progress.update),
                                  majority=majority, random=1 / len(task.answers)))
    print_table(table)
    save(args.output, draw_figure(table, names), table, shots=args.shots, draws=args.draws, seed=args.seed,
         limit=args.limit, data=str(args.data_dir or HUB), checkpoints=dict(zip(names, args.checkpoints)))


if __name__ == '__main__':
    main()
