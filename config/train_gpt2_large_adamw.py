# GPT-2 large, 770M parameters, on OpenWebText (the paper's Figure 5, c).
out_dir = 'out/gpt2-large-adamw'
model_size = '770M'
optimizer_name = 'adamw'
batch_size = 6
