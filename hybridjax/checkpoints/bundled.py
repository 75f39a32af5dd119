"""Models that come with the package, and the rule by which a name or path becomes a directory."""

from pathlib import Path

from hybridjax import text
from hybridjax.errors import CheckpointError
from hybridjax.text import Tokenizer

_HOME = Path(__file__).parent.parent / "bundled"


def bundled_models() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(file.parent.name for file in _HOME.glob("*/config.json"))


def resolve(path_or_name: str | Path) -> Path:
    """The directory of a model: the path itself, or a bundled model of that name.

    Raises:
      CheckpointError: there is neither; nothing is ever downloaded.
    """
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        return path
    if str(path_or_name) in bundled_models():
        return _HOME / path_or_name
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the directory that holds config.json")
    names = ", ".join(bundled_models()) or "none"
    raise CheckpointError(
        f"{str(path_or_name)!r} is neither a directory nor a bundled model (bundled: {names}); "
        "hybridjax makes no downloads, so fetch the checkpoint first and give its directory"
    )


def load_tokenizer(path_or_name: str | Path, chat_template: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a directory, a tokenizer.json file or a bundled model; see ``hybridjax.text``."""
    is_file = Path(path_or_name).is_file()
    return text.load_tokenizer(path_or_name if is_file else resolve(path_or_name), chat_template)
