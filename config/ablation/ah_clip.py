# Ablation "Diagonal Hessian pre-conditioners", AH+clip: AdaHessian's average with Sophia's clip, on the 30M model.
# The paper states the EMA of the second moment of the Hutchinson estimates, k = 10, and a grid search for γ. So
# θ ← θ − lr·clip(m / max(γ·√v, ε), 1), where v is the EMA of ĥ². Our choices are Sophia-H's: no bias correction,
# u ~ N(0, I), 32 sequences, and its γ and learning rate, which the paper does not list. √v does not average out the
# noise of ĥ and is larger than h, so a smaller γ may be best.
out_dir = 'out/ablation-ah-clip'
model_size = '30M'
optimizer_name = 'ah_clip'
