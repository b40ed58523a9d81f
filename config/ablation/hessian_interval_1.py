# Ablation "Choices of Hessian update frequency k": Sophia-G with k = 1, on the 30M model.
# The paper: k = 1, 10, 100, each for 100K, 200K and 400K steps (--max_iters), peak learning rate by a grid search, the
# rest as in Sophia-G. Left to us: the learning rate, which the paper does not list by k: Table 3's, tuned for k = 10.
out_dir = 'out/ablation-hessian-interval-1'
model_size = '30M'
optimizer_name = 'sophiag'
hessian_interval = 1
