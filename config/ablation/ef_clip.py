# Ablation "Diagonal Hessian pre-conditioners", E-F+clip: the empirical Fisher instead of Gauss-Newton-Bartlett, on
# the 30M model.
# The paper states the EMA of squared gradients, "which differs from GNB in label sampling", k = 10, and a grid search
# for γ. So ĥ = B·ĝ⊙ĝ with the true labels instead of sampled ones, on the same 240 sequences. The paper does not list
# γ and the learning rate; ours are Sophia-G's.
out_dir = 'out/ablation-ef-clip'
model_size = '30M'
optimizer_name = 'ef_clip'
