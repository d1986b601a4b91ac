"""JupyterLab in a real browser: a notebook is opened and run, its charts are alive."""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
NOTEBOOK = "01_attention.ipynb"
CHROMIUM = shutil.which("chromium")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
    --disable-background-networking --disable-component-update --disable-sync"""
GROWS = """rows = charts.Live(
    lambda rows: charts.lines({"a": rows}, title="It grows", x_title="x", y_title="y")
)
for number in range(4):
    rows.append(number)
assert rows.place  # drawn before it was done
rows.show()"""
SETTINGS = {
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension:notification": {
        "checkForUpdates": False,
        "fetchNews": "false",
    },
}

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="needs Debian's chromium: apt-get install chromium"
)


@pytest.fixture
def lab(tmp_path):
    """The address of a JupyterLab of our own, which has a copy of one notebook."""
    notebook = json.loads((ROOT / "notebooks" / NOTEBOOK).read_text("utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []
            last = cell
    notebook["cells"].append(last | {"id": "grows", "source": GROWS})
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / NOTEBOOK).write_text(json.dumps(notebook), "utf-8")
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "overrides.json").write_text(json.dumps(SETTINGS))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex()
    command = [Path(sys.executable).with_name("jupyter-lab"), "--no-browser"]
    command += ["--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += [f"--IdentityProvider.token={token}", "--ServerApp.port_retries=0"]
    command += [f"--LabApp.app_settings_dir={tmp_path / 'settings'}"]
    command += ["--LabApp.extension_manager=readonly"]
    own = (
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "IPYTHONDIR",
    )
    env = os.environ | {name: str(tmp_path / name.lower()) for name in own}
    env |= {"PYTHONPATH": str(ROOT / "tests" / "offline"), "HF_HUB_OFFLINE": "1"}
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        command, cwd=tmp_path / "work", env=env, stdout=log, stderr=log
    )
    yield f"http://127.0.0.1:{port}/lab/tree/{NOTEBOOK}?token={token}"
    server.terminate()
    server.wait(20)
    log.close()


def open_when_up(page, address: str) -> None:
    """Open JupyterLab as soon as it answers."""
    for _ in range(120):
        try:
            page.goto(address)
            return
        except Exception as error:
            if "ERR_CONNECTION_REFUSED" not in str(error):
                raise
            page.wait_for_timeout(250)
    raise AssertionError("JupyterLab did not start")


def test_a_notebook_runs_and_draws(lab, tmp_path):
    asked = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=FLAGS.split()
        )
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda sent: asked.append(sent.url))
        open_when_up(page, lab)
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        page.locator(".jp-KernelName", has_text="Python 3").first.wait_for()
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()

        last = page.locator(".jp-CodeCell .jp-InputPrompt").last
        last.filter(has_text=re.compile(r"\[\d+\]")).wait_for()
        assert page.locator(".jp-RenderedText[data-mime-type*=stderr]").count() == 0
        drawn = page.locator(".vega-embed svg.marks, .vega-embed canvas")
        assert drawn.count() == 3 + 1
        for chart in drawn.all():
            size = chart.bounding_box()
            assert size["width"] > 150 and size["height"] > 60
        weight = page.locator(".vega-embed", has=page.locator("[name=score_1]"))
        weight.locator("[name=score_1]").fill("10")
        weight.locator("text", has_text=re.compile("^0.500$")).first.wait_for()

        page.keyboard.press("Control+s")
        page.locator(".jp-mod-dirty").wait_for(state="detached")
        browser.close()
    ran = json.loads((tmp_path / "work" / NOTEBOOK).read_text("utf-8"))["cells"]
    code = [cell for cell in ran if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    (grown,) = code[-1]["outputs"]  # one chart, in whose place all were drawn
    chart = grown["data"]["application/vnd.vegalite.v5+json"]
    assert len(chart["data"]["values"].split()) == 1 + 4
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert "error" not in kinds and "execute_result" in kinds
    here = lab.partition("/lab/")[0]
    own = (here, here.replace("http", "ws"), "data:", "blob:")
    assert [url for url in asked if not url.startswith(own)] == []
