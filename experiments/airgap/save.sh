#!/usr/bin/env bash
# On the air-gapped host, in the project's folder: results and compiled kernels as archives of at most 15 MB a piece.
#   save.sh FOLDER            results.tar.xz.NN (campaigns, MLflow's database, logs) and jit.tar.xz.NN
# restore on a new machine:   cat jit.tar.xz.* | tar -xJ -C "$HOME"
set -euo pipefail
out=$1
mkdir -p "$out"
export XZ_OPT=-T0
tar -cJ --ignore-failed-read --warning=no-file-changed mlruns runs $(ls -d .engines/*.log 2>/dev/null) |
  split -b 15M -d -a 2 - "$out/results.tar.xz." || true
caches=$(cd "$HOME" && ls -d .cache/vllm .cache/flashinfer .cache/deep_gemm .cache/sglang .deep_gemm .tilelang .triton .tvm-ffi .cache/tvm-ffi .cache/cutlass .cache/quack 2>/dev/null || true)
if [ -n "$caches" ]; then
  tar -cJ --ignore-failed-read --warning=no-file-changed -C "$HOME" $caches | split -b 15M -d -a 2 - "$out/jit.tar.xz." || true
fi
ls -l "$out"
