# GPT-2 30M on 20 tokens per parameter, 600M in all, which takes minutes on an H100. A quarter of the run is warm-up.
out_dir = 'out/ladder/30m_20'
model_size = '30M'
total_batch_size = 64
batch_size = 32
beta1 = 0.9
max_iters = 9200
warmup_iters = 2300
eval_interval = 1000
eval_sequences = 3200
