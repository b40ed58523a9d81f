# GPT-2 large, 770M parameters, on OpenWebText (the paper's Figure 5, c).
out_dir = 'out/gpt2-large-sophiag'
model_size = '770M'
optimizer_name = 'sophiag'
batch_size = 6
