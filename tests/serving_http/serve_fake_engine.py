"""The server command over the fake engine: ``python serve_fake_engine.py FLAGS``."""

import sys
from typing import Any

from http_fakes import FakeEngine

import hybridjax.serving
from hybridjax.serve import main

# After two tokens of this prompt the engine hangs.
HANGS = [0, 0, 7]


class Engine(FakeEngine):
    def __init__(self, model_path: str, **settings: Any):
        super().__init__()
        # Tells the test what it was built with.
        print("engine", model_path, settings["page_size"], "port" in settings, flush=True)

    def submit(self, prompt: Any, *args: Any, **kwargs: Any) -> str:
        if prompt == HANGS:
            self.allow(2)
            self.pulse = 1
        return super().submit(prompt, *args, **kwargs)

    def shutdown(self) -> None:
        super().shutdown()
        print("engine is shut down", flush=True)


hybridjax.serving.Engine = Engine  # pyright: ignore
sys.exit(main())
