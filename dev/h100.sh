#!/bin/bash
# Everything that needs a GPU; `dev/h100.sh 3` takes step 3 alone. Called again it skips what has succeeded and resumes
# training. NANOGPT: a checkout of it. DATASET: bins of GPT-2's tokens (data/text/prepare.py). Logs, records and
# checkpoints are in WORK. SMOKE=1: a trial on CPU. What is not timed, steps 1, 2 and compilation, runs side by side.
set -u && cd "$(dirname "$0")/.." || exit
PATH=$PWD/.venv/bin:$PATH WORK=${WORK:-out/h100} DATASET=${DATASET:-data/books} ROUNDS=6 DEVICE=cuda LARGE=4000
SIZES='30M:30 125M:30 355M:15 770M:6' MICRO='15 30 60' KERNELS='flash cudnn' T='1000 2000'; mkdir -p "$WORK"
TWO='--batch_size=4 --device=cuda:0' BENCH=--total_batch_size=120 TRAIN='--total_batch_size=128 --batch_size=32'
if [ -n "${SMOKE:-}" ]; then
    SHAPE='--n_layer=1 --n_head=2 --n_embd=32 --block_size=32' SIZES=30M:2 MICRO=4 KERNELS=math T=10 ROUNDS=1 DEVICE=cpu
    TWO="$SHAPE --batch_size=4 --device=cpu" BENCH="$SHAPE --total_batch_size=4" LARGE=20
    TRAIN="$SHAPE --device=cpu --total_batch_size=4 --batch_size=2 --eval_iters=2" DATASET=$PWD/$WORK/pysource
    [ -e "$DATASET/meta.json" ] || python data/pysource/prepare.py --out_dir="$DATASET" || exit
fi
step() {  # NAME COMMAND…
    local name=$1 && shift
    [ -e "$WORK/$name.done" ] && return
    echo "$(date +%T) $name"
    ("$@" && touch "$WORK/$name.done") > "$WORK/$name.log" 2>&1 || echo "  failed: $(tail -n 1 "$WORK/$name.log")"
}
two() {  # NAME CACHE FLAGS…: twelve steps of two ranks on one device, with the compile cache of this name
    step "two_$1" env TORCHINDUCTOR_CACHE_DIR="$PWD/$WORK/cache_$2" python -m torch.distributed.run --standalone \
        --nproc_per_node=2 train.py $TWO --backend=gloo --total_batch_size=16 --dataset="$DATASET" --max_iters=12 \
        --warmup_iters=2 --eval_iters=1 --log_interval=1 --auto_resume=True --out_dir="$WORK/two_$1" "${@:3}"
}
values() { grep -oP '"(train/loss|grad_norm|hessian_norm)": \K[^,}]+' "$WORK/two_$1/metrics.jsonl"; }
agree() {  # RUN RUN: the largest relative difference of losses and norms
    paste <(values $1) <(values $2) | awk '{ d = $1 / $2 - 1; if (d ^ 2 > most) most = d ^ 2 }
                                           END { print sqrt(most), NR " values"; exit !NR || most > 1e-6 }'
}
bench() { step "$1" python dev/bench.py --device=$DEVICE --rounds=$ROUNDS --output="$WORK/$1.json" "${@:2}"; }
train() { step "$1" python train.py $TRAIN --dataset="$DATASET" --auto_resume=True --out_dir="$WORK/$1" "${@:2}"; }
step_1() { step tests python -m pytest tests -m gpu -q; }
chain() {  # PARALLEL: AdamW's run leaves compiled code behind; Sophia-G's must be the same with it and without
    two adamw_$1 $1 --parallel=$1
    for c in $1 fresh_$1; do two sophiag_$c $c --parallel=$1 --optimizer_name=sophiag --hessian_interval=2; done
    step agree_$1 agree sophiag_$1 sophiag_fresh_$1
}
step_2() {
    chain fsdp & chain ddp && two sophiah sophiah --optimizer_name=sophiah --hessian_interval=2
    wait
}
flags() { echo "--model_size=${1%:*} $BENCH --batch_size=${1#*:}"; }  # SIZE:MICRO_BATCH
step_3() {
    local nanogpt=(${NANOGPT:+--baseline "$NANOGPT"}) o s
    for o in adamw sophiag sophiah; do for s in $SIZES; do
        ROUNDS=1 bench compile_${o}_${s%:*} "${nanogpt[@]}" "$(flags $s) --optimizer_name=$o" &
        [ $(jobs -rp | wc -l) -lt 6 ] || wait -n
    done; done
    wait
    for s in $SIZES; do bench speed_${s%:*} "${nanogpt[@]}" --profile="$WORK/profile_${s%:*}.txt" "$(flags $s)"; done
    for s in $SIZES; do bench estimates_${s%:*} "$(flags $s)"{,' --optimizer_name='sophia{g,h}}; done
}
step_4() {
    for a in $KERNELS; do bench attention_$a --attention=$a "$BENCH --batch_size=${MICRO%% *}"; done
    for n in $MICRO; do bench micro_$n "$BENCH --batch_size=$n"; done
    TORCHINDUCTOR_MAX_AUTOTUNE=1 bench autotune "$BENCH --batch_size=${MICRO%% *}"
}
step_5() {  # warm-up: half of the run for short ones
    for x in 1 2 0.5; do for steps in $T; do for peak in adamw:1.2e-3 sophiag:1e-3 muon:1.2e-3 clip:4e-4; do
        train 30M_${peak%:*}_T${steps}_x$x --model_size=30M --optimizer_name=${peak%:*} --max_iters=$steps \
            --warmup_iters=$((steps / 2)) --learning_rate="$(awk "BEGIN { print ${peak#*:} * $x }")"
    done; done; done
    for o in adamw sophiag; do train 125M_$o --optimizer_name=$o --max_iters=$LARGE --warmup_iters=$((LARGE / 4)); done
}
for n in ${*:-1 2 3 4 5}; do
    case $n in 1 | 2) "step_$n" & ;; 3) step_3 ;; *) wait; "step_$n" ;; esac
done
wait
