"""A drive that is full, over its quota or broken: one line, which says what to do."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import lend_rows

HERE = Path(__file__).parent
FULL = "free some space, then run the same command to resume"
FAILED = "the drive has failed: when it works again, run the same command to resume"
WAYS_OUT = {errno.ENOSPC: FULL, errno.EDQUOT: FULL, errno.EIO: FAILED, errno.ESTALE: FAILED}

SAVE = """
import os, sys
from pathlib import Path
import numpy, torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from panjue.finetune.checkpoints import disk_errors_named
from panjue.prompts.plumbing.errors import in_one_line
from panjue.prompts.plumbing.files import read_json, stream, sync_one

folder = Path(sys.argv[1])
codes = sys.argv[2:]
weights = {"weight": torch.zeros(100_000)}

def append():
    with stream(folder / "rows") as rows:
        rows.write("{}")
        rows.flush()

ways = {
    "safetensors": lambda: save_file(weights, folder / "weights"),
    "torch": lambda: torch.save(weights, folder / "weights"),
    "tokenizers": lambda: Tokenizer(models.BPE()).save(str(folder / "tokenizer")),
    "numpy": lambda: numpy.savez_compressed(folder / "arrays.npz", **weights),
    "row": append,
    "sync": lambda: sync_one(folder / "old.json"),
    "read": lambda: read_json(folder / "old.json"),
}
for code in codes:
    for way, act in ways.items():
        os.environ["DRIVE_ERROR"] = code
        try:
            with in_one_line(), disk_errors_named(folder):
                act()
        except SystemExit as end:
            print(way, end.code, file=sys.stderr)
"""


@pytest.fixture(scope="session")
def failing_drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that makes a process's writing fail."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler on this machine")
    made = tmp_path_factory.mktemp("drive") / "failing_drive.so"
    words = ["cc", "-shared", "-fPIC", "-o", str(made), str(HERE / "failing_drive.c"), "-ldl"]
    subprocess.run(words, check=True)
    return made


def said_on(drive: Path, part: str, *words: str, **env: str) -> list[str]:
    """Return what a process prints to stderr whose paths with `part` are on a failing drive."""
    fault = {"LD_PRELOAD": str(drive), "DRIVE_FAILS": part, **env}
    done = subprocess.run(
        words, env={**os.environ, **fault}, capture_output=True, text=True, check=False
    )
    return done.stderr.splitlines()


WAYS = ("safetensors", "torch", "tokenizers", "numpy", "row", "sync", "read")


def test_every_library_s_error_of_the_drive_is_one_line(
    failing_drive: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "on the drive"
    folder.mkdir()
    (folder / "old.json").write_text("{}", "utf-8")
    words = (sys.executable, "-c", SAVE, str(folder), *map(str, WAYS_OUT))
    said = said_on(failing_drive, "on the drive", *words)
    assert said[1::2] == [f"{way} 2" for way in WAYS] * len(WAYS_OUT), said
    for number, (code, way_out) in enumerate(WAYS_OUT.items()):
        for way, line in zip(WAYS, said[2 * number * len(WAYS) :: 2], strict=False):
            assert line.startswith("panjue: ")
            assert line.endswith(f"{os.strerror(code)}; {way_out}")
            assert str(folder) in line or way == "numpy"


OF_TRITON = ("nanobind:", " - leaked ", " - ... skipped", "See https://nanobind.readthedocs.io")
"""What triton 3.9 prints when a training that failed ends, where it is installed."""


def test_a_training_over_its_quota_ends_in_one_line_and_resumes(
    failing_drive: Path, workshop: Path, trained: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    lend_rows(trained.parent, run)
    panjue = str(Path(sys.executable).with_name("panjue"))
    words = [panjue, "sft", str(workshop / "sft.yaml"), f"run={run}"]
    # Through such a file safetensors writes.
    said = said_on(failing_drive, "/.tmp", *words, DRIVE_ERROR=str(errno.EDQUOT))
    said = [line for line in said if not line.startswith(OF_TRITON)]
    assert len(said) == 1, said
    assert said[0].startswith(f"panjue: {run}/checkpoints/checkpoint-6: ")
    assert said[0].endswith(f"{os.strerror(errno.EDQUOT)}; {FULL}")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (run / "adapter/manifest.json").exists()
