"""Small models with a tokenizer, and text for them."""

import re
import shutil
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

GOLDENS = Path(__file__).parent.parent / "goldens"
WORDS = 90  # of the tokenizer; the smallest golden model has 97 ids


def write_tokenizer(directory: Path) -> None:
    """Words w0 .. w89, each with its number as id."""
    backend = tokenizers.Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.save(str(directory / "tokenizer.json"))


def model_with_tokenizer(target: Path, name: str) -> Path:
    """A copy of a golden checkpoint, such as ``minicpm_sala/dense``, that can read text."""
    target.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / name / file, target / file)
    write_tokenizer(target)
    return target


def write_text(file: Path, paragraphs: int = 12, seed: int = 0) -> Path:
    """Paragraphs of 40 words."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, WORDS, (paragraphs, 40))
    file.write_text("\n\n".join(" ".join(f"w{i}" for i in row) for row in ids) + "\n")
    return file


def fuse_experts(directory: Path) -> None:
    """Stores experts as BF16 releases do: all of a layer in one tensor."""
    tensors = load_file(directory / "model.safetensors")
    places = {match[1] for name in tensors if (match := re.match(r"(.*\.experts\.)0\.up_proj\.weight", name))}
    for place in places:
        count = sum(name.startswith(place) and name.endswith("up_proj.weight") for name in tensors)
        gate, up, down = (
            [tensors.pop(f"{place}{e}.{part}_proj.weight") for e in range(count)]
            for part in ("gate", "up", "down")
        )
        tensors[place + "gate_up_proj"] = np.concatenate([np.stack(gate), np.stack(up)], axis=1)
        tensors[place + "down_proj"] = np.stack(down)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
