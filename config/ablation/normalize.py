# Ablation "Element-wise Clipping", Normalize: the update normalized, without preconditioner, on the 30M model.
# The paper: "update normalization without pre-conditioners"; learning rate by a grid search. Left to us: what is
# normalized (m, to a root mean square of 1 over each tensor, so that steps are as large as the sign's), β1 = 0.96 and
# weight decay 0.2 (Sophia's), and the learning rate (Lion's of Table 2).
out_dir = 'out/ablation-normalize'
model_size = '30M'
optimizer_name = 'normalize'
