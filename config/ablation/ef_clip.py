# Ablation "Diagonal Hessian pre-conditioners", E-F+clip: the empirical Fisher instead of Gauss-Newton-Bartlett, on
# the 30M model.
# The paper: the EMA of squared gradients, "which differs from GNB in label sampling"; k = 10, γ by a grid search.
# So ĥ = B·ĝ⊙ĝ with the true labels instead of sampled ones, on the same 240 sequences. Left to us: γ and the
# learning rate, which the paper does not list; they are Sophia-G's.
out_dir = 'out/ablation-ef-clip'
model_size = '30M'
optimizer_name = 'ef_clip'
