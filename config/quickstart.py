# A small GPT on the bytes of the Python standard library's source; takes minutes on two CPU cores.
out_dir = 'out/quickstart'
dataset = 'pysource'
model_size = 'tiny'
optimizer_name = 'sophiag'
block_size = 128
batch_size = 16
total_batch_size = 32
max_iters = 600
# A short run needs a smaller β1 than Sophia's 0.96, and a warm-up of half the run, because h builds up slowly.
beta1 = 0.9
warmup_iters = 300
eval_interval = 100
eval_sequences = 320
log_interval = 10
