import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import GOLDENS, QWEN_GOLDENS


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the dense golden checkpoint that a test may damage."""
    target = tmp_path / "golden"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / "dense" / name, target / name)
    return target


@pytest.fixture
def qwen(tmp_path: Path) -> Callable[[str], Path]:
    """Copies a Qwen4Exp golden checkpoint of the given name, which a test may damage."""

    def copy(name: str = "text_small") -> Path:
        target = tmp_path / name
        target.mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(QWEN_GOLDENS / name / file, target / file)
        return target

    return copy
