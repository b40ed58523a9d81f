#!/bin/bash
# Everything that needs a GPU; `dev/h100.sh 3` takes step 3 alone. Called again it skips what has succeeded and resumes
# training. NANOGPT: a checkout of it. DATASET: bins of GPT-2's tokens (data/text/prepare.py). Logs, records and
# checkpoints are in WORK. SMOKE=1: a trial on CPU.
set -u && cd "$(dirname "$0")/.." || exit
PATH=$PWD/.venv/bin:$PATH WORK=$(realpath -m "${WORK:-out/h100}") DATASET=${DATASET:-data/books}
ROUNDS=4 DEVICE=cuda LARGE=4000
SIZES=${SIZES:-30M:30 125M:30 355M:15 770M:6} MICRO='15 30 60' T='1000 2000'; mkdir -p "$WORK"
TWO='--batch_size=4 --device=cuda:0' BENCH=--total_batch_size=480 TRAIN='--total_batch_size=128 --batch_size=32'
if [ -n "${SMOKE:-}" ]; then
    SHAPE='--n_layer=1 --n_head=2 --n_embd=32 --block_size=32' SIZES=30M:2 MICRO=4 T=10 ROUNDS=1 DEVICE=cpu
    TWO="$SHAPE --batch_size=4 --device=cpu" BENCH="$SHAPE --total_batch_size=4" LARGE=20
    TRAIN="$SHAPE --device=cpu --total_batch_size=4 --batch_size=2 --eval_iters=2" DATASET=$WORK/pysource
    [ -e "$DATASET/meta.json" ] || python data/pysource/prepare.py --out_dir="$DATASET" || exit
fi
step() {  # NAME COMMAND…
    local name=$1 && shift
    [ -e "$WORK/$name.done" ] && return
    echo "$(date +%T) $name"
    ("$@" && touch "$WORK/$name.done") > "$WORK/$name.log" 2>&1 || echo "  failed: $(tail -n 1 "$WORK/$name.log")"
}
two() {  # NAME CACHE FLAGS…: twelve steps of two ranks on one device, with the compile cache of this name
    step "two_$1" env TORCHINDUCTOR_CACHE_DIR="$WORK/cache_$2" python -m torch.distributed.run --standalone \
        --nproc_per_node=2 train.py $TWO --backend=gloo --total_batch_size=16 --dataset="$DATASET" --max_iters=12 \
        --warmup_iters=2 --eval_iters=1 --log_interval=1 --auto_resume=True --out_dir="$WORK/two_$1" "${@:3}"
}
values() { grep -oP '"(train/loss|grad_norm|hessian_norm)": \K[^,}]+' "$WORK/two_$1/metrics.jsonl"; }
agree() {  # RUN RUN: the largest relative difference of losses and norms; bfloat16's rounding makes a few percent
    paste <(values $1) <(values $2) | awk '{ d = $1 / $2 - 1; if (d ^ 2 > most) most = d ^ 2 }
                                           END { print sqrt(most), NR " values"; exit !NR || most > 0.1 }'
}
bench() { step "$1" python dev/bench.py --device=$DEVICE --rounds=$ROUNDS --output="$WORK/$1.json" "${@:2}"; }
train() { step "$1" python train.py $TRAIN --dataset="$DATASET" --auto_resume=True --out_dir="$WORK/$1" "${@:2}"; }
step_1() { step tests python -m pytest tests -m gpu -q; }
step_2() {  # Sophia-G's losses must be the same with and without the compiled code that AdamW's run leaves behind
    for p in ddp fsdp; do (
        two adamw_$p $p --parallel=$p
        for c in $p fresh_$p; do two sophiag_$c $c --parallel=$p --optimizer_name=sophiag --hessian_interval=2; done
        step agree_$p agree sophiag_$p sophiag_fresh_$p
    ) & done
    wait; two sophiah sophiah --optimizer_name=sophiah --hessian_interval=2
}
step_3() {
    for s in $SIZES; do
        flags="--model_size=${s%:*} $BENCH --batch_size=${s#*:}"
        bench speed_${s%:*} ${NANOGPT:+--baseline "$NANOGPT"} --profile="$WORK/profile_${s%:*}.txt" \
            "$flags" "$flags --optimizer_name=sophiag" "$flags --optimizer_name=sophiah"
    done
}
step_4() {
    for n in $MICRO; do bench micro_$n "$BENCH --batch_size=$n"; done
    TORCHINDUCTOR_MAX_AUTOTUNE=1 bench autotune "$BENCH --batch_size=${MICRO%% *}"
}
step_5() {  # warm-up: half of the run for short ones; Sophia-G and its control have one grid of learning rates
    for x in 1 2 0.5; do for steps in $T; do for peak in adamw:1.2e-3 sophiag:8e-4 clip:8e-4 muon:1.2e-3; do
        train 30M_${peak%:*}_T${steps}_x$x --model_size=30M --optimizer_name=${peak%:*} --max_iters=$steps \
            --warmup_iters=$((steps / 2)) --learning_rate="$(awk "BEGIN { print ${peak#*:} * $x }")"
    done; done; done
    for o in adamw sophiag; do train 125M_$o --optimizer_name=$o --max_iters=$LARGE --warmup_iters=$((LARGE / 4)); done
}
for n in ${*:-1 2 3 4 5}; do "step_$n"; done
