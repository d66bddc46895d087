"""The notebook of the Python API, cell by cell."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "api/panjue.ipynb"

pytestmark = pytest.mark.endurance


@pytest.mark.promise("the notebook runs")
def test_the_notebook(checkout: Path, monkeypatch: pytest.MonkeyPatch, promise: Any) -> None:
    (checkout / "api").mkdir()
    monkeypatch.chdir(checkout / "api")
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}

    async def run() -> None:  # Jupyter runs the cells within an event loop
        for code in codes:
            exec(compile(code, NOTEBOOK.name, "exec"), names)

    with promise.attempt():
        asyncio.run(run())
        assert names["decoded"].repairs
        assert len(names["results"]) == 3
        assert 0 <= names["scores"]["final"] <= 1
