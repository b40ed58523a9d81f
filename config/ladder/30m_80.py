# GPT-2 30M on 80 tokens per parameter, 2.4B in all. A quarter of the run is warm-up.
out_dir = 'out/ladder/30m_80'
model_size = '30M'
total_batch_size = 64
batch_size = 32
beta1 = 0.9
max_iters = 36_800
warmup_iters = 9200
eval_interval = 4000
eval_sequences = 3200
