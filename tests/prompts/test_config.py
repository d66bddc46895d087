from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, ValidationError

from panjue.prompts.config import Config, check_settings, load_config
from panjue.prompts.errors import UserError


class Section(Config):
    depth: int


class Settings(Config):
    name: str
    """Folder that the run is written to."""
    max_tokens: int = 4096
    """Prompt plus answer."""
    section: Section | None = None
    trainer: dict[str, Any] = Field(default_factory=dict)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a config file that sets every kind of value."""
    path = tmp_path / "run.yaml"
    path.write_text("name: 甲\nmax_tokens: 10\ntrainer:\n  lr: 0.1\n  steps: 5\n", "utf-8")
    return path


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(Settings, path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_file_then_overrides_then_defaults(path: Path) -> None:
    plain = load_config(Settings, path)
    assert plain == Settings(name="甲", max_tokens=10, trainer={"lr": 0.1, "steps": 5})
    config = load_config(Settings, path, ["max_tokens=20", "trainer.lr=2.0e-3", "trainer.new=a=b"])
    assert config.name == "甲"
    assert config.max_tokens == 20
    assert config.trainer == {"lr": 0.002, "steps": 5, "new": "a=b"}
    path.write_text("name: 甲\n", "utf-8")
    assert load_config(Settings, path).max_tokens == 4096


def test_the_last_of_two_overrides_wins(path: Path) -> None:
    assert load_config(Settings, path, ["max_tokens=1", "max_tokens=2"]).max_tokens == 2


def test_settings_are_frozen(path: Path) -> None:
    config = load_config(Settings, path)
    with pytest.raises(ValidationError):
        config.max_tokens = 5


def test_the_docstring_under_a_field_is_its_help() -> None:
    assert Settings.model_fields["max_tokens"].description == "Prompt plus answer."


def test_an_unknown_key_is_named_with_the_nearest(path: Path) -> None:
    assert complaint(path, "max_token=3") == (
        f"{path}: no setting 'max_token'; did you mean 'max_tokens'?"
    )
    path.write_text("name: a\nmax_tokns: 3\n", "utf-8")
    assert "'max_tokns'; did you mean 'max_tokens'?" in complaint(path)


def test_a_missing_key_is_named_with_its_help(path: Path) -> None:
    path.write_text("max_tokens: 3\n", "utf-8")
    assert complaint(path) == f"{path}: set 'name': Folder that the run is written to."
    path.write_text("", "utf-8")
    assert "set 'name'" in complaint(path)


def test_keys_inside_a_section_are_named_too(path: Path) -> None:
    path.write_text("name: a\nsection: {}\n", "utf-8")
    assert "set 'section.depth'" in complaint(path)
    assert "no setting 'section.depht'" in complaint(path, "section.depth=1", "section.depht=1")


def test_a_wrong_type_is_named_with_the_value(path: Path) -> None:
    assert complaint(path, "max_tokens=viel").startswith(f"{path}: max_tokens: ")
    assert complaint(path, "max_tokens=viel").endswith("got 'viel'")
    assert "trainer: " in complaint(path, "trainer=3")


def test_an_override_without_a_value_is_refused(path: Path) -> None:
    assert complaint(path, "max_tokens") == "'max_tokens': an override is written key=value"


@pytest.mark.parametrize(
    "content",
    [b"name: [\n", b"- name\n", b"name: \xff\n", b"name: a\nname: b\n", b"name: ${nothing}\n"],
)
def test_a_broken_file_is_named(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert complaint(path).startswith(f"{path}: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert complaint(tmp_path / "no.yaml") == f"{tmp_path}/no.yaml: No such file or directory"


def test_library_settings_are_checked_against_the_library() -> None:
    check_settings("lora", {"r": 8}, iter(["r", "lora_alpha"]))
    with pytest.raises(UserError) as caught:
        check_settings("lora", {"r": 8, "lora_alfa": 1}, iter(["r", "lora_alpha"]))
    assert str(caught.value) == "lora: no setting 'lora_alfa'; did you mean 'lora_alpha'?"
