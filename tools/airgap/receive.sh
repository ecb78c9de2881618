#!/usr/bin/env bash
# On the air-gapped host: move the parts that have arrived into one folder and list those that are missing.
#   bash tools/airgap/receive.sh FROM TO    FROM and TO are folders; every *.json and *.tar.xz.NNN of FROM is moved
set -euo pipefail
from=$1 to=$2
mkdir -p "$to"
find "$from" -maxdepth 1 -type f \( -name '*.json' -o -name '*.tar.xz*' \) -exec mv -f -t "$to" {} +
python3 - "$to" <<'PY'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
for path in sorted(folder.glob("*.json")):
    parts = [part["file"] for part in json.loads(path.read_text())["parts"]]
    missing = [name for name in parts if not (folder / name).is_file()]
    print(f"{path.stem}: {len(parts) - len(missing)} of {len(parts)} parts" + (f", missing {' '.join(missing)}" if missing else ", complete"))
PY
