# Ablation "Element-wise Clipping", GNB: Sophia-G without the clip, on the 30M model.
# The paper states k = 2, because it diverges with k = 5, and a grid search for the learning rate. So
# θ ← θ − lr·m / max(γ·h, ε). Our choices are the learning rate (Sophia-G's in Table 2), and ε, which alone bounds the
# step where h is tiny. With ε = 1e-4, about the size of the larger |m|, these coordinates move by at most about the
# learning rate. A smaller ε needs a smaller rate; with the paper's 1e-12 the first steps, while h is small, are huge.
out_dir = 'out/ablation-gnb-noclip'
model_size = '30M'
optimizer_name = 'gnb_noclip'
