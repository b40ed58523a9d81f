# GPT-2 124M on FineWeb with AdamW, as in llm.c. docs/reproduce.md has the losses of a public run.
out_dir = 'out/check-124m'
dataset = 'fineweb10B'
model_size = '125M'
bias = True
total_batch_size = 512
batch_size = 16
learning_rate = 6e-4
min_lr = 0.0
schedule = 'linear'
warmup_iters = 700
max_iters = 2000  # the public run has 19,560
lr_decay_iters = 19_560
eval_interval = 250
eval_sequences = 10_240  # 10,485,760 tokens
