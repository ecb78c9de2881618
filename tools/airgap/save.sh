#!/usr/bin/env bash
# On the air-gapped host, in the project's folder: write results and compiled kernels as archives in parts of 15 MB.
#   bash tools/airgap/save.sh FOLDER [results|jit]...
# results.tar.xz.NN holds the campaigns, MLflow's database and the logs; jit.tar.xz.NN the compiled kernels.
# Restore on a new machine, in the project's folder:   cat jit.tar.xz.* | tar -xJ
set -euo pipefail
out=$1
shift
mkdir -p "$out"
export XZ_OPT=-T0
for what in "${@:-results}"; do
  case $what in
    results) folders=mlruns ;;
    jit) folders=.engines/.cache ;;
    *) echo "save.sh: $what: allowed are results and jit" >&2 && exit 2 ;;
  esac
  # A file that an engine is writing meanwhile is saved as far as it has been written.
  tar -cJ --warning=no-file-changed --ignore-failed-read --exclude='*.lock' $folders | split -b 15M -d -a 2 - "$out/$what.tar.xz." ||
    [ "${PIPESTATUS[0]}" -le 1 ]
done
ls -l "$out"
