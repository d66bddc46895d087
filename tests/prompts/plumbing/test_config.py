from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from panjue.prompts.plumbing.config import Config, load_section, load_values, scrubbed
from panjue.prompts.plumbing.errors import UserError


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
    path.write_text("sft: {name: 甲, max_tokens: 10, trainer: {lr: 0.1, steps: 5}}\n", "utf-8")
    return path


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_section(Settings, path, "sft", overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_file_then_overrides_then_defaults(path: Path) -> None:
    plain = load_section(Settings, path, "sft")
    same = Settings(name="甲", max_tokens=10, trainer={"lr": 0.1, "steps": 5})
    assert plain.model_dump() == same.model_dump()
    assert plain.path == path
    words = ["max_tokens=20", "trainer.lr=2.0e-3", "trainer.new=a=b"]
    config = load_section(Settings, path, "sft", words)
    assert config.name == "甲"
    assert config.max_tokens == 20
    assert config.trainer == {"lr": 0.002, "steps": 5, "new": "a=b"}
    path.write_text("sft: {name: 甲}\n", "utf-8")
    assert load_section(Settings, path, "sft").max_tokens == 4096
    for missing in (path.with_name("no.yaml"), path):
        assert load_section(Settings, missing, "serve", ["name=b"]).name == "b"
    path.write_text("size: 2", "utf-8")
    assert "no section 'size' (there are sft, generate, serve)" in complaint(path)


def test_an_unknown_key_is_named_with_the_nearest(path: Path) -> None:
    assert complaint(path, "max_token=3") == (
        "max_token=3: no setting 'max_token'; did you mean 'max_tokens'?"
    )
    path.write_text("sft: {name: a, max_tokns: 3}\n", "utf-8")
    assert "'max_tokns'; did you mean 'max_tokens'?" in complaint(path)


def test_a_missing_key_is_named_with_its_help(path: Path) -> None:
    path.write_text("sft: {max_tokens: 3}\n", "utf-8")
    assert complaint(path) == f"{path}: set 'name': Folder that the run is written to."
    path.write_text("", "utf-8")
    assert "set 'name'" in complaint(path)


def test_keys_inside_a_section_are_named_too(path: Path) -> None:
    path.write_text("sft: {name: a, section: {}}\n", "utf-8")
    assert "set 'section.depth'" in complaint(path)
    assert "no setting 'section.depht'" in complaint(path, "section.depth=1", "section.depht=1")


@pytest.mark.parametrize("values", ["[1, 2]", "3", "abc"])
def test_a_section_without_keys_is_named(path: Path, values: str) -> None:
    path.write_text(f"sft: {values}\n", "utf-8")
    assert complaint(path) == f"{path}: section 'sft' must be lines of `key: value`"


def test_a_wrong_type_is_named_with_the_value(path: Path) -> None:
    assert complaint(path, "max_tokens=viel").startswith("max_tokens=viel: max_tokens: ")
    assert complaint(path, "max_tokens=viel").endswith("got 'viel'")
    assert "trainer: " in complaint(path, "trainer=3")


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        ("name: a\nmax_tokens: 1: 2\n", 2, "mapping values are not allowed in this context"),
        ("a: 1\nname: [a", 3, "expected ',' or ']'"),
        ("name: a\nmax_tokens: 1\nname: b\n", 3, "found duplicate key name"),
    ],
)
def test_a_broken_file_is_named_with_line_and_problem(
    path: Path, content: str, line: int, problem: str
) -> None:
    path.write_text(content, "utf-8")
    told = complaint(path)
    assert told.startswith(f"{path}: ")
    assert f"line {line}" in told
    assert problem in told


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("solve={way: window", "expected ',' or '}'"),
        ("name=\udce9.jsonl", "surrogates not allowed"),
        ("name=${nothing}", "Interpolation key 'nothing' not found"),
        ("trainer.lr={a: '${'}", "no viable alternative"),
        ("trainer=[1]", "a list cannot replace a section"),
    ],
)
def test_a_broken_override_is_named_and_not_the_file(path: Path, word: str, problem: str) -> None:
    told = complaint(path, "max_tokens=20", word)
    assert told.startswith(f"{word!r}: ")
    assert problem in told
    assert f"{path}:" not in told


@pytest.mark.parametrize(
    "word", ["name=a #c", "name=#c", "trainer={lr: 1} # c", "name=[a, #c\n b]"]
)
def test_what_yaml_takes_for_a_comment_is_not_silently_dropped(path: Path, word: str) -> None:
    told = complaint(path, word)
    assert told.startswith(f"{word!r}: ")
    assert "comment" in told


def test_the_bare_name_of_a_config_is_told_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    with pytest.raises(UserError, match=r"finetune/configs/NAME.yaml has base, demo, "):
        load_values(Path("demo"))


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("/x/y.jsonl", "y.jsonl"),
        ("file:///home/me/x.json", "x.json"),
        ("~/z", "z"),
        ("~me/z", "z"),
        ("/home/me/my cases.json", "my cases.json"),
        ("host:/mnt/me/a", "host:a"),
        ("--x=/home/me/q", "--x=q"),
        ("C:/Users/a.json", "a.json"),
        (r"\\server\share\x", "x"),
        (r"C:\Users\me\a.json", "a.json"),
        ('{"cache_dir":"/home/me"}', '{"cache_dir":"me"}'),
        ({"/k/l": ["/a/b", 1, None]}, {"l": ["b", 1, None]}),
    ],
)
def test_no_absolute_path_stays(given: Any, left: Any) -> None:
    assert scrubbed(given) == left
