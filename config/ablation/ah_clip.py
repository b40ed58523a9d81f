# Ablation "Diagonal Hessian pre-conditioners", AH+clip: AdaHessian's average with Sophia's clip, on the 30M model.
# The paper: the EMA of the second moment of the Hutchinson estimates; k = 10, γ by a grid search. So
# θ ← θ − lr·clip(m / max(γ·√v, ε), 1), v the EMA of ĥ². Left to us: no bias correction, u ~ N(0, I) and 32 sequences,
# as in Sophia-H; γ and the learning rate, which the paper does not list, are Sophia-H's too. √v does not average the
# noise of ĥ away and is larger than h: a smaller γ may be best.
out_dir = 'out/ablation-ah-clip'
model_size = '30M'
optimizer_name = 'ah_clip'
