#!/usr/bin/env bash
# On the air-gapped host, in the project's folder: run experiments one after another in a session of their own, which
# outlives the command that started it. Finished trials are skipped, so it may be started again.
#   start.sh 'CONF [key=value ...]'...    progress in mlruns/chain/NAME.log, exit code in mlruns/chain/NAME.rc, session in mlruns/chain/chain.pid
set -euo pipefail
mkdir -p mlruns/chain
if [ -f mlruns/chain/chain.pid ] && kill -0 "$(cat mlruns/chain/chain.pid)" 2>/dev/null; then
  echo "still running: session $(cat mlruns/chain/chain.pid)"
  exit 1
fi
: "${CUDA_HOME:=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}"
export CUDA_HOME
# The engines' caches of compiled kernels lie under .engines/.cache; so do those that only these variables move there.
export CUTE_DSL_CACHE_DIR=$PWD/.engines/.cache/cute_dsl TVM_FFI_CACHE_DIR=$PWD/.engines/.cache/tvm-ffi
export XDG_CACHE_HOME=$PWD/.engines/.cache/xdg
# No network: nothing is looked up, nobody is told.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0
# The machine's memory grows as it is used; Ray would take the small beginning for the whole and kill the engine.
export RAY_memory_monitor_refresh_ms=0
# Multicast stays off for every process here, not only for the engines that the machine files speak of.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
setsid bash -c '
  echo $$ >mlruns/chain/chain.pid
  for words in "$@"; do
    read -ra conf <<<"$words"
    name=$(basename "${conf[0]}" .yaml)
    rm -f "mlruns/chain/$name.rc"
    .engines/orchestrator/bin/python -m orchestrator tune "${conf[@]}" --resume >>"mlruns/chain/$name.log" 2>&1
    echo $? >"mlruns/chain/$name.rc"
  done
  rm -f mlruns/chain/chain.pid
' chain "$@" </dev/null >/dev/null 2>&1 &
sleep 1
echo "started: $*"
