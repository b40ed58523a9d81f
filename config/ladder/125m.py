# GPT-2 125M, the first 10,000 steps of the paper's schedule of 100,000.
out_dir = 'out/ladder/125m'
model_size = '125M'
max_iters = 10_000
lr_decay_iters = 100_000
eval_interval = 1000
