#!/bin/bash
# On a machine with a GPU: Sophia-G at 30M as its authors train it, speed next to nanoGPT, the tests that need a GPU.
#
#   bash dev/gpu.sh pack data/books ../nanoGPT     here: out/gpu/data.tar.xz, which is small enough to travel
#   timeout 570 bash dev/gpu.sh runs               there, with out/gpu: three pairs of runs
#   timeout 570 bash dev/gpu.sh speed candidates tests
#   PYTHON=echo bash dev/gpu.sh runs speed         the commands, in out/gpu/logs
#
# A step whose result is in out/gpu is skipped; its output is in out/gpu/logs. $OUT/gpu.tar.gz, by default in out/gpu, has
# the results after each step and at the end; unpack it into out/gpu to continue elsewhere.
set -um
work=${WORK:-out/gpu}
python=${PYTHON:-python3}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/$work/cache}

pack() {  # BINS NANOGPT: every 45th piece of 10,240 training tokens is held out, as in records/gpu_30m
    mkdir -p "$work/data/nanoGPT" && cp "$2/model.py" "$work/data/nanoGPT" && "$python" - "$1" "$work/data" <<'PYTHON'
import json, pathlib, sys
import numpy as np
source, data = map(pathlib.Path, sys.argv[1:])
meta = json.loads((source / 'meta.json').read_text())
train, val = (np.fromfile(source / f'{split}.bin', '<u2') for split in ('train', 'val'))
held = np.arange(len(train)) // 10240 % 45 == 44
for name, splits in ('books', (train[~held], val)), ('heldout', (train[held], train[held])):  # a data set has both
    (data / name).mkdir(exist_ok=True)
    for split, tokens in zip(('train', 'val'), splits):
        tokens.tofile(data / name / f'{split}.bin')
        meta[split] = dict(tokens=len(tokens), documents=int((tokens == meta['eot_id']).sum()))
    (data / name / 'meta.json').write_text(json.dumps(meta))
PYTHON
    tar -c -C "$work" data | xz --lzma2=preset=9e,lc=3,lp=1,pb=1 >"$work/data.tar.xz"  # of 16-bit numbers
}

step() {  # RESULT COMMAND…: unless RESULT exists
    local result=$work/$1 log=$work/logs/${1//\//_}.txt
    shift
    [ -e "$result" ] && return
    mkdir -p "$work/logs" "$(dirname "$result")"
    echo "$(date +%T) $result"
    "$@" >>"$log" 2>&1 || { echo "failed:"; tail -n 5 "$log"; return 1; }
    [ -e "$result" ] || cp "$log" "$result"
    archive
}

archive() {
    local part=$work/gpu.$BASHPID.tar.gz  # two steps may end at the same time
    mkdir -p "$work"/{logs,results,runs}
    tar -czf "$part" --exclude='*.pt' --exclude='*.partial' -C "$work" logs results runs
    mv "$part" "${OUT:-$work}/gpu.tar.gz"
}

run() {  # NAME FLAGS…: as in records/gpu_30m
    step "runs/$1/finished.txt" "$python" train.py --model_size=30M --beta1=0.9 --max_iters=3000 --warmup_iters=1000 \
        --total_batch_size=32 --batch_size=32 --dataset="$work/data/books:1,$work/data/heldout:0" --eval_interval=1000 \
        --log_interval=20 --auto_resume=True --out_dir="$work/runs/$1" "${@:2}"
}

runs() {
    local sophiag="--optimizer_name=sophiag --gamma=0.15 --learning_rate=0.0016"
    for seed in 1338 1339; do run hessian_clip_$seed $sophiag --hessian_clip=1.0 --seed=$seed & done; wait
    for seed in 1338 1339; do run no_grad_clip_$seed $sophiag --grad_clip=0 --seed=$seed & done; wait
    run hessian_clip_1340 $sophiag --hessian_clip=1.0 --seed=1340 &
    run adamw_1341 --optimizer_name=adamw --learning_rate=0.0048 --seed=1341 & wait
}

bench() {  # NAME BENCH'S ARGUMENTS…
    step "results/$1.json" "$python" dev/bench.py --rounds=6 --output="$work/results/$1.json" "${@:2}" & wait
}

speed() {
    for size in 30M 125M 355M; do
        local adamw="--model_size=$size --total_batch_size=120 --batch_size=30"
        bench "speed_$size" --jobs=2 --baseline="$work/data/nanoGPT" --profile="$work/results/profile_$size.txt" \
            "$adamw"
        bench "speed_${size}_sophiag" --jobs=2 "$adamw" "$adamw --optimizer_name=sophiag"
    done
}

candidates() {  # changes that may gain speed; the last one is the first again, to show the noise
    local base='--model_size=30M --total_batch_size=120 --batch_size=30'
    bench candidates_30M --jobs=4 "$base" "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 $base" "$base --batch_size=120" \
        "$base"
}

tests() {
    step results/tests.txt "$python" -m pytest tests -m gpu -q -p no:xdist & wait
    for name in sophiag sophiah; do
        step "results/float16_$name.txt" "$python" train.py --model_size=30M --dtype=float16 --max_iters=300 \
            --total_batch_size=32 --batch_size=32 --dataset="$work/data/books" --warmup_iters=10 --log_interval=10 \
            --optimizer_name=$name --auto_resume=True --out_dir="$work/runs/float16_$name" & wait
    done
}

mkdir -p "$work"
if [ "${1:-}" = pack ]; then
    pack "$2" "$3"
    exit
fi
trap 'for job in $(jobs -p); do kill -- -$job; done; wait; archive' EXIT
trap 'exit 143' TERM INT
[ -e "$work/data" ] || [ ! -e "$work/data.tar.xz" ] || "$python" -m tarfile -e "$work/data.tar.xz" "$work"
for name in "${@:-runs}"; do
    "$name"
done
