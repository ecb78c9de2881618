#!/usr/bin/env bash
# On the air-gapped host, in the project's folder: wait at most SECONDS for what start.sh began, then show its progress.
#   bash tools/airgap/poll.sh SECONDS
set -uo pipefail
until_s=$((SECONDS + $1))
while [ -f mlruns/chain/chain.pid ] && [ $SECONDS -lt $until_s ]; do sleep 3; done
[ -f mlruns/chain/chain.pid ] && echo "still running" || echo "nothing is running"
for log in mlruns/chain/*.log; do
  echo "== $log, exit $(cat "${log%.log}.rc" 2>/dev/null || echo none yet)"
  tail -n 12 "$log" | cut -c1-200
done
newest=$(ls -td mlruns/campaigns/*/*/trials/*/engine.log 2>/dev/null | head -n 1)
if [ -n "$newest" ]; then
  echo "== $newest"
  tail -n 6 "$newest" | cut -c1-200
fi
nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader
