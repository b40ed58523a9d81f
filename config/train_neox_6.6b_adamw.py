# GPT-NeoX, 6.6B parameters, on the Pile, fully sharded (the paper's Figure 5, e).
out_dir = 'out/neox-6.6b-adamw'
dataset = 'pile'
model_size = '6.6B'
optimizer_name = 'adamw'
block_size = 2048
total_batch_size = 1024
batch_size = 2
eval_sequences = 2000  # the whole validation set would take hours
parallel = 'fsdp'
