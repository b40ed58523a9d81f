# Ablation "Choices of Hessian update frequency k": Sophia-G with k = 100, on the 30M model.
# The paper: see hessian_interval_1.py. Left to us: the learning rate (Table 3's, tuned for k = 10). β2 stays 0.99 ("all
# other hyperparameters are fixed"): h then averages over some 100 estimates, 10,000 iterations.
out_dir = 'out/ablation-hessian-interval-100'
model_size = '30M'
optimizer_name = 'sophiag'
hessian_interval = 100
