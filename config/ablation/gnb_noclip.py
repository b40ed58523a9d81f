# Ablation "Element-wise Clipping", GNB: Sophia-G without the clip, on the 30M model.
# The paper: k = 2, for it diverges with k = 5; learning rate by a grid search. So θ ← θ − lr·m / max(γ·h, ε).
# Left to us: the rate (Sophia-G's of Table 3), and ε, which alone bounds the step where h is tiny. With ε = 1e-4, about
# the size of the larger |m|, such coordinates move by at most about the rate. Smaller ones need smaller rates, and with
# the paper's 1e-12 the first steps, when h has hardly begun to grow, are wild at any useful rate.
out_dir = 'out/ablation-gnb-noclip'
model_size = '30M'
optimizer_name = 'gnb_noclip'
