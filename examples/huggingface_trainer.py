"""Sophia-G in Hugging Face's Trainer, with checkpoints and exact resume. Needs transformers and accelerate.

    python examples/huggingface_trainer.py [--steps=60] [--out_dir=out/hf_trainer] [--resume]

The estimate is made in `compute_loss`, which has the logits, before `backward` and the optimizer's step. The Trainer's
checkpoints hold h and the random state for sampling labels.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds sophia.py if it is not installed
from sophia import Sophia, gauss_newton_bartlett


class SophiaTrainer(Trainer):
    """A Trainer of causal language models, `optimizers=(Sophia(…), None)`, that estimates the Hessian every k steps."""

    hessian_interval = 10  # k
    estimated = None  # the latest step with an estimate

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs['labels']  # label smoothing removes them from `inputs`
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        step = self.state.global_step
        if model.training and step % self.hessian_interval == 0 and self.estimated != step:
            # The estimate uses the step's first micro-batch with labels that count. (Under FSDP with gradient
            # accumulation it must be the last micro-batch, in which `self.accelerator.sync_gradients` is True.)
            logits = outputs.logits[:, -labels.size(1):]  # prompt tuning puts positions in front
            counted = labels[:, 1:] != -100  # the logits one position earlier predict these
            sophia = self.optimizer.optimizer  # unwraps Accelerate's optimizer
            estimates = gauss_newton_bartlett(logits[:, :-1][counted], sophia, retain_graph=True)
            if any(h_hat is not None for h_hat in estimates):  # all None, on every rank, if no label counts
                sophia.update_hessian(estimates)
                self.estimated = step
        return (loss, outputs) if return_outputs else loss


def sequences(n, length=32, vocab=64):
    """Return n sequences in which nine of ten tokens follow from the previous one and the others are random."""
    rows = torch.randint(vocab, (n, length))
    for t in range(1, length):
        rows[:, t] = torch.where(torch.rand(n) < 0.1, rows[:, t], (5 * rows[:, t - 1] + 1) % vocab)
    return [{'input_ids': row, 'labels': row} for row in rows]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=60)
    parser.add_argument('--out_dir', default='out/hf_trainer')
    parser.add_argument('--resume', action='store_true', help='resume from the newest checkpoint in out_dir')
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
                                       eos_token_id=0))
    # β2 = 0.9: h reaches its level within 20 estimates; the paper's 0.99 is meant for 100,000 steps. γ was chosen to
    # leave 0.1 to 0.5 of the coordinates unclipped.
    groups = [dict(params=[p for p in model.parameters() if p.dim() > 1]),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]  # norms and biases
    optimizer = Sophia(groups, lr=2e-3, betas=(0.96, 0.9), gamma=0.2, weight_decay=0.1)
    trainer = SophiaTrainer(model, train_dataset=sequences(512), optimizers=(optimizer, None), args=TrainingArguments(
        args.out_dir, max_steps=args.steps, per_device_train_batch_size=16, lr_scheduler_type='cosine', data_seed=0,
        save_steps=max(args.steps // 2, 1), logging_steps=10, report_to=[], disable_tqdm=True))
    torch.manual_seed(trainer.args.process_index)  # ranks sample different labels
    loss = trainer.train(resume_from_checkpoint=args.resume or None).training_loss
    print(f'{trainer.state.global_step} steps, {optimizer.unclipped_fraction().item():.0%} not clipped')
    return trainer, loss


if __name__ == '__main__':
    main()
