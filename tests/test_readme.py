"""What the README tells people to copy is at least well formed."""

import configparser
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ROOMS = ("prompts", "finetune", "serve", "eval")
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def blocks(language: str) -> list[str]:
    text = (ROOT / "serve/README.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_systemd_unit() -> None:
    [unit] = blocks("ini")
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit)
    assert parser.sections() == ["Unit", "Service", "Install"]
    assert "panjue serve serve/configs/" in parser["Service"]["ExecStart"]
    seconds = int(parser["Service"]["TimeoutStopSec"])
    assert seconds > 30, "longer than drain_s"
    # An engine that never came up ends like a wrong setting; at boot that may be for a minute only.
    assert parser["Service"]["Restart"] == "always"
    assert "RestartPreventExitStatus" not in parser["Service"]
    assert int(parser["Service"]["RestartSec"]) >= 10
    assert parser["Unit"]["StartLimitIntervalSec"] == "0"


def test_the_compose_file() -> None:
    [text] = [block for block in blocks("yaml") if block.startswith("services:")]
    compose = yaml.safe_load(text)
    [service] = compose["services"].values()
    assert "panjue serve serve/configs/" in " ".join(service["command"])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    named = {volume.split(":")[0] for volume in service["volumes"] if volume[0] != "/"}
    assert named == compose["volumes"].keys()


def test_the_kuberay_job() -> None:
    """Its form was held to the operator's own schema by hand."""
    [text] = [block for block in blocks("yaml") if block.startswith("apiVersion: ray.io")]
    spec = yaml.safe_load(text)["spec"]
    assert spec["entrypoint"].startswith("panjue generate serve/configs/")
    [group] = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert spec["entrypoint"].endswith(f"ray=auto replicas={group['replicas']}")
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    lock = (ROOT / ".ci/gpu.lock").read_text("utf-8")
    assert f"\nray=={spec['rayClusterSpec']['rayVersion']}\n" in lock


SRUN = """
while [[ $1 == --* ]]; do case $1 in --nodes=1) one=yes ;; esac; shift; done
for i in 0 ${one:-1}; do [ $i = yes ] || SLURM_NODEID=$i "$@"; done
"""


def launched_by_slurm(script: str, folder: Path) -> list[list[str]]:
    """Run a batch script with stand-ins for Slurm, accelerate and ray; return what they launch."""
    for name, body in (
        ("scontrol", "echo first; echo second"),
        ("hostname", "echo 10.0.0.1 172.17.0.1"),
        ("srun", SRUN),
        (".venv/bin/accelerate", 'echo "$@"'),
        (".venv/bin/ray", 'echo "$@"'),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/bash\n{body}\n", "utf-8")
        (folder / name).chmod(0o755)
    env = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "x[1-2]", "SLURM_CPUS_PER_TASK": "64"}
    env["PATH"] = f"{folder}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-euc", script], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    return [line.split() for line in done.stdout.splitlines()]


def test_the_slurm_script_for_generation(tmp_path: Path) -> None:
    [script] = [block for block in blocks("bash") if "#SBATCH" in block]
    launched = launched_by_slurm(script, tmp_path)
    assert len(launched) == 2
    for words in launched:
        assert words[0] == "symmetric-run"
        assert dict(zip(words[1:5:2], words[2:5:2], strict=True)) == {
            "--address": "10.0.0.1:6379",
            "--min-nodes": "2",
        }
        assert words[5:8] == ["--", "panjue", "generate"]
        assert (ROOT / words[8]).exists()
        assert words[-2:] == ["ray=auto", "replicas=16"]


def test_the_slurm_script_for_training(tmp_path: Path) -> None:
    text = (ROOT / "finetune/README.md").read_text("utf-8")
    [script] = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert script in (ROOT / "finetune/README.zh.md").read_text("utf-8")
    launched = launched_by_slurm(script, tmp_path)
    assert [words[words.index("--machine_rank") + 1] for words in launched] == ["0", "1"]
    for words in launched:
        assert words[:3] == ["launch", "--config_file", "finetune/configs/fsdp2.yaml"]
        assert (ROOT / words[2]).exists()
        options = dict(zip(words[1:-5:2], words[2:-5:2], strict=True))
        assert (options["--num_machines"], options["--num_processes"]) == ("2", "16")
        assert options["--main_process_ip"] == "first"
        assert words[-5:-2] == [".venv/bin/panjue", "sft", "finetune/configs/qwen3-32b-lora.yaml"]


READMES = [f"{room}/{name}" for room in (".", *ROOMS) for name in ("README.md", "README.zh.md")]


@pytest.mark.parametrize("readme", READMES)
def test_links_lead_somewhere(readme: str) -> None:
    text = (ROOT / readme).read_text("utf-8")
    for place, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        file = (ROOT / readme).parent / place if place else ROOT / readme
        assert file.exists(), place
        heads = re.findall(r"^## (.*)$", file.read_text("utf-8"), re.MULTILINE) if heading else []
        anchors = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
        assert not heading or heading in anchors, (place, heading, anchors)


def test_the_first_page_is_short() -> None:
    for readme in READMES[:2]:
        assert len((ROOT / readme).read_text("utf-8").splitlines()) <= 120


@pytest.mark.parametrize("readme", READMES)
def test_make_targets_and_config_files_that_are_named_exist(readme: str) -> None:
    text = (ROOT / readme).read_text("utf-8")
    for line in re.findall(r"^make ([a-z -]+?)(?= *[A-Z#]|$)", text, re.MULTILINE):
        assert set(line.split()) <= set(TARGETS), line
    for config in re.findall(r"(?:serve|finetune)/configs/[\w.-]+\.yaml", text):
        assert (ROOT / config).exists(), config


def in_a_run(readme: str) -> set[str]:
    """Return the files and folders that are said to lie in a run's folder."""
    text = (ROOT / readme).read_text("utf-8")
    [listed] = re.findall(r"^.*`runs/<.*\n((?:\n|(?:- |  ).*\n)+)", text, re.MULTILINE)
    return set(re.findall(r"`([a-z*.-]+?)/?`", listed))


def test_what_lies_in_a_run_is_listed() -> None:
    listed = in_a_run("README.md")
    assert listed == in_a_run("README.zh.md")
    code = "".join(
        file.read_text("utf-8") for room in ROOMS for file in (ROOT / room).rglob("*.py")
    )
    written = set(re.findall(r"\b(?:run|(?:run|config|opened)\.folder) / \"([\w.-]+)\"", code))
    assert written >= {"config.yaml", "report.html", "skipped-test.jsonl"}
    assert not [name for name in written if not any(fnmatch(name, one) for one in listed)]
    makes = (ROOT / "Makefile").read_text("utf-8")
    assert listed >= set(re.findall(r"\$\(RUN\)/([\w.-]+)", makes))
