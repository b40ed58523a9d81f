# Ablation "Element-wise Clipping", Clip: the clip without preconditioner, which is Signum, on the 30M model.
# The paper states "essentially the same as sign momentum, or Lion with a single β", and a grid search for the learning
# rate. So θ ← θ − lr·sign(m). β1 = 0.96 and weight decay 0.2 are Sophia's, and the learning rate is Lion's in Table 2.
out_dir = 'out/ablation-signum'
model_size = '30M'
optimizer_name = 'signum'
