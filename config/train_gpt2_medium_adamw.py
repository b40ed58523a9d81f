# GPT-2 medium, 355M parameters, on OpenWebText (the paper's Figure 5, b).
out_dir = 'out/gpt2-medium-adamw'
model_size = '355M'
optimizer_name = 'adamw'
