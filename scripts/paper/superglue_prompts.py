"""The prompts of scripts/paper/superglue.py: a task is an instruction, a template for its examples, and the answers.

The paper shows its prompts in a figure only; these are this repository's own, in the form that it describes. A prompt
reads: the instruction, the exemplars (template, a space, the answer), and the template of the question to be answered,
divided by blank lines.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task of SuperGLUE.

    title: its name in figures, and its directory among local files. config: its name on the Hub. template: the text of
    one example, with the fields of the Hub's rows. answers: the word for each label, in the Hub's order. labels: the
    names of the same labels in jsonl files.
    """
    title: str
    config: str
    instruction: str
    template: str
    answers: tuple[str, ...]
    labels: tuple


TASKS = {
    'boolq': Task(
        'BoolQ', 'boolq',
        'Answer the question about the passage with yes or no.',
        'Passage: {passage}\nQuestion: {question}?\nAnswer:',
        ('no', 'yes'), (False, True)),
    'cb': Task(
        'CB', 'cb',
        'Say whether the claim is true or false according to the text, or neither.',
        'Text: {premise}\nClaim: {hypothesis}\nAnswer:',
        ('true', 'false', 'neither'), ('entailment', 'contradiction', 'neutral')),
    'copa': Task(
        'COPA', 'copa',
        'Choose the more plausible cause or effect, 1 or 2.',
        'Sentence: {premise}\nWhich one is the {question}?\n1: {choice1}\n2: {choice2}\nAnswer:',
        ('1', '2'), (0, 1)),
    'rte': Task(
        'RTE', 'rte',
        'Say whether the claim follows from the text with yes or no.',
        'Text: {premise}\nClaim: {hypothesis}\nAnswer:',
        ('yes', 'no'), ('entailment', 'not_entailment')),
    'wic': Task(
        'WiC', 'wic',
        'Say whether the word means the same in both sentences with yes or no.',
        'Word: {word}\nSentence 1: {sentence1}\nSentence 2: {sentence2}\nAnswer:',
        ('no', 'yes'), (False, True)),
    'wsc': Task(
        'WSC', 'wsc.fixed',
        'Say whether the pronoun stands for the given words with yes or no.',
        'Text: {text}\nPronoun: {span2_text}\nWords: {span1_text}\nAnswer:',
        ('no', 'yes'), (False, True)),
    'multirc': Task(
        'MultiRC', 'multirc',
        'Say whether the answer to the question about the passage is right with yes or no.',
        'Passage: {paragraph}\nQuestion: {question}\nProposed answer: {answer}\nAnswer:',
        ('no', 'yes'), (0, 1)),
}
