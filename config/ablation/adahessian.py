# Ablation "Element-wise Clipping" and baseline: AdaHessian, no clip, on the 30M model.
# The paper: β 0.92/0.99; the EMA of the squared Hutchinson estimate in the denominator; k = 1, because it diverges
# with k = 2; learning rate by a grid search that it does not list. Left to us: both EMAs bias-corrected, u in {−1, 1}
# and the whole mini-batch for the estimate, as in Yao et al. (2021); no averaging over blocks; ε 1e-8; the learning
# rate, 0.3, found on a model of 0.8M parameters (with AdamW's next to nothing is learnt: m / √v is in units of
# Newton steps); weight decay 1e-3, with which learning rate × λ is 2.5 times AdamW's; and that a coordinate whose
# estimates were all 0 does not move.
out_dir = 'out/ablation-adahessian'
model_size = '30M'
optimizer_name = 'adahessian'
