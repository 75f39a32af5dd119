"""Headless Chromium from the system's packages, driven through its own chromedriver."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--window-size=1200,800"),
)
REQUIRED = "HYBRIDJAX_REQUIRE_BROWSER"


class Browser:
    """A browser with a fresh profile; a context manager that ends it."""

    def __init__(self):
        chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
        if chromium is None or driver is None:
            how = "chromium and chromedriver are missing (Debian: apt-get install chromium chromium-driver)"
            (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(how)
        from selenium import webdriver

        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={self._profile.name}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=driver)
        self.driver = webdriver.Chrome(options=options, service=service)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *exception: object) -> None:
        self.driver.quit()
        self._profile.cleanup()

    def console(self) -> list[str]:
        """What the page has logged since the last call, errors of the browser included."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def show(self, width: int, height: int, scheme: str) -> None:
        """Sets the size of the window and whether the system is dark or light."""
        self._command("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._command("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        self.driver.save_screenshot(str(path))

    def _command(self, name: str, **arguments: Any) -> None:
        if name.endswith("Override"):
            arguments["deviceScaleFactor"] = 1
        self.driver.execute_cdp_cmd(name, arguments)
