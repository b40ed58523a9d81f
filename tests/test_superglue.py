"""scripts/paper/superglue.py: examples of both sources, prompts, batches, scores of a model with known answers."""

import csv
import json

import pytest
import torch
from conftest import rejection
from test_sample import make_model, save_run

from analysis.load import load, with_tokenizer
from data.tokenizer import get_tokenizer
from scripts.paper import superglue
from scripts.paper.superglue_prompts import TASKS

# The same example as jsonl files have it and as the Hub has it, and the label that both mean.
EXAMPLES = {
    'boolq': (dict(passage='P.', question='is it so', label=True), dict(passage='P.', question='is it so', label=1), 1),
    'cb': (dict(premise='P.', hypothesis='H.', label='contradiction'), dict(premise='P.', hypothesis='H.', label=1), 1),
    'copa': (dict(premise='P.', choice1='A.', choice2='B.', question='cause', label=1),) * 2 + (1,),
    'rte': (dict(premise='P.', hypothesis='H.', label='not_entailment'),
            dict(premise='P.', hypothesis='H.', label=1), 1),
    'wic': (dict(word='w', sentence1='A.', sentence2='B.', label=False),
            dict(word='w', sentence1='A.', sentence2='B.', label=0), 0),
    'wsc': (dict(text='T.', target=dict(span1_text='Bob', span2_text='he', span1_index=0, span2_index=3), label=True),
            dict(text='T.', span1_text='Bob', span2_text='he', span1_index=0, span2_index=3, label=1), 1),
    'multirc': (dict(passage=dict(text='P.', questions=[dict(question='Q?', answers=[dict(text='b', label=1)])])),
                dict(paragraph='P.', question='Q?', answer='b', label=1), 1)}


def write_task(folder, examples):
    folder.mkdir(parents=True)
    for name, part in (('train', [{**row, 'premise': f'Seen {i}.'} for i, row in enumerate(examples[:4])]),
                       ('val', examples)):
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in part))


@pytest.mark.parametrize('name', TASKS)
def test_examples_of_files_and_of_the_hub_agree(tmp_path, name):
    task, (ours, hub, label) = TASKS[name], EXAMPLES[name]
    write_task(tmp_path / task.title, [ours])
    (ours,), hub = superglue.read_examples(task, 'validation', tmp_path), superglue.as_example(task, hub)
    assert ours['label'] == hub['label'] == label and type(ours['label']) is int
    assert task.template.format(**ours) == task.template.format(**hub)
    for wrong in (-1, len(task.answers), 'nonsense'):
        with pytest.raises(ValueError):
            superglue.as_example(task, {**hub, 'label': wrong})


def test_multirc_has_an_example_for_each_answer(tmp_path):
    write_task(tmp_path / 'MultiRC', [dict(passage=dict(text='P.', questions=[
        dict(question='Q1?', answers=[dict(text='a', label=0), dict(text='b', label=1)]),
        dict(question='Q2?', answers=[dict(text='c', label=1)])]))])
    found = superglue.read_examples(TASKS['multirc'], 'validation', tmp_path)
    assert [(example['question'], example['answer'], example['label']) for example in found] == [
        ('Q1?', 'a', 0), ('Q1?', 'b', 1), ('Q2?', 'c', 1)]


def test_prompt():
    exemplars = [dict(passage='One.', question='is a', label=1), dict(passage='Two.', question='is b', label=0)]
    prompt = superglue.make_prompt(TASKS['boolq'], exemplars, dict(passage='Three.', question='is c', label=1))
    assert prompt == ('Answer the question about the passage with yes or no.\n\n'
                      'Passage: One.\nQuestion: is a?\nAnswer: yes\n\n'
                      'Passage: Two.\nQuestion: is b?\nAnswer: no\n\n'
                      'Passage: Three.\nQuestion: is c?\nAnswer:')


def test_the_first_word_of_the_line_is_the_answer():
    texts = [' true', ' False.', '  neither, I think', ' false', '', ' trueish', '\n true', ' it is false']
    assert [superglue.read_answer(TASKS['cb'], text) for text in texts] == [0, 1, 2, 1, None, None, None, None]


def test_completions_in_a_batch_are_those_of_each_prompt_alone():
    model, encode = make_model(vocab_size=256, block_size=64), get_tokenizer('byte').encode
    prompts = [encode(text) for text in ('short', 'a prompt of some length', 'x', 'one longer than the context ' * 5)]
    found = superglue.complete(model, prompts, 9)
    for prompt, ids in zip(prompts, found):
        assert ids == model.generate(torch.tensor([prompt[-55:]]), 9, temperature=0)[0, -9:].tolist()


