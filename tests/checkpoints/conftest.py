import shutil
from pathlib import Path

import pytest
from damage import GOLDENS


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the dense golden checkpoint that a test may damage."""
    target = tmp_path / "golden"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / "dense" / name, target / name)
    return target
