"""docs/sophia.md: its Python blocks run as one script, and compute what the page says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The page leaves the Hugging Face model to the reader: a stand-in with its interface.
BEFORE = """
import types, torch
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


def test_the_blocks_of_the_page_run(tmp_path):
    """As one script on CPU, in a process group of one rank. Without a C++ compiler torch.compile does nothing."""
    text = (ROOT / 'docs/sophia.md').read_text(encoding='utf-8')
    blocks = re.findall(r'^```python\n(.*?)^```', text, flags=re.M | re.S)
    assert len(blocks) > 7
    (tmp_path / 'page.py').write_text('\n'.join([BEFORE, *blocks, AFTER]), encoding='utf-8')
    environment = dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1', RANK='0',
                       LOCAL_RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0',
                       TORCHINDUCTOR_CACHE_DIR=str(tmp_path / 'inductor'), TORCHINDUCTOR_COMPILE_THREADS='1')
    if not (shutil.which('g++') or shutil.which('clang++')):
        environment['TORCHDYNAMO_DISABLE'] = '1'
    done = subprocess.run([sys.executable, 'page.py'], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r'% of the coordinates are not clipped\n.*, expected 0.109', done.stdout)
