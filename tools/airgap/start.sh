#!/usr/bin/env bash
# On the air-gapped host, in the project's folder: run experiments one after another in a session of their own, which
# outlives the command that started it. Finished trials are skipped, so it may be started again.
#   bash tools/airgap/start.sh 'CONF [key=value ...]'...
# mlruns/chain/ receives NAME.log (progress), NAME.rc (exit code) and, while it runs, chain.pid (the session).
set -euo pipefail
mkdir -p mlruns/chain
if [ -f mlruns/chain/chain.pid ] && kill -0 "$(cat mlruns/chain/chain.pid)" 2>/dev/null; then
  echo "still running: session $(cat mlruns/chain/chain.pid)"
  exit 1
fi
: "${CUDA_HOME:=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}"
export CUDA_HOME
# The orchestrator puts the engines' caches of compiled kernels under .engines/.cache; these variables move the others.
export CUTE_DSL_CACHE_DIR=$PWD/.engines/.cache/cute_dsl TVM_FFI_CACHE_DIR=$PWD/.engines/.cache/tvm-ffi
export XDG_CACHE_HOME=$PWD/.engines/.cache/xdg
# No network: nothing is looked up, no usage is reported.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0
# The memory of this machine grows on demand: Ray would take its first size for the limit and kill the engine.
export RAY_memory_monitor_refresh_ms=0
# Multicast is off for every process here, not only for the engines whose machine file switches it off.
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
