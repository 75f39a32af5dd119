"""Makes interop/ importable, which is a folder of scripts and no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "interop"))
