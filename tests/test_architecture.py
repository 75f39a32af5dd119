"""House rules that a machine can check: the direction of imports, no pickle, no PyTorch, small files."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "hybridjax").rglob("*.py"))
FORBIDDEN = {"torch", "transformers", "pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# It pickles what its processes say to each other.
FORBIDDEN |= {"multiprocessing"}
# Calls that run code or read pickles, by the name that is called.
CODE_CALLS = {"eval", "exec", "__import__", "ProcessPoolExecutor", "system", "popen"}
CODE_SWITCHES = {"allow_pickle", "shell", "trust_remote_code"}


def imported(path):
    """Top-level names of all modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def code_calls(path):
    """Calls by which text or files could become code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
        if name in CODE_CALLS:
            yield name
        for keyword in node.keywords:
            if keyword.arg in CODE_SWITCHES and getattr(keyword.value, "value", True) is not False:
                yield keyword.arg


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
def test_no_module_turns_text_into_code(path):
    assert not set(code_calls(path))


def test_the_checker_sees_calls_that_run_code(tmp_path):
    lines = ["eval(x)", "builtins.exec(x)", "np.load(f, allow_pickle=True)", "run(c, shell=True)"]
    lines += ["run(c, shell=False)", "ast.literal_eval(x)", "model.eval_shape(x)"]
    (tmp_path / "x.py").write_text("\n".join(lines))
    assert sorted(code_calls(tmp_path / "x.py")) == ["allow_pickle", "eval", "exec", "shell"]


def test_the_linter_looks_for_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # pickle, marshal, eval, exec.
    assert {"S301", "S302", "S307", "S102"} <= set(project["tool"]["ruff"]["lint"]["select"])


def named_tests():
    """The tests that the table of docs/security.md names, as (file, function)."""
    table = (ROOT / "docs" / "security.md").read_text()
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", table)


def test_the_tests_that_the_security_table_names_exist():
    named = named_tests()
    assert len(named) > 30
    for file, function in named:
        tree = ast.parse((ROOT / file).read_text())
        assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, (
            file,
            function,
        )


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_readable(path):
    limit = 700 if "pallas_kernels" in path.parts else 500
    assert len(path.read_text().splitlines()) <= limit


def test_no_two_files_of_tests_have_the_same_name():
    """pytest imports them by that name alone, so that the second one cannot be collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_importing_the_package_imports_no_jax():
    code = "import sys, hybridjax, hybridjax.serving.http.app; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
