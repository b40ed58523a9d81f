"""Measure few-shot accuracy on SuperGLUE, as in the paper (section "Downstream Evaluation"): 2 shots, greedy decoding.

  python scripts/paper/superglue.py out/gpt2-small-adamw out/gpt2-small-sophiag
  python scripts/paper/superglue.py out/gpt2-small-sophiag gpt2 --tasks boolq rte --output compare.csv

The first word of the model's line is its answer. The table has accuracy and stdev over draws of the shots;
standard_error, from the number of validation examples; prompts_cut, the share of prompts that exceed the context and
lose their beginning; majority, the accuracy of the most frequent answer.
"""

import random
import re
import statistics
import sys
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.figures import print_table, write_csv
from runtime.arguments import argument_parser
from runtime.device import autocast
from runtime.files import local_path, one_line_errors
from runtime.gpt import generate
from scripts.load import MODEL_HELP, add_model_flags, dtype_name, load, with_tokenizer

SHOTS, DRAWS = 2, 5
SEED = 1337  # seed of the draws
TASKS = {  # name on the Hub: (title, instruction, template of an example, a word for each label of the data set)
    'boolq': ('BoolQ', 'Answer the question about the passage with yes or no.',
              'Passage: {passage}\nQuestion: {question}?\nAnswer:', ('no', 'yes')),
    'cb': ('CB', 'Say whether the claim is true or false according to the text, or neither.',
           'Text: {premise}\nClaim: {hypothesis}\nAnswer:', ('true', 'false', 'neither')),
    'copa': ('COPA', 'Choose the more plausible cause or effect, 1 or 2.',
             'Sentence: {premise}\nWhich one is the {question}?\n1: {choice1}\n2: {choice2}\nAnswer:', ('1', '2')),
    'rte': ('RTE', 'Say whether the claim follows from the text with yes or no.',
            'Text: {premise}\nClaim: {hypothesis}\nAnswer:', ('yes', 'no')),
}


def make_prompt(task, exemplars, example):
    """Return the prompt, without the space before the answer."""
    _, instruction, template, answers = task
    shown = [f'{template.format(**e)} {answers[e["label"]]}' for e in exemplars]
    return '\n\n'.join([instruction, *shown, template.format(**example)])


def read_answer(task, text):
    """Return the index of the answer with which the first line of `text` begins, or None."""
    word, answers = next(iter(re.findall(r'\w+', text.split('\n')[0].lower())), None), task[-1]
    return answers.index(word) if word in answers else None


def run_task(loaded, task, examples, draws):
    """Return a checkpoint's scores on one task as a dict. `draws`: lists of exemplars."""
    tokenizer, device = loaded.tokenizer, next(loaded.model.parameters()).device
    # One token more than the longest answer shows where the word ends.
    n = 1 + max(len(tokenizer.encode(f' {answer}')) for answer in task[-1])
    context, accuracies, cut = loaded.model.config.block_size - n, [], 0
    for exemplars in draws:
        right = 0
        for example in tqdm(examples, desc=f'{loaded.path} {task[0]}', disable=None):
            prompt = [int(i) for i in tokenizer.encode(make_prompt(task, exemplars, example))]
            cut += len(prompt) > context
            idx = torch.tensor([prompt[-context:]], device=device)
            ids = generate(loaded.model, idx, n, temperature=0)[0, idx.size(1):].tolist()
            end = ids.index(tokenizer.eot_id) if tokenizer.eot_id in ids else n
            right += read_answer(task, tokenizer.decode(ids[:end])) == example['label']
        accuracies.append(right / len(examples))
    accuracy, labels = statistics.mean(accuracies), [example['label'] for example in examples]
    return dict(accuracy=accuracy, stdev=statistics.stdev(accuracies),
                standard_error=(accuracy * (1 - accuracy) / len(examples)) ** 0.5,  # the draws share the examples
                prompts_cut=cut / len(draws) / len(examples),
                majority=labels.count(statistics.mode(labels)) / len(labels), random=1 / len(task[-1]))


@one_line_errors()
def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument('checkpoints', nargs='+', metavar='CHECKPOINT', help=MODEL_HELP)
    parser.add_argument('--tasks', nargs='+', choices=TASKS, default=list(TASKS), help='default: all')
    parser.add_argument('--output', type=local_path, default='superglue.csv', metavar='FILE.csv',
                        help='default: %(default)s')
    parser.add_argument('--data', default='aps/super_glue', help='on the Hub, or a path (default: %(default)s)')
    add_model_flags(parser)
    args = parser.parse_args(argv)
    from datasets import load_dataset

    data, table = {}, []
    for name in args.tasks:
        train, examples = (list(load_dataset(args.data, name, split=split)) for split in ('train', 'validation'))
        data[name] = examples, [random.Random(f'{SEED} {name} {draw}').sample(train, SHOTS) for draw in range(DRAWS)]
    for path in args.checkpoints:
        loaded = with_tokenizer(load(path, args.device, args.tokenizer))
        for name, (examples, draws) in data.items():
            with autocast(args.device, dtype_name(args)):
                results = run_task(loaded, TASKS[name], examples, draws)
            table.append(dict(task=TASKS[name][0], checkpoint=path, examples=len(examples), **results))
        write_csv(args.output, table)  # written after each checkpoint, because each takes long
    print_table(table)


if __name__ == '__main__':
    main()
