"""The weight files of a checkpoint directory: one file, or shards with an index."""

import itertools
from collections.abc import Iterable
from pathlib import Path

from hybridjax.checkpoints.safetensors_file import SafetensorsFile
from hybridjax.errors import CheckpointError
from hybridjax.json_files import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def open_weights(directory: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the open file that holds it. Reads headers only.

    Like Hugging Face's loader, takes model.safetensors before an index.

    Raises:
      CheckpointError: there are no weights, a file is malformed, or index and files disagree.
    """
    if (directory / SINGLE).exists():
        file = SafetensorsFile(directory / SINGLE)
        return dict.fromkeys(file.tensors, file)
    if not (directory / INDEX).exists():
        other = next(itertools.chain(directory.glob("*.bin"), directory.glob("*.pt*")), None)
        hint = f"; {other.name} is a pickle file, which is never read" if other else ""
        raise CheckpointError(f"{directory}: has neither {SINGLE} nor {INDEX}{hint}")
    return _open_shards(directory)


def _open_shards(directory: Path) -> dict[str, SafetensorsFile]:
    index = directory / INDEX
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing; it must map tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise CheckpointError(
                f"{index}: tensor {name!r} is in {file!r}; it must be the name of a .safetensors file in "
                "the same directory"
            )
    shards = {name: SafetensorsFile(directory / name) for name in sorted(set(weight_map.values()))}
    owner: dict[str, SafetensorsFile] = {}
    problems: list[str] = []
    for file, shard in shards.items():
        for name in shard.tensors:
            if name in owner:
                problems.append(f"{name!r} is in both {owner[name].path.name} and {file}")
            elif name not in weight_map:
                problems.append(f"{name!r} is in {file} but not in the index")
            owner.setdefault(name, shard)
    for name, file in weight_map.items():
        if name not in shards[file].tensors:
            problems.append(f"{name!r} is not in {file}, where the index has it")
    if problems:
        raise CheckpointError(f"{index}: index and files disagree: {listing(problems)}")
    return owner


def _is_plain_name(file: str) -> bool:
    return file.endswith(".safetensors") and not any(char in file for char in "/\\\0:") and file[0] != "."


def listing(problems: Iterable[str], limit: int = 5) -> str:
    """The first few problems, each once, and how many more there are."""
    problems = list(dict.fromkeys(problems))
    shown = "; ".join(problems[:limit])
    return f"{shown}; and {len(problems) - limit} more" if len(problems) > limit else shown