def test_scores_of_a_model_with_known_answers(tmp_path, monkeypatch):
    """A claim A is answered with yes, B with no, and after C the document has ended before the yes."""
    loaded = with_tokenizer(load(save_run(tmp_path / 'run', tokenizer=get_tokenizer('byte').meta)))
    loaded.model.config.block_size = 400
    answers = {'A': ' yes\n', 'B': ' no\n', 'C': '\0yes'}

    def forward(idx):
        logits = torch.zeros(*idx.shape, 256)
        for i, ids in enumerate(idx.tolist()):
            for t in range(len(ids)):
                prompt, _, written = bytes(ids[:t + 1]).decode().rpartition('Answer:')
                answer = answers.get(prompt[-2:-1], '')
                logits[i, t, ord(answer[len(written)] if len(written) < len(answer) else '?')] = 1
        return logits, None

    monkeypatch.setattr(loaded.model, 'forward', forward)
    examples = [dict(premise='P.', hypothesis=claim, label=label)
                for claim, label in (('A', 0), ('A', 1), ('B', 1), ('B', 1), ('C', 0))]
    found = superglue.run_task(loaded, TASKS['rte'], examples, [examples[:2], examples[2:4]], batch_size=2)
    assert found['accuracy'] == pytest.approx(3 / 5) and found['stdev'] == 0 and found['no_answer'] == 1 / 5
    assert found['standard_error'] == pytest.approx((0.6 * 0.4 / 5) ** 0.5) and found['prompts_cut'] == 0


def test_script(tmp_path, monkeypatch, capsys):
    write_task(tmp_path / 'data/RTE', [dict(premise=f'P{i}.', hypothesis='H.', label='entailment' if i < 6 else
                                            'not_entailment') for i in range(10)])
    write_task(tmp_path / 'data/COPA', [dict(premise=f'P{i}.', choice1='A.', choice2='B.', question='cause',
                                             label=i % 2) for i in range(8)])
    runs = [str(save_run(tmp_path / name, tokenizer=get_tokenizer('byte').meta)) for name in ('one', 'two')]
    asked, plain = [], superglue.make_prompt
    monkeypatch.setattr(superglue, 'make_prompt', lambda *args: asked.append(plain(*args)) or asked[-1])
    argv = [*runs, '--tasks', 'rte', 'copa', f'--data_dir={tmp_path / "data"}', '--draws=3', '--device=cpu',
            f'--output={tmp_path / "figure.png"}']
    superglue.main(argv)
    assert (tmp_path / 'figure.png').stat().st_size > 5000 and 'majority' in capsys.readouterr().out
    with (tmp_path / 'figure.csv').open() as f:
        table = list(csv.DictReader(f))
    assert [(row['task'], row['checkpoint'], row['examples'], row['majority'], row['random']) for row in table] == [
        (task, name, *rest) for name in ('one', 'two') for task, *rest in (('RTE', '10', '0.6', '0.5'),
                                                                          ('COPA', '8', '0.5', '0.5'))]
    assert len(asked) == 2 * 3 * 18 and asked[:54] == asked[54:]  # the same for both checkpoints
    assert asked[:10] != asked[10:20] and all(prompt.count('Seen') == 2 for prompt in asked)  # of the train split
    assert json.loads((tmp_path / 'figure.json').read_text())['draws'] == 3
    asked.clear()
    superglue.main([*argv, '--limit=3', '--draws=1'])
    assert len(asked) == 2 * 6 and not all(f'P{i}.' in asked[i] for i in range(3))


@pytest.mark.parametrize('line', ['', '7', '{"premise": "P."}', 'not json',
                                  '{"premise": "P.", "hypothesis": "H.", "label": "perhaps"}'])
def test_files_of_something_else_are_rejected(tmp_path, line):
    (tmp_path / 'RTE').mkdir()
    (tmp_path / 'RTE/val.jsonl').write_text(line)
    assert 'val.jsonl: not examples of RTE' in rejection(superglue.read_examples, TASKS['rte'], 'validation', tmp_path)


def test_missing_files_and_bad_outputs_are_rejected(tmp_path):
    assert 'CB/train.jsonl: No such file' in rejection(
        superglue.main, ['nowhere', '--tasks', 'cb', f'--data_dir={tmp_path}', '--device=cpu'])
    assert '.png' in rejection(superglue.main, ['nowhere', '--output=figure.pdf'])
