"""House rules that a machine can check: the direction of imports, no pickle, no PyTorch, small files."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "hybridjax").rglob("*.py"))
FORBIDDEN = {"torch", "transformers", "pickle", "cloudpickle", "dill", "marshal", "shelve"}


def imported(path):
    """Top-level names of all modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_imports_run_one_way():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_imports_what_runs_code_from_files(path):
    assert not set(imported(path)) & FORBIDDEN


def test_the_checker_sees_imports_inside_functions(tmp_path):
    (tmp_path / "x.py").write_text("def f():\n    import pickle\n    from torch.nn import Linear\n")
    assert set(imported(tmp_path / "x.py")) & FORBIDDEN == {"pickle", "torch"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_readable(path):
    limit = 700 if "pallas_kernels" in path.parts else 500
    assert len(path.read_text().splitlines()) <= limit


def test_importing_the_package_imports_no_jax():
    code = "import sys, hybridjax, hybridjax.serving.http.app; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
