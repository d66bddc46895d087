"""YAML file plus `key=value` words -> a frozen pydantic model. Unknown keys stop the run."""

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from panjue.prompts.plumbing.errors import UserError, did_you_mean

C = TypeVar("C", bound="Config")

DATA = ("train", "dev", "mix")
"""Settings of a training run that name data files."""


class Config(BaseModel):
    """Base of every stage's settings: frozen, closed; the docstring under a field is its help."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )
    mistaken_names: ClassVar[Mapping[str, str]] = {}
    """What users write by mistake -> the setting that the message names."""
    _path: Path | None = PrivateAttr(None)

    @property
    def path(self) -> Path | None:
        return self._path


SECTIONS = ("sft", "generate", "serve")
"""The sections of a config file, one for each command that takes settings."""


def load_section(cls: type[C], path: Path, name: str, overrides: Sequence[str] = ()) -> C:
    """Build `cls` from a section of a config file, overridden by words without the section's name.

    A file without the section gives the defaults, and so does a missing `config.yaml` of a run.
    """
    sections = load_values(path) if path.exists() else {}
    for section in sections:
        if section not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise UserError(f"{path}: no section {section!r} (there are {known})")
    values = sections.get(name) or {}
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: section {name!r} must be lines of `key: value`")
    overrides = [_as_text(cls, word) for word in overrides]
    try:
        config = cls.model_validate(_overridden(values, overrides))
    except ValidationError as error:
        key = str((error.errors()[0]["loc"] or ("",))[0])
        words = [word for word in overrides if re.split("[.=]", word)[0] == key]
        place = words[-1] if words else path
        raise UserError(f"{place}: {first_complaint(cls, error)}") from None
    config._path = path
    return config


def load_values(path: Path) -> dict[str, Any]:
    """Return the values of a YAML file; no names are checked."""
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise UserError(f"{path}: expected lines of `key: value`, found a list")
        return _plain(loaded)
    except OSError as error:
        there = ", ".join(sorted(file.stem for file in Path("finetune/configs").glob("*.yaml")))
        hint = f"; finetune/configs/NAME.yaml has {there}" if there else ""
        reason = error.strerror or "not a YAML mapping"  # OmegaConf: a single number, no strerror
        raise UserError(f"{path}: {reason}{hint}") from None
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {_in_one_line(error)}") from None


def _plain(config: Any) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=True)
    return dict(json.loads(json.dumps(values)))  # keys are texts then


def _overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    merged: Any = OmegaConf.create(dict(values))
    for word in overrides:
        override = _override(word)
        try:
            merged = OmegaConf.merge(merged, override)
        except TypeError:
            reason = "a list cannot replace a section, nor a section a list"
            raise UserError(f"{word!r}: {reason}") from None
    return _plain(merged)


def _override(word: str) -> dict[str, Any]:
    if "=" not in word:
        raise UserError(f"{word!r}: an override is written key=value")
    key, _, value = word.partition("=")
    quote = f"""put text in quotes: {key}='"…"'"""
    if re.search(r"(^|\s)#", value) and value[0] not in "\"'":
        raise UserError(f"{word!r}: the text after # is a comment in YAML; {quote}")
    try:
        return _plain(OmegaConf.from_dotlist([word]))
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeError) as error:
        raise UserError(f"{word!r}: {_in_one_line(error)}; the value is YAML, {quote}") from None


def _as_text(cls: type[Config], word: str) -> str:
    """Quote a value like 2024_11 of a setting that is a text or a path: YAML has it as 202411."""
    key, _, value = word.partition("=")
    info = cls.model_fields.get(key)
    is_text = info and re.search(r"Path|\bstr\b", str(info.annotation))
    if is_text and re.fullmatch(r"[\d._:+-]+", value):
        return f"{key}='{value}'"
    return word


def _in_one_line(text: object) -> str:
    return " ".join(str(text).split())


def check_managed(section: str, keys: Iterable[str], managed: Container[str]) -> None:
    """Refuse the settings of a library that panjue sets itself."""
    for key in keys:
        if key in managed:
            raise UserError(f"{section}: {key!r} is set by panjue")


def check_known(section: str, keys: Iterable[str], known: Iterable[str]) -> None:
    names = list(known)
    for key in keys:
        if key not in names:
            raise UserError(f"{section}: no setting {key!r}{did_you_mean(key, names)}")


def setting_lines(cls: type[Config]) -> Iterator[str]:
    """Yield two lines for each setting: its name and default, and what it is."""
    for name, info in cls.model_fields.items():
        default = info.get_default(call_default_factory=True)
        if info.is_required() or default is None:
            default = ""
        yield f"{name}={default}"
        yield f"    {_in_one_line(info.description or '')}"


def first_complaint(cls: type[Config], error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        names = _known_names(cls, first["loc"][:-1])
        return f"no setting {key!r}{did_you_mean(key, names, names)}"
    if first["type"] == "missing":
        info = cls.model_fields.get(key)  # None for a key inside a section
        return f"set {key!r}: {(info and info.description) or 'it has no default'}"
    if not key:  # the error is about several settings
        return str(first["msg"]).removeprefix("Value error, ")
    return f"{key}: {first['msg']}, got {first['input']!r}"


def _known_names(cls: type[Config], section: Sequence[int | str]) -> dict[str, str]:
    """Return what may stand in a section of settings -> how it is written on the command line."""
    prefix = "".join(f"{name}." for name in section)
    for name in section:
        for kind in get_args(cls.model_fields[str(name)].annotation):
            if isinstance(kind, type) and issubclass(kind, Config):
                cls = kind
    names = [prefix + name for name in cls.model_fields]
    return {**cls.mistaken_names, **dict(zip(names, names, strict=True))}


ABSOLUTE_PATH = re.compile(r"(?:file:/{2,3}|~\w*/|/(?!/)|[A-Za-z]:[\\/]|\\\\)")
EMBEDDED_PATH = re.compile(
    r"""(?<=[="':])(?:file://)?(?:~\w*)?/(?!/)(?:[^\s"'/,]+/)*([^\s"'/,]+)""", re.ASCII
)
"""An absolute path after `=`, a colon or a quote."""


def scrubbed(value: Any) -> Any:
    """Return settings with each absolute path reduced to its last part."""
    if isinstance(value, Mapping):
        return {scrubbed(key): scrubbed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if ABSOLUTE_PATH.match(value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1] or value
    return EMBEDDED_PATH.sub(r"\1", value)
