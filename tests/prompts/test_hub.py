"""A base from a hub: the Hugging Face hub, a mirror of it, or ModelScope."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from panjue.prompts.model import MODEL_FILES, model_folder
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, write_json

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "model.py": b"1/0", "a.bin": b""}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Mirror(BaseHTTPRequestHandler):
    """The part of the hub's API that a download uses, for one model."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/api/models/some/model/revision/main"):
            siblings = [{"rfilename": name} for name in FILES]
            body = {"id": "some/model", "sha": COMMIT, "siblings": siblings}
            return self.answer(json.dumps(body).encode())
        if self.path.startswith(f"/api/models/some/model/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": COMMIT}
                for name, body in FILES.items()
            ]
            return self.answer(json.dumps(tree).encode())
        name = self.path.rpartition("/")[2]
        if self.path == f"/some/model/resolve/{COMMIT}/{name}" and name in FILES:
            return self.answer(FILES[name])
        return self.send_error(404)

    do_HEAD = do_GET

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        fields = {"X-Repo-Commit": COMMIT, "ETag": f'"{hash(body)}"', "Content-Length": len(body)}
        for field, value in fields.items():
            self.send_header(field, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def asked_of(endpoint: str, name: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Look for a base in a process of its own: the hub's library reads variables on import."""
    code = (
        "import sys; from panjue.prompts.plumbing.errors import in_one_line\n"
        "from panjue.prompts.model import model_folder\n"
        "with in_one_line(): print(model_folder(sys.argv[1]))"
    )
    given = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-c", code, name],
        env={**os.environ, **given, "HF_HUB_DISABLE_XET": "1", "no_proxy": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_base_comes_from_the_mirror_in_hf_endpoint(
    tmp_path: Path, serving: Callable[[HTTPServer], None]
) -> None:
    server = HTTPServer(("127.0.0.1", 0), Mirror)
    serving(server)
    done = asked_of(f"http://127.0.0.1:{server.server_port}", "some/model", tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert not any(path.endswith((".py", ".bin")) for path in Mirror.asked)


def test_a_hub_that_cannot_be_reached_is_one_line_with_the_ways_out(tmp_path: Path) -> None:
    done = asked_of("http://127.0.0.1:9", "Qwen/Qwen3-8B", tmp_path)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(
        "panjue: base model 'Qwen/Qwen3-8B': no such folder, and the hub cannot provide it "
        "(http://127.0.0.1:9: "
    )
    assert line.endswith(
        "); set HF_ENDPOINT to a mirror, or give modelscope:Qwen/Qwen3-8B or a folder"
    )


SCOPE = """
from pathlib import Path
calls = []
def snapshot_download(name, allow_patterns, local_files_only=False):
    calls.append((name, allow_patterns, local_files_only))
    folder = Path(__file__).parent / "hub" / name
    if not (folder.exists() and (local_files_only or (folder / "online").exists())):
        raise ValueError(f"no network for {name}\\\\nand more")
    return str(folder)
"""


@pytest.fixture
def modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a package of this name in the way; return the folder of its model `some/model`."""
    (tmp_path / "modelscope.py").write_text(SCOPE.replace("\\\\", "\\"), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "modelscope", raising=False)
    folder = tmp_path / "hub/some/model"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_base_comes_from_modelscope(modelscope: Path) -> None:
    (modelscope / "online").touch()
    assert model_folder("modelscope:some/model") == modelscope
    assert sys.modules["modelscope"].calls == [("some/model", list(MODEL_FILES), False)]


def test_without_a_network_modelscope_gives_what_it_has(modelscope: Path) -> None:
    assert model_folder("modelscope:some/model") == modelscope
    with pytest.raises(UserError) as error:
        model_folder("modelscope:other/model")
    assert str(error.value) == (
        "base model 'modelscope:other/model': ModelScope cannot provide it "
        "(no network for other/model); give a folder"
    )


def test_modelscope_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(UserError, match=r"run \.venv/bin/pip install modelscope, or give a folder"):
        model_folder("modelscope:Qwen/Qwen3-8B")


def test_an_adapter_finds_its_base_of_modelscope_again(modelscope: Path, tmp_path: Path) -> None:
    from panjue.finetune.result import _point_to_base
    from panjue.prompts.model import model_sha256
    from panjue.serve.trained import check_base

    name = "modelscope:some/model"
    manifest = {"base": name, "base_sha256": model_sha256(modelscope)}
    assert check_base(tmp_path, manifest) == modelscope
    write_json(tmp_path / "adapter_config.json", {})
    _point_to_base(tmp_path, name)
    config = read_json(tmp_path / "adapter_config.json")
    assert config["base_model_name_or_path"] == "some/model", "as plain peft finds it"
