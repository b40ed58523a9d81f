"""Sophia-G on PEFT's LoRA adapters and their biases: h, m and the estimate cover only these. Needs transformers and
peft.

    python examples/peft_lora.py

The base model is a GPT-2 with random weights, which needs no download; `from_pretrained` works as well.
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds sophia.py if it is not installed
from sophia import Sophia, gauss_newton_bartlett


def sequences(n, length=32, vocab=64):
    """Return sequences (n, length) in which nine of ten tokens follow from the previous one; the others are random."""
    rows = torch.randint(vocab, (n, length))
    for t in range(1, length):
        rows[:, t] = torch.where(torch.rand(n) < 0.1, rows[:, t], (5 * rows[:, t - 1] + 1) % vocab)
    return rows


def main(steps=60):
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
                                      eos_token_id=0, initializer_range=0.2))
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=['c_attn', 'c_fc', 'c_proj'],
                                            bias='lora_only', fan_in_fan_out=True, task_type='CAUSAL_LM'))
    adapters = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    biases = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    # β2 = 0.9: h reaches its level within 20 estimates; the paper's 0.99 is meant for 100,000 steps. γ was chosen to
    # leave 0.1 to 0.5 of the coordinates unclipped.
    # LoRA's B starts at 0, and so do A's gradient and h. Until the second estimate A's steps are sign momentum, which
    # the clip bounds.
    optimizer = Sophia([dict(params=adapters), dict(params=biases, weight_decay=0.0)], lr=5e-3, betas=(0.96, 0.9),
                       gamma=0.2, weight_decay=0.1)
    losses = []
    for step in range(steps):
        rows = sequences(16)
        outputs = model(input_ids=rows, labels=rows)
        due = step % 10 == 0  # k = 10
        outputs.loss.backward(retain_graph=due)
        if due:
            # Keep only the logits that the loss counts. Prompt tuning would put positions in front, and the last one
            # predicts nothing. Padding must be left out, too.
            logits = outputs.logits[:, -rows.size(1):-1]
            optimizer.update_hessian(gauss_newton_bartlett(logits, optimizer))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
    print(f'loss {losses[0]:.4f}, after {steps} steps {losses[-1]:.4f}; '
          f'{optimizer.unclipped_fraction().item():.0%} not clipped')
    return losses


if __name__ == '__main__':
    main()
