"""scripts/paper/superglue.py: rows of both sources, prompts, the scorer against hand-made answers, batching."""

import json
import re
import sys

import pytest
import torch
from conftest import rejection
from test_sample import make_model, save_run
from torch.nn import functional as F

import analysis.load
from data.tokenizer import get_tokenizer
from scripts.paper import superglue
from scripts.paper.superglue_prompts import TASKS

# The same example as jsonl files have it and as the Hub has it, and the label that both mean.
ROWS = {
    'boolq': (dict(passage='P.', question='is it so', label=True), dict(passage='P.', question='is it so', label=1), 1),
    'cb': (dict(premise='P.', hypothesis='H.', label='contradiction'), dict(premise='P.', hypothesis='H.', label=1), 1),
    'copa': (dict(premise='P.', choice1='A.', choice2='B.', question='cause', label=1),) * 2 + (1,),
    'rte': (dict(premise='P.', hypothesis='H.', label='not_entailment'),
            dict(premise='P.', hypothesis='H.', label=1), 1),
    'wic': (dict(word='w', sentence1='A.', sentence2='B.', label=False),
            dict(word='w', sentence1='A.', sentence2='B.', label=0), 0),
    'wsc': (dict(text='T.', target=dict(span1_text='Bob', span2_text='he', span1_index=0, span2_index=3), label=True),
            dict(text='T.', span1_text='Bob', span2_text='he', span1_index=0, span2_index=3, label=1), 1),
}


@pytest.mark.parametrize('name', ROWS)
def test_rows_of_files_and_of_the_hub_agree(name):
    task = TASKS[name]
    ours, hub, label = ROWS[name]
    (ours,), (hub,) = superglue.flatten(task, ours), superglue.flatten(task, hub)
    assert ours['label'] == hub['label'] == label and type(ours['label']) is int
    assert task.template.format(**ours) == task.template.format(**hub)
    for wrong in (-1, len(task.answers), 'nonsense'):
        with pytest.raises(ValueError):
            superglue.flatten(task, {**hub, 'label': wrong})


def test_answers_stand_for_the_labels_of_the_hub():
    assert {name: ' '.join(task.answers) for name, task in TASKS.items()} == {
        'boolq': 'no yes', 'cb': 'true false neither', 'copa': '1 2', 'rte': 'yes no', 'wic': 'no yes',
        'wsc': 'no yes', 'multirc': 'no yes'}
    row, = superglue.flatten(TASKS['wsc'], ROWS['wsc'][0])
    assert 'Pronoun: he\nWords: Bob\n' in TASKS['wsc'].template.format(**row)


def test_multirc_has_a_row_for_each_answer():
    nested = {'idx': 0, 'passage': {'text': 'P.', 'questions': [
        {'question': 'Q1?', 'answers': [{'text': 'a', 'label': 0}, {'text': 'b', 'label': 1}]},
        {'question': 'Q2?', 'answers': [{'text': 'c', 'label': 1}]}]}}
    rows = superglue.flatten(TASKS['multirc'], nested)
    assert [(row['question'], row['answer'], row['label']) for row in rows] == [
        ('Q1?', 'a', 0), ('Q1?', 'b', 1), ('Q2?', 'c', 1)]
    hub = dict(paragraph='P.', question='Q1?', answer='b', label=1, idx={'paragraph': 0, 'question': 0, 'answer': 1})
    assert superglue.flatten(TASKS['multirc'], hub)[0].items() >= rows[1].items()


def test_prompt():
    exemplars = [dict(passage='One.', question='is a', label=1), dict(passage='Two.', question='is b', label=0)]
    prompt = superglue.make_prompt(TASKS['boolq'], exemplars, dict(passage='Three.', question='is c', label=1))
    assert prompt == ('Answer the question about the passage with yes or no.\n\n'
                      'Passage: One.\nQuestion: is a?\nAnswer: yes\n\n'
                      'Passage: Two.\nQuestion: is b?\nAnswer: no\n\n'
                      'Passage: Three.\nQuestion: is c?\nAnswer:')


def test_scorer_against_hand_made_answers():
    task = TASKS['cb']  # true, false, neither
    rows = [dict(label=label) for label in (0, 1, 2, 0, 1, 2, 0, 1)]
    texts = [' true', ' False.', '  neither, I think', ' false', '', ' trueish', '\n true', ' it is false']
    assert [superglue.read_answer(task, text) for text in texts] == [0, 1, 2, 1, None, None, None, None]
    assert superglue.score(task, rows, texts) == (3 / 8, 4 / 8)
    assert superglue.baselines(task, rows) == (3 / 8, 1 / 3)


