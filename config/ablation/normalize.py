# Ablation "Element-wise Clipping", Normalize: the update normalized, without preconditioner, on the 30M model.
# The paper states "update normalization without pre-conditioners", and a grid search for the learning rate. Our
# choices: m has a root mean square of 1 over each tensor, so that steps are as large as the sign's. β1 = 0.96 and
# weight decay 0.2 are Sophia's, and the learning rate is Lion's in Table 2.
out_dir = 'out/ablation-normalize'
model_size = '30M'
optimizer_name = 'normalize'
