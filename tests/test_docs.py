"""README.md and docs/: tables that come from the code, commands, links, the README's recipe."""

import csv
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import train
from analysis.significance import difference
from data.tokenizer import get_tokenizer
from dev import front, tables
from records.beta2 import results as beta2
from records.board import results as board
from records.dissection import results as dissection
from records.fresh_h import results as fresh_h
from records.rare_tokens import results as rare_tokens
from records.sharpening import results as sharpening
from records.small_batch import results as small_batch
from records.studies import interval

PAGES = ['README.md', *sorted(f'docs/{path.name}' for path in (ROOT / 'docs').glob('*.md'))]
# Where flags that several scripts have are added.
SHARED = ['analysis/compare.py', 'analysis/figures.py', 'scripts/load.py', 'data/sources.py']


def read(page):
    return (ROOT / page).read_text(encoding='utf-8')


def expand(text):
    """The words of a shell command, as the shell expands its braces: a{b,c} → ab ac."""
    words = []
    for word in shlex.split(text, comments=True):
        parts = re.split(r'\{([^{}]*,[^{}]*)\}', word)
        choices = [part.split(',') if i % 2 else [part] for i, part in enumerate(parts)]
        words += [''.join(choice) for choice in itertools.product(*choices)]
    return words


def commands(page):
    """The commands of a page that run a script of this repository, as lists of words from the script's name on."""
    text = read(page).replace('\\\n', ' ')
    blocks = re.findall(r'^```\w*\n(.*?)^```', text, flags=re.M | re.S) + re.findall(r'^    (\S.*)$', text, flags=re.M)
    inline = re.findall(r'`([^`\n]+)`', re.sub(r'^```.*?^```', '', text, flags=re.M | re.S))
    for line in [line for block in blocks for line in block.split('\n')] + inline:
        if re.search(r'(python|torchrun|^W|^S|sbatch|bash) .*\.py', line) and '…' not in line and '"' not in line:
            words = expand(re.sub(r'^\$ ', '', line))
            start = next((i for i, word in enumerate(words) if re.fullmatch(r'[\w/]+\.py', word)
                          and not word.startswith('config/')), None)
            if start is not None:
                yield words[start:], int((re.findall(r'--nproc_per_node=(\d+)', line) or [1])[0])


# The recipes of docs/hacking.md have settings and files that they add; tests/test_hacking.py runs them.
COMMANDS = [(page, words, ranks) for page in PAGES if page != 'docs/hacking.md' for words, ranks in commands(page)]
assert len(COMMANDS) > 40


def test_the_tables_of_the_code_are_current():
    text = read('docs/optimizers.md')
    assert tables.current(text) == text, 'run python dev/tables.py'
    stale = text.replace('| 0.96 |', '| 0.5 |')
    assert stale != text and tables.current(stale) == text


def test_every_metric_of_a_run_is_explained(finished):
    out = finished(name='sophiag')
    explained = set(re.findall(r'^\| `([\w/]+)` \|', read('docs/settings.md').partition('## Metrics')[2], flags=re.M))
    logged = set(re.findall(r'"([\w/]+)": ', (out / 'metrics.jsonl').read_text(encoding='utf-8')))
    logged = {re.sub('^hessian_norm/.*', 'hessian_norm/KIND', key) for key in logged}
    assert logged <= explained and explained - logged == {'val/loss/NAME', 'val/training_loss', 'mfu'}


@pytest.mark.parametrize('page', PAGES)
def test_links_and_files_exist(page):
    """Of links the files and headings, of everything else the names of scripts, configs and records."""
    text, here = read(page), (ROOT / page).parent
    prose = re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)
    for link in re.findall(r'\]\(([^)\s]+)\)', prose) + re.findall(r'<img src="([^"]+)"', text):
        name, _, heading = link.partition('#')
        if ':' not in name:
            target = here / name if name else ROOT / page
            assert target.exists(), link
            if heading:
                titles = re.findall(r'^#+ (.*)$', target.read_text(encoding='utf-8'), flags=re.M)
                anchors = [re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles]
                assert heading in anchors, link
    named = set(re.findall(r'\b(?:scripts|config|dev|runtime|examples|records)/[\w/.]+\.(?:py|json|csv|png|txt)', text))
    if page != 'docs/hacking.md':  # whose recipes add files
        assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(('page', 'words', 'ranks'), COMMANDS, ids=lambda value: ' '.join(value)[:60]
                         if isinstance(value, list) else None)
