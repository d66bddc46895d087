"""Make a frozen pydantic model from a YAML file and `key=value` words; refuse unknown keys."""

import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from panjue.prompts.plumbing.errors import UserError, did_you_mean, no_such
from panjue.prompts.plumbing.files import dump, located, open_bytes
from panjue.prompts.plumbing.other_names import OURS

SomeConfig = TypeVar("SomeConfig", bound="Config")

DATA_FILES = ("train", "dev", "mix")
"""Settings of a training run that name data files."""


class Config(BaseModel):
    """Base of every stage's settings, frozen and closed. The docstring of a field is its help."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, serialize_by_alias=True
    )
    _path: Path | None = PrivateAttr(None)

    @property
    def path(self) -> Path | None:
        return self._path


def settings_of(cls: type[Config]) -> dict[str, FieldInfo]:
    """Return the settings of a class by their names in files and words.

    The alias of a field is its name there: `from` is a keyword of Python.
    """
    return {info.alias or name: info for name, info in cls.model_fields.items()}


SECTIONS = ("sft", "generate", "serve")
"""The sections of a config file, one for each command that takes settings."""


def load_section(
    cls: type[SomeConfig], path: Path, name: str, overrides: Sequence[str] = ()
) -> SomeConfig:
    """Build `cls` from section `name` of a config file and from words like `trainer.max_steps=10`.

    Words replace values of the file. A file without the section gives the defaults, and so does a
    run without `config.yaml`.
    """
    values = section_values(cls, path, name, overrides)
    return built_section(cls, values, path, overrides)


def section_values(
    cls: type[Config], path: Path, name: str, overrides: Sequence[str]
) -> dict[str, Any]:
    """Return a section of a config file, changed by words like `run=mine`, not checked yet."""
    sections = load_values(path) if path.exists() else {}
    for section in sections:
        if section not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise UserError(f"{path}: no section {section!r} (there are {known})")
    values = sections.get(name) or {}
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: section {name!r} must be lines of `key: value`")
    values = _overridden(values, [_as_text(cls, word) for word in overrides])
    for key, info in settings_of(cls).items():
        if info.annotation in TEXT_TYPES:  # it may be a path with ~
            refuse_home(key, str(values.get(key) or ""))
    return values


def built_section(
    cls: type[SomeConfig], values: Mapping[str, Any], path: Path, overrides: Sequence[str]
) -> SomeConfig:
    """Build `cls` from the values of a section; refuse a wrong value, naming its place.

    The place is the last of the `key=value` words that set this key or a part of the config around
    it: `seed=x: Input should be …`. If no word did, it is the file: `config.yaml: seed: Input …`.
    """
    try:
        config = cls.model_validate(dict(values))
    except ValidationError as error:
        complaint = first_complaint(error, settings_of(cls))
        wrong_key = ".".join(map(str, first_error(error)["loc"])) + "."  # "columns.fact."
        for word in reversed(overrides):
            key = word.partition("=")[0]
            if wrong_key.startswith(f"{key}."):  # of `columns.fact` or `columns`, not `columns.id`
                problem = complaint.removeprefix(f"{key}: ")  # the word names the setting already
                raise UserError(f"{word}: {problem}") from None
        raise UserError(f"{path}: {complaint}") from None
    config._path = path
    return config


def refuse_home(key: str, value: str) -> None:
    """Refuse a path that begins with `~`, since some shells do not expand it in run=~/mine."""
    path = os.path.expanduser(value)  # unchanged if there is no such user
    if path != value:
        raise UserError(f"{key}={value}: ~ is not expanded here; write {key}={path}")


def refuse_options(words: Sequence[str], known: Container[str]) -> None:
    """Refuse settings in the form of other programs (`--lora_rank 16`); say panjue's: `lora.r=16`.

    `known` are the settings of this command.
    """
    for word, following in pairwise([*words, ""]):
        if not re.match("--?[a-zA-Z]", word):
            continue
        option, equals, value = word.partition("=")
        if not equals and not following.startswith("-") and "=" not in following:
            value = following
        key = option.lstrip("-").replace("-", "_")
        # OURS has `lora_rank` -> `lora.r`, or with the commands that have the setting
        # `gpu_memory_utilization` -> `engine.… (generate, serve)`, where … is the key.
        name, _, commands = OURS.get(key, key).partition(" ")
        if not commands and re.split("[.=]", name)[0] not in known:
            hint = did_you_mean(option, {"--settings", "--help"} - {option})
            raise UserError(f"no option {option}{hint or '; settings are written key=value'}")
        name = name.replace("…", key)
        written = name if "=" in name else f"{name}={value or 'VALUE'}"  # endpoint=URL#MODEL
        raise UserError(f"{option}: is written {written} here {commands}".rstrip())


YAML_ERRORS = (OmegaConfBaseException, yaml.YAMLError, UnicodeError)


def load_values(path: Path) -> dict[str, Any]:
    """Return the values of a YAML file without checking its keys."""
    try:
        with open_bytes(path) as file:
            loaded = OmegaConf.load(file)
        if not isinstance(loaded, DictConfig):
            raise UserError(f"{path}: expected lines of `key: value`, found a list")
        with located(str(path)):
            return _plain(loaded)
    except (*YAML_ERRORS, OSError) as error:  # OSError: the file has a single number
        raise UserError(f"{path}: {_one_line(error)}") from None


OF_ENVIRONMENT = re.compile(r"\$\{(?:oc\.)?env[.:][^}]*\}")
"""Pattern of a value that OmegaConf takes from the environment."""


def _plain(config: Any) -> dict[str, Any]:
    """Return the values of an OmegaConf object as in JSON, where all keys are texts."""
    if found := OF_ENVIRONMENT.search(OmegaConf.to_yaml(config)):
        reason = "settings are saved and packed, and may not have values of the environment"
        raise UserError(f"{found[0]}: {reason}; write the value")
    values = OmegaConf.to_container(config, resolve=True)
    return dict(json.loads(json.dumps(values)))


def _overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a section, changed by the words `key=value`."""
    merged: Any = OmegaConf.create(dict(values))
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{word!r}: an override is written key=value")
        if re.search(r"(^|\s)#", value) and value[0] not in "\"'":
            reason = "the text after # is a comment in YAML"
            raise UserError(f"""{word!r}: {reason}; put text in quotes: {key}='"…"'""")
        try:
            override = _plain(OmegaConf.from_dotlist([word]))
            if value.strip() == "{}":  # empties a section; merging would not change it
                OmegaConf.update(merged, key, {}, merge=False)
            else:
                merged = OmegaConf.merge(merged, override)
        except (*YAML_ERRORS, TypeError) as error:  # TypeError: a list in place of settings
            problem = _one_line(error)
            raise UserError(f"{word!r}: {problem}; the value is YAML: quote a text") from None
    return _plain(merged)


