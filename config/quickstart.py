# A small GPT on the source of the Python standard library, bytes as tokens: minutes on two CPU cores.
out_dir = 'out/quickstart'
dataset = 'pysource'
model_size = 'tiny'
optimizer_name = 'sophiag'
block_size = 128
batch_size = 16
total_batch_size = 32
max_iters = 600
# A short run wants a shorter momentum than Sophia's 0.96, and half of it as warm-up, because h builds up slowly.
beta1 = 0.9
warmup_iters = 300
eval_interval = 100
eval_sequences = 320
log_interval = 10
