#!/bin/bash
# Draws every table and picture in records/ again, from the records and nothing else, and writes the tables of the pages.
# Run it in the repository.
set -eu
PY=${PY:-.venv/bin/python}
main=records/cpu/main rates=records/cpu/rates
tuned="$main/adamw-T600-warmup300-lr0.012* $main/sophiag-T600-gamma0.5-beta1_0.9-warmup300-lr0.002*
       records/cpu/ablation/sophiah-gamma0.1-lr0.002"

# 2.7M parameters: β1 = 0.9 and a warm-up of half the run for all.
$PY scripts/speedup.py records/cpu/few --output records/cpu/few_speedup.png
$PY scripts/plot.py records/cpu/few/adamw-T2400-lr0.006 records/cpu/few/sophiag-T2400-lr0.001-gamma0.{015,5} \
    --metrics train/loss --title '2.7M parameters, 2,400 steps' --ylim 0.8 2.5 --output records/cpu/few_loss.png

# 0.8M parameters, a warm-up of 50 steps, β1 as in the paper.
$PY scripts/speedup.py $main/{adamw,lion,sophiah}-T?00-lr* $main/sophiag-T?00-gamma0.5-lr* --output records/cpu/speedup.png
$PY scripts/paper/loss_grid.py records/cpu/map $rates/adamw-T300-lr* $rates/sophiag-T300-gamma0.5-lr0.{0002,0004,001,002} \
    --rows total_batch_size --columns max_iters --minus adamw --output records/cpu/map.png

# 0.8M parameters, β1 = 0.9 and a warm-up of half the run for all.
$PY scripts/speedup.py $main/adamw-T600-warmup300-lr* $main/sophiag-T600-gamma0.5-beta1_0.9-warmup300-lr* \
    --output records/cpu/tuned_speedup.png
$PY scripts/plot.py $tuned --metrics train/loss --title '0.8M parameters, each optimizer at its best' --ylim 1.4 3.5 \
    --output records/cpu/loss.png
$PY scripts/paper/dynamics.py $tuned records/quickstart/lion --output records/cpu/dynamics.png
$PY scripts/paper/final_losses.py records/cpu/ablation $tuned --by optimizer_name hessian_interval gamma --x flops \
    --output records/cpu/ablation.png
$PY scripts/plot.py records/quickstart --metrics val/loss --title 'The quickstart: 0.8M parameters, 600 steps' \
    --ylim 1.6 3.2 --output records/quickstart/loss.png

# The study on books.
$PY scripts/speedup.py records/study --tuned warmup_iters beta1 --output records/study.png
$PY scripts/speedup.py records/study --tuned warmup_iters beta1 --panels difference --output records/study_difference.png
T=records/study/1200 W=warmup_iters=600
$PY scripts/paper/final_losses.py $T/adamw/*,$W,beta1=0.9,beta2=0.95,weight_decay=0.1* records/study_others \
    $T/{muon,soap}/*,$W,beta1=0.95,beta2=0.95,weight_decay=0.1* \
    $T/sophiag/*,$W,beta1=0.9,beta2=0.99,weight_decay=0.2,gamma=0.05,eps=1e-12* \
    --x learning_rate --output records/study_rates.png

# What needs no run.
$PY scripts/paper/compute_table.py config/train_gpt2_{large,medium}_{adamw,sophiah,sophiag}.py --output records/paper/compute_table.png
$PY scripts/paper/toy_landscape.py --output records/paper/toy_landscape.png
$PY scripts/paper/clipped_newton.py --output records/paper/clipped_newton.png

# The tables of README.md and docs/ that come from records.
$PY dev/tables.py