TEXT_TYPES = (str, Path, str | None, Path | None)


def _as_text(cls: type[Config], word: str) -> str:
    """Quote a value like 2024_11 for a setting that is a text or path; YAML reads it as 202411."""
    key, _, value = word.partition("=")
    info = settings_of(cls).get(key)
    is_text = info and info.annotation in TEXT_TYPES
    if is_text and re.fullmatch(r"[\d._:+-]+", value):
        return f"{key}='{value}'"
    return word


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def check_managed(section: str, keys: Iterable[str], managed: Container[str]) -> None:
    """Refuse settings of a library that panjue sets itself."""
    for key in keys:
        if key in managed:
            raise UserError(f"{section}: {key!r} is set by panjue")


def check_known(section: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Refuse settings of a section that do not exist."""
    names = list(known)
    for key in keys:
        if key not in names:
            raise UserError(f"{section}: no setting {key!r}{_hint(key, names)}")


def _hint(key: str, known: Iterable[str]) -> str:
    """Return `; it is lora.r here` for `lora_rank`, or else the most similar of `known`, if any."""
    return f"; it is {OURS[key]} here" if key in OURS else did_you_mean(key, known)


def setting_lines(cls: type[Config], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield two lines for each setting: its name with its value or default, and its help."""
    for name, info in settings_of(cls).items():
        value = values.get(name, info.get_default(call_default_factory=True))
        if value is None or (name not in values and info.is_required()):
            value = ""
        yield f"{name}={value if isinstance(value, str) else dump(value)}"
        yield f"    {_one_line(info.description or '')}"


def first_complaint(error: ValidationError, known: Mapping[str, FieldInfo] = {}) -> str:
    """Return the setting and the problem of pydantic's first error: `seed: Field required`.

    If the error is about settings, `known` has them by name, and an unknown or missing setting gets
    a better message. An unknown one comes first: it may be the missing one, misspelled.
    """
    first = first_error(error)
    key = ".".join(map(str, first["loc"]))
    if known and first["type"] == "extra_forbidden":
        return f"no setting {key!r}{_hint(key, known)}"
    if key in known and first["type"] == "missing":
        return f"set {key!r}: {known[key].description}"
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        problem = no_such(first["input"], re.findall("'([^']*)'", first["ctx"]["expected"]))
    return f"{key}: {problem}" if key else problem


def first_error(error: ValidationError) -> ErrorDetails:
    """Return pydantic's first error about an unknown name, or else its first one."""
    errors = error.errors()
    unknown = (one for one in errors if one["type"] == "extra_forbidden")
    return next(unknown, errors[0])


BEGINNING_OF_PATH = re.compile(r"(?:file:/{2,3}|~\w*/|/(?!/)|[A-Za-z]:[\\/]|\\\\)")
EMBEDDED_PATH = re.compile(
    r"""(?<=[="':])(?:file://)?(?:~\w*)?/(?!/)(?:[^\s"'/,]+/)*([^\s"'/,]+)""", re.ASCII
)


def scrubbed(value: Any) -> Any:
    """Return settings with only the last part of each absolute path: `/home/me/base` -> `base`.

    A card or bundle is published, and should not show the user's folders. Paths within a text count
    after `=`, a colon or a quote: `--cache=/home/me/hub` -> `--cache=hub`.
    """
    if isinstance(value, Mapping):
        return {scrubbed(key): scrubbed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if BEGINNING_OF_PATH.match(value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1] or value
    return EMBEDDED_PATH.sub(r"\1", value)
