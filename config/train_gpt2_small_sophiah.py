# GPT-2 small, 125M parameters, on OpenWebText (the paper's Figure 5, a).
out_dir = 'out/gpt2-small-sophiah'
model_size = '125M'
optimizer_name = 'sophiah'
