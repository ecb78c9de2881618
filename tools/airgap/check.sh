#!/usr/bin/env bash
# On the air-gapped host, in the project's folder: import what an engine start imports, and compare the requirements.
# Changes nothing.
#   bash tools/airgap/check.sh NAME...
set -uo pipefail
status=0
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
nvcc --version 2>/dev/null | tail -n 2
for name in "$@"; do
  case $name in
    vllm) code='import cutlass, tilelang, vllm, vllm._C_stable_libtorch, vllm.model_executor.model_loader, vllm_dummy_finalize; vllm_dummy_finalize.register(); import vllm.entrypoints.openai.api_server' ;;
    sglang) code='import cutlass, tilelang, sgl_kernel, deep_gemm, sglang.srt.entrypoints.http_server' ;;
    orchestrator) code='import ray.serve, ray.tune, mlflow, omegaconf, aiohttp, pynvml, orchestrator.__main__' ;;
    smollm2) code='import gguf, transformers' ;;
    *) code='pass' ;;
  esac
  started=$SECONDS
  if .engines/"$name"/bin/python -c "$code"; then
    echo "$name imports ($((SECONDS - started)) s)"
  else
    status=1
    echo "$name DOES NOT import"
  fi
  # What the host lacks or has in another version. Most of it is never imported, so it does not decide the exit code.
  .engines/"$name"/bin/python -m pip check 2>&1 | sed "s/^/$name: /" | head -n 15
done
exit $status
