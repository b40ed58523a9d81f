# Ablation "Element-wise Clipping", GNB: Sophia-G without the clip, on the 30M model.
# The paper: k = 2, because it diverges with k = 5; learning rate by a grid search. So θ ← θ − lr·m / max(γ·h, ε).
# Left to us: the learning rate (Sophia-G's of Table 2), and ε, which alone bounds the step where h is tiny. With ε =
# 1e-4, about the size of the larger |m|, such coordinates move by at most about the learning rate. A smaller ε needs a
# smaller learning rate; with the paper's 1e-12 the first steps, when h has hardly begun to grow, are wild.
out_dir = 'out/ablation-gnb-noclip'
model_size = '30M'
optimizer_name = 'gnb_noclip'
