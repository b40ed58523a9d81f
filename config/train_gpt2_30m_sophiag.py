# GPT-2, 30M parameters, on OpenWebText (the paper tunes and ablates on it).
out_dir = 'out/gpt2-30m-sophiag'
model_size = '30M'
optimizer_name = 'sophiag'
