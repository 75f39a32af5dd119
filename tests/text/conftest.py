from pathlib import Path

import pytest
from small_tokenizers import CHATML, byte_fallback, byte_level, write


@pytest.fixture(scope="session")
def tokenizer_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tokenizers")
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "chat_template": CHATML,
    }
    return {
        "byte_level": write(base / "byte_level", byte_level(), **settings),
        "byte_fallback": write(base / "byte_fallback", byte_fallback(), **settings),
    }
