# Ablation "Element-wise Clipping", Clip: the clip without preconditioner, which is Signum, on the 30M model.
# The paper: "essentially the same as sign momentum, or Lion with a single β"; learning rate by a grid search. So
# θ ← θ − lr·sign(m). Left to us: β1 = 0.96 and weight decay 0.2 (Sophia's), and the learning rate (Lion's of
# Table 2).
out_dir = 'out/ablation-signum'
model_size = '30M'
optimizer_name = 'signum'
