from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from panjue.prompts.plumbing.config import (
    Config,
    load_section,
    refuse_options,
    scrubbed,
    setting_lines,
    settings_of,
)
from panjue.prompts.plumbing.errors import UserError


class Settings(Config):
    name: str
    """Folder that the run is written to."""
    max_tokens: int = 4096
    trainer: dict[str, Any] = Field(default_factory=dict)
    lora: dict[str, Any] = Field(default_factory=dict)
    columns: dict[str, str] = Field(default_factory=dict)
    answer: Literal["auto", "model", "classifier"] = "auto"
    from_run: Path | None = Field(default=None, alias="from")
    """What it starts from."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
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
    words = ["max_tokens=20", "trainer.lr=2.0e-3", "trainer.new=a=b", "name=2024_11"]
    config = load_section(Settings, path, "sft", words)
    assert config.name == "2024_11", "a text, though YAML has it as a number"
    assert config.max_tokens == 20
    assert config.trainer == {"lr": 0.002, "steps": 5, "new": "a=b"}
    path.write_text("sft: {name: 甲}\n", "utf-8")
    assert load_section(Settings, path, "sft").max_tokens == 4096
    for missing in (path.with_name("no.yaml"), path):
        assert load_section(Settings, missing, "serve", ["name=b"]).name == "b"


def test_a_setting_may_be_called_like_a_keyword_of_python(path: Path) -> None:
    config = load_section(Settings, path, "sft", ["from=2024_11"])
    assert config.from_run == Path("2024_11"), "a path, though YAML has it as a number"
    assert config.model_dump(mode="json")["from"] == "2024_11", "in config.yaml too"
    assert complaint(path, "from=[1]").startswith("from=[1]: Input is not a valid path")
    assert complaint(path, "form=a").endswith("no setting 'form'; did you mean 'from'?")
    assert complaint(path, "from_run=a").startswith("from_run=a: no setting 'from_run'")
    assert [*setting_lines(Settings, {"from": "a"})][-2:] == ["from=a", "    What it starts from."]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("size: 2", "no section 'size' (there are sft, generate, serve)"),
        ("sft: [1, 2]", "section 'sft' must be lines of `key: value`"),
        ("sft: {max_tokens: 3}", "set 'name': Folder that the run is written to."),
        ("sft: {name: a, max_tokns: 3}", "no setting 'max_tokns'; did you mean 'max_tokens'?"),
        ("[1]", "expected lines of `key: value`, found a list"),
        ("3", "Invalid loaded object type: int"),
        ("sft: {name: '${oc.env:HOME}/x'}", "${{oc.env:HOME}}: settings are saved and packed, and"),
        ("a: 1\nname: [a", "expected ',' or ']' in \"{path}\", line 3"),
    ],
)
def test_a_fault_of_the_file_is_named_with_its_place(
    path: Path, content: str, problem: str
) -> None:
    path.write_text(content, "utf-8")
    told = complaint(path)
    assert told.startswith(f"{path}: ")
    assert problem.format(path=path) in told


def test_a_wrong_setting_is_named_with_its_word(path: Path) -> None:
    told = complaint(path, "name=a", "max_tokens=viel")
    assert told.startswith("max_tokens=viel: Input should be a valid integer")
    said = "there is no 'classifer'; did you mean 'classifier'? (there are auto, model, classifier)"
    assert complaint(path, "answer=classifer") == f"answer=classifer: {said}"
    assert complaint(path, "columns.fact=[1]").startswith("columns.fact=[1]: Input should be a")
    said = complaint(path, "columns.fact=[1]", "columns.id=number")  # the last word is right
    assert said.startswith("columns.fact=[1]: Input should be a")
    assert complaint(path, "columns={fact: [1]}").startswith("columns={fact: [1]}: columns.fact: ")


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("name", "an override is written key=value"),
        ("name=a: b: c", "the value is YAML: quote a text"),
        ("name=\udce9.jsonl", "surrogates not allowed"),
        ("name=${nothing}", "Interpolation key 'nothing' not found"),
        ("trainer=[1]", "Cannot merge"),
        ("name=a #c", "the text after # is a comment"),
    ],
)
def test_a_broken_override_is_named_and_not_the_file(path: Path, word: str, problem: str) -> None:
    told = complaint(path, "max_tokens=20", word)
    assert told.startswith(f"{word!r}: ")
    assert problem in told
    assert f"{path}:" not in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lora_rank 16", "--lora_rank: is written lora.r=16 here"),
        ("--lora-rank=16 name=x", "--lora-rank: is written lora.r=16 here"),
        ("name=x --lora_rank", "--lora_rank: is written lora.r=VALUE here"),
        ("--max_tokens 9", "--max_tokens: is written max_tokens=9 here"),
        ("--temperature .5", "--temperature: is written sampling.temperature=.5 here (generate)"),
        (
            "--gpu_memory_utilization .5",
            "--gpu_memory_utilization: is written engine.gpu_memory_utilization=.5 here "
            "(generate, serve)",
        ),
        ("--api_base http://a", "--api_base: is written endpoint=URL#MODEL here (generate)"),
        ("--verbose", "no option --verbose; settings are written key=value"),
        ("--load_in_4bit", "no option --load_in_4bit; settings are written key=value"),
        ("--settings", "no option --settings; settings are written key=value"),
        ("--setings", "no option --setings; did you mean '--settings'?"),
    ],
)
def test_a_setting_in_the_form_of_others_is_said_in_our_words(words: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        refuse_options(words.split(), settings_of(Settings))
    assert str(error.value) == said


def test_a_home_that_no_shell_has_expanded_makes_no_folder(path: Path) -> None:
    home = Path.home()
    assert complaint(path, "name=~/x") == f"name=~/x: ~ is not expanded here; write name={home}/x"
    path.write_text("sft: {name: ~/x}\n", "utf-8")
    assert complaint(path).startswith("name=~/x: ~ is not expanded")
    assert load_section(Settings, path, "sft", ["name=~a~"]).name == "~a~"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("/x/my cases.json", "my cases.json"),
        ("~/z", "z"),
        ("runs/demo", "runs/demo"),
        ("file:///home/me/x.json", "x.json"),
        ("--x=/home/me/q", "--x=q"),
        ({"/k/l": ["/a/b", 1, None]}, {"l": ["b", 1, None]}),
    ],
)
def test_no_absolute_path_stays(given: Any, left: Any) -> None:
    assert scrubbed(given) == left