def test_draws_are_a_function_of_the_seed():
    rows = [dict(passage=str(i)) for i in range(20)]
    draws = superglue.draw_exemplars('boolq', rows, 2, 5, 1)
    assert draws == superglue.draw_exemplars('boolq', rows, 2, 5, 1)
    assert draws != superglue.draw_exemplars('boolq', rows, 2, 5, 2)
    assert len(draws) == 5 and all(a != b for a, b in draws) and len({str(draw) for draw in draws}) > 1
    with pytest.raises(SystemExit, match='too few'):
        superglue.draw_exemplars('boolq', rows[:1], 2, 5, 1)


def test_batched_completions_are_those_of_each_prompt_alone():
    tokenizer = get_tokenizer('byte')
    model = make_model(vocab_size=256, block_size=64)
    prompts = ['short', 'a prompt of some length', 'x', 'one that is longer than the context of this model ' * 3]
    texts, cut = superglue.complete(model, tokenizer, prompts, 9, batch_size=3)
    assert cut == 1 and len(set(texts)) == 4
    for prompt, text in zip(prompts, texts):
        alone = model.generate(torch.tensor([tokenizer.encode(prompt)[-55:]]), 9, temperature=0)[0][0, -9:].tolist()
        assert text == tokenizer.decode(alone[:alone.index(0)] if 0 in alone else alone).split('\n')[0]


def test_a_batch_ends_with_the_last_line(monkeypatch):
    """A model that counts down, with 'b' → line end → 'z': three tokens for the longest line, not nine."""
    tokenizer, calls = get_tokenizer('byte'), []
    model = make_model(vocab_size=256, block_size=64)

    def forward(idx):
        calls.append(idx.size(1))
        following = torch.where(idx == ord('b'), 10, torch.where(idx == 10, ord('z'), idx - 1))
        return 100.0 * F.one_hot(following.clamp(min=0), 256), None

    monkeypatch.setattr(model, 'forward', forward)
    texts, _ = superglue.complete(model, tokenizer, ['xb', 'd', 'xxxxc'], 9, batch_size=3)
    assert texts == ['', 'cb', 'b'] and calls == [5, 6, 7]
    # Fewer rows at once where logits would not fit.
    calls.clear()
    monkeypatch.setattr(analysis.load, 'LOGITS', 256 * 15)
    assert superglue.complete(model, tokenizer, ['xb', 'd', 'xxxxc'], 9, batch_size=3)[0] == ['', 'cb', 'b']
    assert calls == [5, 6, 2, 1, 2, 3]


def write_task(folder, rows):
    folder.mkdir(parents=True)
    for name, part in (('train', [{**row, 'premise': f'Seen {i}.'} for i, row in enumerate(rows[:4])]), ('val', rows)):
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in part))


