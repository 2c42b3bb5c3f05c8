# SPDX-License-Identifier: Apache-2.0
"""A dataset's schema: what every hospital must declare alike for its cases to mean the same; a small YAML file that the
lead publishes beside a job. It names no file, column or code of any hospital's.

dataset: heart
kind: table
classes: [healthy, disease]
declared:
  features: {age: number, sex: number, cp: [1, 2, 3, 4]}
  units: {age: years}
"""

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, JsonValue, ValidationError, field_validator

from medpfl.core.errors import SiteFileError
from medpfl.data.contract import Dataset
from medpfl.data.declared import Strict
from medpfl.data.problem import first_problem
from medpfl.data.site_file import SiteFile
from medpfl.data.target import Target
from medpfl.data.untrusted import load_yaml


class Schema(Strict):
    """What hospitals agree on.

    Attributes:
        dataset: its name, as jobs call it.
        classes: names of the classes (or labels) in their order; none where a number or a time is predicted.
        answer: what neither the classes nor what is declared tell: that cases have several labels, or a time until an
            event. Without it they have one class, or, where there are no classes, a number.
        declared: the keys that the kind of dataset wants alike (``Dataset.agreed``), as site files have them.
    """

    dataset: str
    kind: str
    classes: list[str] = Field(default=[])
    answer: Literal["several", "survival"] | None = None
    declared: dict[str, JsonValue] = Field(default={})

    @field_validator("declared", mode="before")
    @classmethod
    def _nothing(cls, declared: object) -> object:
        """Of a kind that wants nothing alike the key could stand alone."""
        return {} if declared is None else declared

    def as_yaml(self) -> str:
        """The file's text."""
        content = self.model_dump(mode="json")
        lines = [
            f"# What every hospital must declare alike of the dataset '{self.dataset}': written by 'medpfl schema'."
        ]
        for key in ("dataset", "kind", "classes", *(["answer"] if self.answer else [])):
            lines.append(_line(key, content[key]))
        declared = [f"  {_line(key, value)}" for key, value in content["declared"].items()]
        lines += ["declared:" if declared else "declared: {}", *declared]
        return "\n".join(lines) + "\n"

    @property
    def digest(self) -> str:
        """SHA-256 of what it says, 64 hexadecimal digits; the order of features and classes counts, comments do not.

        Nor does ``answer``: a job's task says it, and refuses data that have another one by itself.
        """
        content = self.model_dump(mode="json", exclude={"answer"})
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, dataset: Dataset, site: str | None = None) -> list[str]:
        """Sentences on what a declaration has otherwise, each naming the key, what is expected and what is there.

        Args:
            site: whose it is, if that is known.
        """
        if dataset.kind != self.kind:
            return [f"the schema describes a dataset of kind '{self.kind}', the site file declares '{dataset.kind}'"]
        found = []
        if (answer := _ANSWERS.get(dataset.target)) != self.answer:
            where, there = f"at {site}" if site else "here", _answer(answer, dataset.class_names())
            anew = "" if self.answer else " (one that was written before it could say so: write it anew)"
            wanted = _answer(self.answer, self.classes)
            found.append(f"what is to be predicted {where} is {there}; the schema has {wanted}{anew}")
        if dataset.class_names() != self.classes:
            found.append(f"the classes are {_listed(dataset.class_names())}; the schema has {_listed(self.classes)}")
        declared = agreed_of(dataset)
        for key in {**self.declared, **declared}:
            expected, got = self.declared.get(key), declared.get(key)
            if isinstance(expected, dict) and isinstance(got, dict):
                found += _of_mappings(key, expected, got)
            elif expected != got:
                found.append(f"'{key}' is {_shown(got)}; the schema has {_shown(expected)}")
        return found


_ANSWERS: dict[Target, Literal["several", "survival"]] = {Target.LABELS: "several", Target.SURVIVAL: "survival"}


def schema_of(name: str, dataset: Dataset) -> Schema:
    """The schema that a hospital's declaration follows."""
    classes, answer = dataset.class_names(), _ANSWERS.get(dataset.target)
    return Schema(dataset=name, kind=dataset.kind, classes=classes, answer=answer, declared=agreed_of(dataset))


def digest_of_declared(site_file: SiteFile, dataset: str) -> str:
    """Digest of the schema that a hospital's declaration follows."""
    return schema_of(dataset, site_file.datasets[dataset]).digest


def agreed_of(dataset: Dataset) -> dict[str, JsonValue]:
    """The declared values of the keys that hospitals must agree on; those that are not set are left out."""
    content = dataset.model_dump(mode="json")
    found: dict[str, JsonValue] = {}
    for key in dataset.agreed:
        value: JsonValue = content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and value != {}:
            found[key] = value
    return found


def read_schema(path: Path) -> Schema:
    """Read a schema file.

    Raises:
        SiteFileError: it cannot be read or is no schema, with the key.
    """
    try:
        content = load_yaml(path)
        return Schema.model_validate(content)
    except OSError as error:
        raise SiteFileError(f"cannot read the schema {path}: {error.strerror}") from error
    except ValidationError as error:
        raise SiteFileError(f"{path}: it is no dataset's schema: {first_problem(error, Schema)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SiteFileError(f"{path}: not valid YAML: {getattr(error, 'problem', None) or error}") from error


def _of_mappings(key: str, expected: Mapping[str, JsonValue], got: Mapping[str, JsonValue]) -> Iterator[str]:
    for name, value in expected.items():
        if name not in got:
            others = {other.casefold(): other for other in got if other not in expected}
            meant = difflib.get_close_matches(name.casefold(), others, 1)
            hint = f"; is it '{others[meant[0]]}' here? Then 'rename' it" if meant and key == "features" else ""
            yield f"'{key}' lacks '{name}', which the schema has{hint}"
        elif got[name] != value:
            yield f"'{key}.{name}' is {_shown(got[name])}; the schema has {_shown(value)}"
    for name in got:
        if name not in expected:
            yield f"'{key}' has '{name}', which the schema does not have"
    if list(expected) != list(got) and expected.keys() == got.keys():
        yield f"'{key}' are in another order; the schema's is {', '.join(expected)}"


def _answer(answer: str | None, classes: Sequence[str]) -> str:
    for target, key in _ANSWERS.items():
        if answer == key:
            return f"'{key}' ({target.told})"
    return "one class" if classes else "one number"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _shown(value: JsonValue) -> str:
    return "not declared" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else repr(value)


def _line(key: str, value: JsonValue) -> str:
    style = True if isinstance(value, list | dict) else None
    text = yaml.safe_dump(value, default_flow_style=style, sort_keys=False, width=10_000, allow_unicode=True)
    return f"{key}: {text.removesuffix(chr(10)).removesuffix('...').strip()}"
