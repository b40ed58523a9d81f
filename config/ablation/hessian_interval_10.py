# Ablation "Choices of Hessian update frequency k": Sophia-G with k = 10, the paper's choice, on the 30M model.
# All settings are the paper's: this is config/train_gpt2_30m_sophiag.py.
out_dir = 'out/ablation-hessian-interval-10'
model_size = '30M'
optimizer_name = 'sophiag'
hessian_interval = 10
