"""scripts/paper/superglue.py: answers, scores of a model with known answers, the whole script."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_runs import rows_of
from test_sample import save_run

from data.tokenizer import get_tokenizer
from scripts.load import load, with_tokenizer
from scripts.paper import superglue
from scripts.paper.superglue import TASKS


def test_the_first_word_of_the_line_is_the_answer():
    texts = [' true', ' False.', '  neither, I think', ' false', '', ' trueish', '\n true', ' it is false']
    assert [superglue.read_answer(TASKS['cb'], text) for text in texts] == [0, 1, 2, 1, None, None, None, None]


def test_scores_of_a_model_with_known_answers(tmp_path, monkeypatch):
    """The model answers claim A with yes and B with no; after C it ends the document before the yes; D is no answer."""
    loaded = with_tokenizer(load(save_run(tmp_path / 'run', tokenizer=get_tokenizer('byte').meta)))
    answers = {'A': ' yes\n', 'B': ' no\n', 'C': '\0yes', 'D': ' yesterday'}

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
                for claim, label in (('A', 0), ('A', 1), ('B', 1), ('B', 1), ('C', 0), ('D', 0))]
    longest = superglue.make_prompt(TASKS['rte'], examples[2:4], examples[0])  # without the yes of the first two
    loaded.model.config.block_size = len(longest) + len(' yes') + 1
    found = superglue.run_task(loaded, TASKS['rte'], examples, [examples[:2], examples[2:4]])
    assert found['accuracy'] == pytest.approx(3 / 6) and found['stdev'] == 0
    assert found['standard_error'] == pytest.approx((0.5 * 0.5 / 6) ** 0.5) and found['prompts_cut'] == 0.5
    assert found['majority'] == 3 / 6 and found['random'] == 1 / 2


def test_script(tmp_path, monkeypatch):
    def load_dataset(data, name, split):
        premise = 'Seen' if split == 'train' else 'P'
        return [dict(premise=f'{premise} {i}.', hypothesis='H.', choice1='A.', choice2='B.', question='cause',
                     label=i % 2) for i in range(10)]

    asked, plain = [], superglue.make_prompt
    monkeypatch.setitem(sys.modules, 'datasets', SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(superglue, 'make_prompt', lambda *args: asked.append(plain(*args)) or asked[-1])
    monkeypatch.chdir(tmp_path)
    runs = [str(save_run(Path(name), tokenizer=get_tokenizer('byte').meta)) for name in ('one', 'two')]
    superglue.main([*runs, '--tasks', 'rte', 'copa', '--device=cpu', f'--output={tmp_path / "table.csv"}'])
    table = [(row['task'], row['checkpoint'], row['examples']) for row in rows_of(tmp_path / 'table.csv')]
    assert table == [(task, run, '10') for run in runs for task in ('RTE', 'COPA')]
    assert len(asked) == 2 * 5 * 20 and asked[:100] == asked[100:]  # the same for both checkpoints
    assert asked[:10] != asked[10:20] and all(prompt.count('Seen') == 2 for prompt in asked)  # of the train split
