"""The API in a Jupyter kernel, where an event loop is already running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.api.test_documentation import BLOCKS, shrink

pytestmark = pytest.mark.slow


def run_cells(cells: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The outputs of each cell."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from nbformat.v4 import new_code_cell, new_notebook

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return [cell.outputs for cell in notebook.cells]


def find_html(outputs: list[Any]) -> str:
    return "".join(output.get("data", {}).get("text/html", "") for output in outputs)


def find_text(outputs: list[Any]) -> str:
    return "".join(output.get("text", "") for output in outputs)


RUNNING = """
import asyncio, webbrowser
assert asyncio.get_running_loop().is_running()
webbrowser.open = lambda url: True
"""
SHOWN = (
    "first = result\nresult.comparison",
    "result",
    'result.metrics.plot("reward/avg_raw_reward")',
    "result.run.trajectories()[0]",
    "(await sf.evaluate_async('null', env, tasks)).success_rate",
)
INTERRUPTED = """
import os, signal, skyfleet as sf
def interrupt(step):
    if step.number == 1:
        os.kill(os.getpid(), signal.SIGINT)
result = sf.train("tiny", reward=lambda answer: 0.0, tasks=[{"prompt": f"Say {n}."} for n in range(4)],
                  eval=False, steps=500, batch_size=2, algorithm=sf.GRPO(group_size=2, kl=0),
                  sampling=sf.Sampling(max_tokens=4), on_step=interrupt)
"""


@pytest.mark.filterwarnings("ignore")
def test_objects_render_and_a_kernel_interrupt_returns_a_partial_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel for both: it takes as long to start as the cells to run."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    cells = [RUNNING, shrink(BLOCKS[0]), *SHOWN, INTERRUPTED, "result.interrupted", "result"]
    outputs = run_cells(cells, tmp_path, monkeypatch)
    assert "| val | env" in find_text(outputs[1])
    assert "<progress value='1' max='1'>" in find_html(outputs[1])
    assert "step 1/1" in find_html(outputs[1])
    assert "step 1/1" not in find_text(outputs[1])  # the bar replaces the lines
    assert "<table>" in find_html(outputs[2])
    assert "<table>" in find_html(outputs[3])
    assert "<svg" in find_html(outputs[4])
    assert "<details" in find_html(outputs[5])
    assert outputs[6][-1]["data"]["text/plain"] == "0.0"
    assert outputs[8][0]["data"]["text/plain"] == "True"
    assert "interrupted" in outputs[9][0]["data"]["text/plain"]


@pytest.mark.exhaustive  # test_documentation.py runs the blocks without a kernel
@pytest.mark.filterwarnings("ignore")
def test_every_block_of_the_page_runs_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    first, *others = map(shrink, BLOCKS)
    run_cells([RUNNING, first, "first = result", *others], tmp_path, monkeypatch)
