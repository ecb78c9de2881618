"""Write DeepSeek-V4-Flash without its weights: config.json, cut to some layers, and a placeholder tokenizer.

    .engines/vllm/bin/python experiments/h200-dspark-k-sweep/make_model.py .models/dsv4-flash-24l --layers 24

An engine fills it with random weights (`--load-format dummy`). Speed, memory and every kernel are those of the real
architecture; the text means nothing. Needs the package tokenizers, which every engine environment has.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FULL_CONFIG = Path(__file__).resolve().parents[1] / "models" / "deepseek-v4-flash" / "config.json"


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same model with its first `layers` decoder layers; the draft stages keep their place after the last one.

    Raises ValueError when the cut would leave out a kind of layer: three hash layers, then both compressed kinds.
    """
    full, stages = config["num_hidden_layers"], config["n_mtp_layers"]
    if not 5 <= layers <= full:
        raise ValueError(f"--layers {layers}: allowed are 5 (one of every kind of layer) to {full}")
    ratios = config["compress_ratios"]
    return config | {
        "num_hidden_layers": layers,
        "compress_ratios": ratios[:layers] + ratios[full : full + stages],
        # The drafter reads the last layers' hidden states.
        "dspark_target_layer_ids": list(range(layers - len(config["dspark_target_layer_ids"]), layers)),
    }


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer whose ids cover `vocab_size`: bytes encode to themselves, the rest only decodes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<bos>", "<eos>", *alphabet]
    # Every other id decodes to a word with a space in front, so that a stream of any ids is visible text.
    words += [f"\u0120t{number}" for number in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:2]])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words[0],
        "eos_token": words[1],
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def make(folder: Path, layers: int, config_path: Path = FULL_CONFIG) -> None:
    """Write the model folder aside and put it in place of whatever was there."""
    config = cut(json.loads(config_path.read_text(encoding="utf-8")), layers)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        aside = Path(scratch) / "model"
        aside.mkdir()
        (aside / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        greedy = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "temperature": 0.0}
        (aside / "generation_config.json").write_text(json.dumps(greedy) + "\n", encoding="utf-8")
        write_tokenizer(aside, config["vocab_size"])
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--config", type=Path, default=FULL_CONFIG)
    arguments = parser.parse_args()
    try:
        make(arguments.folder, arguments.layers, arguments.config)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{arguments.folder}: {arguments.layers} layers, no weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
