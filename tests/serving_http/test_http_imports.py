import subprocess
import sys


def test_the_front_needs_neither_jax_nor_an_engine():
    names = "jax", "flax", "hybridjax.serving.engine", "hybridjax.models", "tokenizers"
    code = (
        "import sys, hybridjax.serve, hybridjax.serving.http.app, hybridjax.serving.http.server\n"
        f"print([name for name in {names!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
