#!/bin/bash
# Draws every picture in records/ again, with its numbers, from the records and nothing else, except
# fresh_h/curvature.png, which needs a checkpoint. Run it in the repository.
set -eu
PY=${PY:-.venv/bin/python}
cpu=records/cpu study=records/study

# 2.7M parameters, Python source: β1 = 0.9 and a warm-up of half the run for all.
$PY scripts/speedup.py $cpu/few --panels difference --output $cpu/few_speedup.png \
    --title '2.7M parameters: AdamW leads, by less in longer runs'

# 0.8M parameters, Python source, each at its best settings.
tuned=("$cpu/main/adamw-T600-warmup300-lr0.012*" "$cpu/main/sophiag-T600-gamma0.5-beta1_0.9-warmup300-lr0.002*"
       "$cpu/ablation/sophiah-gamma0.1-lr0.002")
$PY scripts/plot.py "${tuned[@]}" records/quickstart/lion --metrics update_unclipped hessian_norm grad_clipped \
    --title 'With γ = 0.5 (Sophia-G) and 0.1 (Sophia-H) more than half of the coordinates are clipped' \
    --output $cpu/dynamics.png
$PY scripts/paper/final_losses.py $cpu/ablation "${tuned[@]}" --by optimizer_name hessian_interval gamma --x flops \
    --title '0.8M parameters, 600 steps: none is below AdamW' --output $cpu/ablation.png
$PY scripts/plot.py records/quickstart --metrics val/loss --ylim 1.6 3.2 --output records/quickstart/loss.png \
    --title 'The quickstart, 0.8M parameters on Python source: AdamW ends lowest'

# The study on books.
$PY scripts/speedup.py $study --tuned warmup_iters beta1 --output $study/study.png \
    --title 'Muon and SOAP end below AdamW at every horizon; Sophia-G differs little from it'
$PY scripts/speedup.py $study --candidate sophiag --panels difference --tuned warmup_iters beta1 \
    --title 'Sophia-G minus AdamW: no difference is shown after correction' --output $study/study_difference.png
W=warmup_iters=600  # one seed, the search's, at each learning rate
$PY scripts/paper/final_losses.py "$study/1200/adamw/*,$W,beta1=0.9,beta2=0.95,weight_decay=0.1" \
    "$study/1200/muon/*,$W,beta1=0.95,beta2=0.95,weight_decay=0.1" \
    "$study/1200/soap/*,$W,beta1=0.95,beta2=0.95,weight_decay=0.1" \
    "$study/1200/sophiag/*,$W,beta1=0.9,beta2=0.99,weight_decay=0.2,gamma=0.05,eps=1e-12" \
    "records/study_others/1200/lion/*weight_decay=0.2" --x learning_rate --ylim 1.4 1.8 \
    --title 'Muon and SOAP are lowest, at rates from 0.006 to 0.024 alike' --output $study/study_rates.png

# The dissection.
$PY records/dissection/results.py gamma --output records/dissection/dissection.png
$PY records/dissection/results.py curves --output records/dissection/curves.png

# A fresh h, its runaway, rare tokens, and 30M parameters.
$PY records/fresh_h/results.py shares --output records/fresh_h/shares.png
$PY records/sharpening/results.py norms --output records/sharpening/norms.png
$PY records/rare_tokens/results.py losses --output records/rare_tokens/losses.png
$PY records/board/results.py orders --output records/board/orders.png
$PY records/beta2/results.py losses --output records/beta2/losses.png
$PY records/small_batch/results.py bands --output records/small_batch/bands.png
$PY records/gpu_30m/results.py curves --output records/gpu_30m/curves.png

# What needs no run.
$PY records/paper/toy_landscape.py --output records/paper/toy_landscape.png
$PY records/paper/clipped_newton.py --output records/paper/clipped_newton.png

# The README.
$PY dev/front.py --output records/front.png
