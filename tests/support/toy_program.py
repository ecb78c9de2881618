"""The program of the toy engine: the stand-in for vLLM behind other flags and other names of counters."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

FLAGS = {
    "--checkpoint": "--model",
    "--listen": "--port",
    "--name": "--served-model-name",
    "--secret": "--api-key",
    "--context": "--max-model-len",
    "--memory-share": "--gpu-memory-utilization",
}


def main(words: list[str]) -> None:
    if "--help" in words:
        print("options:", *(f"  {flag} VALUE  a value" for flag in (*FLAGS, "--draft")), sep="\n")
        return
    translated: list[str] = []
    for flag, value in zip(words[::2], words[1::2], strict=True):
        if flag == "--draft":
            drafting = {"method": "ngram", "num_speculative_tokens": int(value)}
            translated += ["--speculative-config", json.dumps(drafting)]
        elif flag in FLAGS:
            translated += [FLAGS[flag], value]
        else:
            sys.exit(f"toy-serve: {flag} came from another shop")
    behaviour = {"load_s": 0.0, "max_life_s": 120, "rename_metrics": {"vllm:": "toy:"}}
    program = str(Path(__file__).with_name("fake_engine.py"))
    environment = {**os.environ, "FAKE_ENGINE": json.dumps(behaviour)}
    os.execve(sys.executable, [sys.executable, program, "vllm", *translated], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
