#!/usr/bin/env bash
# On the air-gapped host, in the project's folder: unpack environments, install the vLLM plugin, make the model folders.
#   bash tools/airgap/prepare.sh PARTS NAME...    e.g. /root/parts orchestrator vllm
# A step that is done already does nothing, so the script may run again after more parts have arrived.
set -euo pipefail
parts=$1
shift
python3 tools/airgap/unpack.py "$parts" "$@" --into .engines
for name in "$@"; do
  case $name in
    vllm)
      if ! .engines/vllm/bin/python -c 'import vllm_dummy_finalize' 2>/dev/null; then
        .engines/vllm/bin/python -m pip install -q --no-index --no-deps --no-build-isolation --no-warn-script-location \
          experiments/h200-dspark-k-sweep/dummy_finalize_plugin
      fi
      ;;
    smollm2)
      .engines/smollm2/bin/python scripts/prepare_model.py .models/smollm2-135m
      ;;
  esac
done
maker=$(ls -d .engines/vllm/bin/python .engines/sglang/bin/python 2>/dev/null | head -n 1 || true)
if [ -n "$maker" ] && [ ! -f .models/dsv4-flash-24l/config.json ]; then
  "$maker" experiments/h200-dspark-k-sweep/make_model.py .models/dsv4-flash-24l --layers 24
fi
if [ -n "$maker" ] && [ ! -f .models/dsv4-flash/config.json ]; then
  "$maker" experiments/h200-dspark-k-sweep/make_model.py .models/dsv4-flash --layers 43
fi
