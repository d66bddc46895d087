"""YAML file plus `key=value` words -> a frozen pydantic model. Unknown keys stop the run."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from panjue.prompts.errors import UserError, did_you_mean

C = TypeVar("C", bound="Config")


class Config(BaseModel):
    """Base of every stage's settings: frozen, closed; the docstring under a field is its help."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class SolveSettings(Config):
    """Base of the settings of a task that takes several calls."""

    _kept_in: Path | None = PrivateAttr(None)

    @property
    def kept_in(self) -> Path | None:
        """Return the run folder, where what is dear to find again is kept; None: nowhere."""
        return self._kept_in

    def in_folder(self, folder: Path | None) -> Self:
        """Return the same settings for a run in `folder`."""
        copy = self.model_copy()
        copy._kept_in = folder
        return copy


def load_config(cls: type[C], path: Path, overrides: Sequence[str] = ()) -> C:
    """Build `cls` from the YAML file `path`, overridden by words such as `trainer.max_steps=10`.

    Raises:
        UserError: The file is missing or broken, or a key is unknown, absent or of the wrong type.
    """
    try:
        words = [_word(word) for word in overrides]
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise UserError(f"{path}: expected lines of `key: value`, found a list")
        merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist(words))
        values = OmegaConf.to_container(merged, resolve=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or 'is no YAML mapping'}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8"
        ) from None
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from None
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {first_complaint(cls, error)}") from None


def check_settings(
    section: str,
    given: Mapping[str, Any],
    known: Iterable[str],
    ours: Mapping[str, str] | None = None,
) -> None:
    """Refuse a library setting that the library does not have, or that panjue makes itself.

    Args:
        section: Its name in the config file.
        given: The settings.
        known: Those that the library has.
        ours: Those that panjue makes -> the setting to use instead.

    Raises:
        UserError: Names the setting and the nearest known one, or the one to use.
    """
    names = list(known)
    for key in given:
        if key not in names:
            raise UserError(f"{section}: no setting {key!r}{did_you_mean(key, names)}")
        if ours and key in ours:
            raise UserError(f"{section}: {key!r} is panjue's to set; use {ours[key]}")


def _word(word: str) -> str:
    if "=" not in word:
        raise UserError(f"{word!r}: an override is written key=value")
    return word


def first_complaint(cls: type[Config], error: ValidationError) -> str:
    """Return what a user should know of the first thing that is wrong with settings."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"no setting {key!r}{did_you_mean(key, cls.model_fields)}"
    if first["type"] == "missing":
        known = cls.model_fields.get(key)  # None for a key inside a section
        return f"set {key!r}: {(known and known.description) or 'it has no default'}"
    if not key:  # of several settings together
        return str(first["msg"]).removeprefix("Value error, ")
    return f"{key}: {first['msg']}, got {first['input']!r}"
