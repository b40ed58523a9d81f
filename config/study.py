# Base config of the 0.8M studies in records/: bytes of books. Some studies set other data and mini-batches.
dataset = 'books'
model_size = 'tiny'
block_size = 128
batch_size = 16
total_batch_size = 32
eval_interval = 600
eval_sequences = 1600
log_interval = 20
always_save_checkpoint = False
dtype = 'float32'  # also on a GPU
compile = False
