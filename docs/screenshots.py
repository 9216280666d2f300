"""Take the screenshots of the MLflow UI in docs/images from a finished pipeline run.

    pip install playwright
    python docs/screenshots.py sqlite:///runs/demo/mlflow.db [folder [picture …]]

All pictures, or only those named, are written to docs/images or to the folder. This needs Chromium:
Debian's, or the one that CHROMIUM names.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow import MlflowClient
from PIL import Image
from playwright.sync_api import Page, ViewportSize, sync_playwright

IMAGES = Path(__file__).with_name("images")
MODEL = "d2plm-diffusion"
CURVES = "(train/loss|learning_rate|grad_norm|validation/)"
COLUMNS = ("paradigm", "parameters", "steps", "evaluation/perplexity", "versus/composition")
BROWSER = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZE: ViewportSize = {"width": 1400, "height": 900}
WIDE: ViewportSize = {"width": 2100, "height": 460}  # for the list's columns
COLOURS = 128
PATIENCE = 180_000  # milliseconds; a loaded machine draws slowly


def main(store: str, folder: str = str(IMAGES), *wanted: str) -> None:
    """Take every picture of the champion in `store` and of its run, or those that are wanted."""
    client = MlflowClient(store)
    version = client.get_model_version_by_alias(MODEL, "champion")
    run = client.get_run(version.run_id)
    experiment = f"/#/experiments/{run.info.experiment_id}"
    path = f"{experiment}/runs/{run.info.run_id}"
    pages = {
        "mlflow_runs.png": (f"{experiment}/runs", "Created"),
        "mlflow_run.png": (path, "Description"),
        "mlflow_curves.png": (f"{path}/model-metrics", "Auto-refresh"),
        "mlflow_evaluation.png": (f"{path}/artifacts/evaluation/evaluation.png", "evaluation.json"),
        "mlflow_model.png": (f"/#/models/{MODEL}", "@ champion"),
        "mlflow_version.png": (f"/#/models/{MODEL}/versions/{version.version}", "Schema"),
    }
    with served(store) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=BROWSER)
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(PATIENCE)
        page.goto(f"{address}/#/experiments")
        settle(page)
        close_assistant(page)
        for name, (where, text) in pages.items():
            if wanted and name not in wanted:
                continue
            page.set_viewport_size(SIZE)
            open_page(page, address + where, text)
            if name == "mlflow_runs.png":
                choose_columns(page)
                page.set_viewport_size(WIDE)
                settle(page)
            if name == "mlflow_run.png":
                page.get_by_text("Show more").first.click()
            if name == "mlflow_evaluation.png":  # where it lies on this machine
                page.get_by_text("Path:").first.evaluate("it => it.style.visibility = 'hidden'")
            if name == "mlflow_curves.png":
                page.get_by_placeholder("Search metric charts").fill(CURVES)
                settle(page)
            picture(page, Path(folder, name))
        browser.close()


def chromium() -> str | None:
    """Debian's Chromium, or the one that CHROMIUM names; None for Playwright's own."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium")


@contextmanager
def served(store: str) -> Iterator[str]:
    """The address of an MLflow server of `store`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store]
    server = subprocess.Popen([*command, "--workers=1", f"--port={port}"])
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(f"{address}/health")
        yield address
    finally:
        server.terminate()
        server.wait()


def wait_for(address: str, seconds: float = 180) -> None:
    """Return once `address` answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(address).close()  # noqa: S310  # our own server
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def close_assistant(page: Page) -> None:
    """Close the panel that asks for questions, and take the view of those who train models."""
    for name in ("Close", "Model training"):
        button = page.get_by_role("button", name=name, exact=True)
        if button.count():
            button.first.click()


def choose_columns(page: Page) -> None:
    """Show what tells the runs apart, too."""
    page.get_by_role("button", name="Columns", exact=True).click()
    search = page.get_by_placeholder("Search columns")
    for name in COLUMNS:
        search.fill(name.rpartition("/")[2])
        page.wait_for_timeout(1000)
        rows = page.locator("[class*=tree-treenode]")
        row = rows.filter(has_text=re.compile(rf"^{re.escape(name)}$"))
        row.locator("[class*=tree-checkbox]").first.click()
    page.keyboard.press("Escape")
    settle(page)


def open_page(page: Page, address: str, text: str) -> None:
    """Open `address` and wait for `text` on it."""
    page.goto(address)
    page.get_by_text(text).first.wait_for()
    settle(page)


def settle(page: Page) -> None:
    """Wait for charts and images, which nothing announces; the page never ceases to ask."""
    page.wait_for_timeout(6000)


def picture(page: Page, file: Path) -> None:
    """Write what is seen, in as few colours as it needs."""
    page.mouse.move(0, 0)
    page.screenshot(path=file)
    Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