def test_script(tmp_path, monkeypatch, capsys):
    write_task(tmp_path / 'data' / 'RTE', [dict(premise=f'P{i}.', hypothesis='H.', label='entailment' if i < 6 else
                                                'not_entailment') for i in range(10)])
    write_task(tmp_path / 'data' / 'COPA', [dict(premise=f'P{i}.', choice1='A.', choice2='B.', question='cause',
                                                 label=i % 2) for i in range(8)])
    runs = [str(save_run(tmp_path / name, tokenizer=get_tokenizer('byte').meta)) for name in ('good', 'bad')]
    argv = [*runs, '--tasks', 'rte', 'copa', f'--data_dir={tmp_path / "data"}', '--draws=3', '--device=cpu',
            f'--output={tmp_path / "figure.png"}']

    # Hand-made answers: the first checkpoint says "yes" and "1" throughout, the second something that is no answer.
    calls = []

    def complete(model, tokenizer, prompts, max_new_tokens, batch_size, count):
        calls.append(prompts)
        count(len(prompts))
        right = 'yes' if 'Claim' in prompts[0] else '1'
        assert max_new_tokens == len(f' {right}') + 1  # bytes, and what tells where the word ends
        return [f' {right}' if len(calls) <= 6 else 'well'] * len(prompts), 2

    monkeypatch.setattr(superglue, 'complete', complete)
    superglue.main(argv)
    written = json.loads((tmp_path / 'figure.json').read_text())
    rte, copa = written['tasks']['RTE'], written['tasks']['COPA']
    assert (rte['rows'], rte['majority'], rte['random']) == (10, 0.6, 0.5) and copa['majority'] == 0.5
    good, bad = rte['checkpoints']['good'], rte['checkpoints']['bad']
    assert good['accuracy'] == pytest.approx(0.6) and good['draws'] == [0.6] * 3 and good['stdev'] == 0
    assert good['standard_error'] == pytest.approx((0.6 * 0.4 / 10) ** 0.5)
    assert good['prompts_cut'] == pytest.approx(2 / 10) and good['no_answer'] == 0
    assert copa['checkpoints']['good']['accuracy'] == 0.5
    assert bad['accuracy'] == 0 and bad['no_answer'] == 1
    assert calls[0] == calls[6] and calls[0] != calls[1]  # the same draws for both checkpoints
    assert all(prompt.count('Seen') == 2 for prompts in calls for prompt in prompts)  # exemplars of the train split
    assert (tmp_path / 'figure.png').stat().st_size > 5000 and (tmp_path / 'figure.csv').is_file()
    printed = capsys.readouterr()
    assert 'majority' in printed.out
    assert printed.err.splitlines() == ['1/4 good: RTE 60.0%', '2/4 good: COPA 50.0%', '3/4 bad: RTE 0.0%',
                                        '4/4 bad: COPA 0.0%']

    monkeypatch.undo()
    drawn, complete = [], superglue.complete
    monkeypatch.setattr(superglue, 'complete', lambda *args: drawn.append(args[2]) or complete(*args))
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
    superglue.main([*argv, '--limit=3', '--draws=1'])  # with the models' own answers
    assert re.search(r'\rgood: .*\| 6/6 \[', capsys.readouterr().err)  # prompts: three of each task
    asked = [re.findall(r'P\d', ' '.join(prompts)) for prompts in drawn]
    assert asked[:2] == asked[2:] and len(asked[0]) == 3 and asked[0] != ['P0', 'P1', 'P2']
    assert json.loads((tmp_path / 'figure.json').read_text())['tasks']['RTE']['rows'] == 3


def test_rows_are_lines_whatever_characters_are_in_them(tmp_path):
    rows = [dict(premise='A\u2028B\x85C.', hypothesis='H.', label='entailment'),
            dict(premise='D.', hypothesis='H.', label='not_entailment')]
    (tmp_path / 'RTE').mkdir()
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / 'RTE' / 'val.jsonl').write_bytes(('\ufeff' + '\r\n'.join(lines) + '\r\n\r\n').encode())
    found = superglue.read_rows(TASKS['rte'], 'validation', tmp_path)
    assert [(row['premise'], row['label']) for row in found] == [('A\u2028B\x85C.', 0), ('D.', 1)]


@pytest.mark.parametrize('line', ['7', 'null', '"text"', '[1]', '{}', '{"premise": "P."}', '[' * 100_000,
                                  '{"premise": "P.", "hypothesis": "H.", "label": null}',
                                  '{"premise": "P.", "hypothesis": "H.", "label": Infinity}',
                                  '{"premise": "P.", "hypothesis": "H.", "label": 0, "target": 5}',
                                  '{"passage": {"text": "P.", "questions": [5]}}', '{"passage": {"text": 5}}'])
def test_bad_rows_are_one_line(tmp_path, line):
    (tmp_path / 'RTE').mkdir()
    (tmp_path / 'RTE' / 'val.jsonl').write_text(line)
    message = rejection(superglue.read_rows, TASKS['rte'], 'validation', tmp_path)
    assert 'val.jsonl:1: not a row of RTE' in message and len(message) < 400 + len(str(tmp_path))


def test_errors_are_one_line(tmp_path):
    write_task(tmp_path / 'RTE', [dict(premise='P.', hypothesis='H.', label='perhaps')])
    (tmp_path / 'COPA').mkdir()
    (tmp_path / 'COPA' / 'train.jsonl').write_text('not json\n')
    for name, words in (('rte', 'RTE/train.jsonl:1'), ('copa', 'COPA/train.jsonl:1'), ('cb', 'no such file')):
        with pytest.raises(SystemExit) as error:
            superglue.main(['nowhere', '--tasks', name, f'--data_dir={tmp_path}', '--device=cpu'])
        assert words in str(error.value) and '\n' not in str(error.value)
    with pytest.raises(SystemExit, match=r'\.png'):
        superglue.main(['nowhere', '--output=figure.pdf'])
