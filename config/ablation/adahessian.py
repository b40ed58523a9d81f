# Ablation "Element-wise Clipping" and baseline: AdaHessian, no clip, on the 30M model.
# The paper states β 0.92/0.99, the EMA of the squared Hutchinson estimate in the denominator, k = 1 because it diverges
# with k = 2, and a grid search for the learning rate, which it does not list. The rest is our choice. As in Yao et al.
# (2021), both EMAs are bias-corrected, u is in {−1, 1}, and the estimate uses the whole mini-batch. There is no
# averaging over blocks. ε is 1e-8. The learning rate, 0.3, was found at 0.8M parameters (with AdamW's it learns next to
# nothing, because m / √v is in units of Newton steps). With weight decay 1e-3, learning rate × λ is 2.5 times AdamW's.
# A coordinate whose estimates were all 0 does not move.
out_dir = 'out/ablation-adahessian'
model_size = '30M'
optimizer_name = 'adahessian'