def test_commands_name_what_exists(page, words, ranks, monkeypatch):
    """Of train.py the settings resolve; of other scripts every flag is theirs, or a setting that they pass on."""
    monkeypatch.chdir(ROOT)
    script, *arguments = words
    arguments = [word for word in arguments if word not in ('…', '...')]
    if script == 'train.py':
        if arguments == ['--help'] or any(word.startswith('--init_from=out/') for word in arguments):
            return  # which prints and exits, or is of a run that is not here
        placeholder = [word for word in arguments if re.search(r'=(hf/|[A-Z]+$)', word) or word.isupper()]
        c = train.resolve([word for word in arguments if word not in placeholder], ranks)
        assert page != 'docs/reproduce.md' or c.out_dir != 'out', 'a second run would find the first one there'
        return
    if 'NAME' in script:
        return
    own = read(script)
    imported = [name for name in SHARED if re.search(rf'^(from|import) .*\b{Path(name).stem}\b', own, flags=re.M)]
    source = own + ''.join(map(read, imported))
    for word in arguments:
        if word.startswith('--') and word != '--':
            flag = word.partition('=')[0]
            passed_on = re.search(r'train\.resolve|sweep_argparser', own) and flag[2:] in train.DEFAULTS
            assert f"'{flag}'" in source or passed_on, f'{script} has no {flag}'
        elif re.fullmatch(r'config/[\w/.]+', word):
            assert (ROOT / word).is_file(), word


def test_the_readme_is_short_and_its_recipe_trains():
    assert len(read('README.md').split()) <= 550
    block, = re.findall(r'```python\n(.*?)```', read('README.md'), flags=re.S)
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    y = (x @ torch.randn(4, 3)).argmax(1)
    scope = dict(model=torch.nn.Linear(4, 3), batches=[(x, y)] * 300)
    with torch.no_grad():
        before = torch.nn.functional.cross_entropy(scope['model'](x), y).item()
    exec(block, scope)
    assert scope['loss'].item() < before - 0.1 and 0 <= scope['optimizer'].unclipped_fraction() <= 1
    assert [group['weight_decay'] for group in scope['optimizer'].param_groups] == [0.2, 0.0]


def test_the_front_s_numbers_and_picture_are_of_the_records():
    for model, test in front.differences().items():
        assert re.search(rf'^\| {model}.* \| {re.escape(interval(test))} \|', read('README.md'), flags=re.M)
        assert f'| {interval(test)} |' in read('docs/results.md')
    written = list(csv.DictReader((ROOT / 'records/front.csv').open(encoding='utf-8')))
    assert [{key: text for key, text in row.items() if text} for row in written] == [
        {key: str(value) for key, value in row.items()} for row in front.draw()[1]]


def test_the_front_counts_the_runs_and_has_the_gain_of_beta2():
    runs = sum(len(path.read_text(encoding='utf-8').splitlines()) for path in (ROOT / 'records').rglob('runs.jsonl'))
    assert f'{runs:,} logged runs' in read('README.md')
    adamw, muon, soap, *python = (f'{-test["difference"]:.2f}' for test in beta2.planned_tests(beta2.read()))
    page = ' '.join(read('README.md').split())
    assert f'loss of AdamW by {adamw}, of Muon by {muon} and of SOAP by {soap}' in page
    assert f'on Python source {", ".join(python)}, not run' in page


def test_the_results_of_the_planned_tests_are_of_the_records():
    """As differences without a sign, because the page turns some around."""
    planned = [*dissection.tests(dissection.read()), *fresh_h.planned_tests(fresh_h.read()),
               *small_batch.planned_tests(small_batch.read()),
               *(row for tests in (rare_tokens.TESTS, rare_tokens.DATA_TESTS)
                 for row in rare_tokens.planned_tests(rare_tokens.read(), tests)),
               *beta2.planned_tests(beta2.read())]
    cells = read('docs/results.md').replace('−', '').replace('+', '')
    weak = [row for row in planned if row['comparison'].startswith('A: ') and row['n'] == '3, 3'][1:]
    for row in planned:
        if row not in weak:
            assert f'| {abs(row["difference"]):.3f} ± {row["plus_or_minus"]:.3f} |' in cells, row


