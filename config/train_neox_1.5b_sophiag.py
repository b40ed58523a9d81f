# GPT-NeoX, 1.5B parameters, on the Pile, fully sharded (the paper's Figure 5, d).
out_dir = 'out/neox-1.5b-sophiag'
dataset = 'pile'
model_size = '1.5B'
optimizer_name = 'sophiag'
block_size = 2048
total_batch_size = 512
batch_size = 4
eval_sequences = 2000  # the whole validation set would take hours
parallel = 'fsdp'
