# GPT-2, 540M parameters, on OpenWebText (the paper's Figure 1, d).
out_dir = 'out/gpt2-540m-sophiag'
model_size = '540M'
optimizer_name = 'sophiag'
