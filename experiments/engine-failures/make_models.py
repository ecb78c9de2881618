"""Broken copies of a model folder, each broken in one way, under .models/broken.

python experiments/engine-failures/make_models.py .models/smollm2-135m
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BROKEN = Path(".models/broken")
WEIGHTS, TOKENIZER = "model.safetensors", ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def broken(source: Path, name: str, *, without: tuple[str, ...] = (), config: Mapping[str, Any] | None = None) -> Path:
    """A folder of links to the files of `source`, less some of them, with some keys of config.json set."""
    folder = BROKEN / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in {*without, "config.json"}:
            (folder / path.name).symlink_to(path.resolve())
    whole = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**whole, **(config or {})}, indent=1), encoding="utf-8")
    return folder


def main(source: Path) -> None:
    broken(source, "no-weights", without=(WEIGHTS,))
    broken(source, "no-tokenizer", without=TOKENIZER)
    broken(source, "mismatch", config={"num_hidden_layers": 31})
    broken(source, "architecture", config={"architectures": ["FooForCausalLM"]})
    broken(
        source, "remote-code", config={"model_type": "foo", "auto_map": {"AutoConfig": "configuration_foo.FooConfig"}}
    )
    broken(source, "vocabulary", config={"vocab_size": 32000})
    broken(source, "eagle", config={"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1})
    truncated = broken(source, "truncated", without=(WEIGHTS,)) / WEIGHTS
    with (source / WEIGHTS).open("rb") as file:
        truncated.write_bytes(file.read(1_000_000))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