def test_the_runaway_s_table_and_the_orders_are_of_the_records():
    page, found = read('docs/results.md').replace('−', '-'), sharpening.read()
    for name, arm, ratio in (('fresh h', 'p=1', 72), ('shuffled within rows', 'rows', 72),
                             ('ĝ clipped at norm 1', 'clipped', 72),
                             ('γ in proportion to the learning rate', 'proportional', 72),
                             ('g not clipped¹', 'no_grad_clip', 72), ('β2 = 0.99¹', 'beta2=0.99', 72),
                             ('√(h · its mean)¹', 'p=0.5', 72), ('γ / learning rate = 28²', 'p=1', 28)):
        runs = found[arm, ratio]
        norms = ', '.join(f'{norm:,.0f}' for norm in sharpening.largest(runs))
        assert f'| {name} | {norms} |' in page
        if ratio == 72 and len(runs) > 1:
            test = difference(*([run.final_loss for run in arm] for arm in (runs, found['p=1', 28])))
            assert f'| {name} | {norms} | {test["difference"]:+.3f} ± {test["plus_or_minus"]:.3f} |' in page
    losses = board.lowest(board.read())
    values = [f'{board.correlation(losses[part])[0]:.2f}' for part in ('ids_4', 'ids_4_short', 'ids_4_beta2')]
    planned, short, long = values
    assert f'by {planned} (Spearman' in page and f'it is {short} or {long} (added)' in page


def test_the_cost_of_sophia_is_of_the_records():
    """Of AdamW, Sophia-G and Sophia-H on one GPU. Where a page repeats a number, it is the same."""
    for size in '30M', '125M', '355M':
        runs = [run for path in (ROOT / 'records/gpu').glob(f'h200_{size}*.json')
                for run in json.loads(path.read_text())['results']]
        adamw, g, h = (next(run for run in runs if re.search(pattern, run['config']))
                       for pattern in (r'^--\S+ \S+ \S+$', 'sophiag', 'sophiah'))
        speeds = ', '.join(f'{run["tokens_per_sec"] / adamw["tokens_per_sec"]:.2f}' for run in (g, h))
        peaks = ', '.join(f'{run["memory_gb"]:.1f}' for run in (adamw, g, h))
        times = ', '.join(f'{run["hessian_ms"]:.0f}' for run in (g, h))
        assert f'| {size} | {speeds} | {peaks} | {times} |' in read('docs/cost.md')
        if size == '30M':
            slower = round(100 * (1 - g['tokens_per_sec'] / adamw['tokens_per_sec']))
            assert (f'{slower} % slower, a peak of {g["memory_gb"]:.1f} GB instead of {adamw["memory_gb"]:.1f}'
                    in read('docs/reproduce.md'))


def test_the_tokenizer_of_the_page_loses_no_text(fork, tmp_path, monkeypatch):
    """Trained on a text by the page's block, it prepares that text."""
    pytest.importorskip('tokenizers')
    monkeypatch.chdir(tmp_path)
    text = ' '.join(f'Gewölbe {i} → 二 \t{i * i}\n' for i in range(2000))
    Path('my.txt').write_text(f'{text}<|endoftext|>{text}', encoding='utf-8')
    block, = re.findall(r'^```python\n(.*?)^```', read('docs/data.md'), flags=re.M | re.S)
    exec(block.replace('8000', '400'), {})
    fork(ROOT / 'data/text/prepare.py', 'my.txt', '--tokenizer=my_bpe.json', '--out_dir=bins', check=True)
    meta = json.loads(Path('bins/meta.json').read_text())
    assert meta['vocab_size'] == 400
    tokenizer = get_tokenizer('my_bpe.json')
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.eot_id == 0


# The page leaves the Hugging Face model to the reader: a stand-in with its interface. Nothing needs a C++ compiler.
BEFORE = """
import functools, os, types, torch
os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')
torch.compile = functools.partial(torch.compile, backend='aot_eager')
torch.manual_seed(0)

class CausalLM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(8, 16), torch.nn.Linear(16, 8)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(logits=logits, loss=loss)

causal_lm, ids = CausalLM(), torch.randint(8, (4, 12))
"""

AFTER = """
assert abs(found - expected) < 0.1 * expected
assert all((lm_optimizer.state[p]['hessian'] > 0).any() for p in causal_lm.parameters())
dist.destroy_process_group()
"""


def test_the_blocks_of_the_page_run(fork, tmp_path):
    """As one script, in a process group of one rank."""
    blocks = re.findall(r'^```python\n(.*?)^```', read('docs/sophia.md'), flags=re.M | re.S)
    assert len(blocks) > 7
    (tmp_path / 'page.py').write_text('\n'.join([BEFORE, *blocks, AFTER]), encoding='utf-8')
    done = fork(tmp_path / 'page.py', check=True)
    assert re.search(r'% of the coordinates are not clipped\n.*, expected 0.109', done.out)
