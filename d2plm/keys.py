"""The keys of the commands, as their YAML files describe them: defaults, types, choices and paths.

Values are checked here against the YAML files before torch is imported, to report typing errors
early. The library checks the same values again, and more strictly.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

from d2plm.core.errors import (
    ConfigError,
    DataError,
    ModelError,
    require,
    require_choice,
    require_number,
)
from d2plm.core.files import config_dir, is_hub_name, nearest_path, shipped

# Last parts of keys whose values are paths; so are those that end in _dir.
PATHS = {
    *("input", "output", "store", "root", "run", "checkpoint", "mutations", "templates"),
    *("init_from", "proteins", "validation_ids", "test_ids", "checkpoints"),
    *("reference", "relatives", "tokenizer"),
}
# Last parts of keys that are null by default and otherwise numbers.
NUMBERS = {
    *("max_epochs", "max_length", "max_relatives", "max_residues", "flops_budget", "threads"),
    *("window", "near_duplicate_similarity", "overlap_ngram"),
    *("fast_dev_run", "overfit_batches", "warmup_steps", "decay_steps", "steps", "top_k"),
    *("patience", "initializer_range", "relatives_dim", "relatives_sensitivity"),
    *("relatives_proteins", "remdm_eta", "peak_tflops", "min_nodes", "deadline_seconds"),
    "end_of_document",
}
SIGNED = {"mutation_offset", "layer", "split_seed"}  # numbers that may be negative
FRACTIONAL = ("_seconds", "system_metrics")  # may be fractional although the default is whole
PARADIGM_CONFIG = "paradigm_config.json"  # in every exported model
MODEL_CONFIG = "config.json"  # in every model folder, including ESM-2


def full_key(key: str, known: Iterable[str]) -> str:
    """Expand `key` to the only known key that ends in it; return `key` if there is none.

    Raises:
        ConfigError: if several known keys end in it.
    """
    known = [one for one in known if one.endswith(f".{key}")]
    if len(known) > 1:
        raise ConfigError(f"{key}: ambiguous; write {' or '.join(sorted(known))}")
    return known[0] if known else key


def check_values(root: str, values: Mapping[str, Any]) -> None:
    """Reject values whose type, range or choice contradicts the defaults and comments in the YAML.

    Args:
        root: file of the command; only its keys are checked.
        values: full key → value; null is left to the library.
    """
    defaults: dict[str, list[tuple[object, str]]] = {}
    for key, text, comment in _entries(root):
        defaults.setdefault(key, []).append((_plain(text), comment))
    ours, shipped_targets = "._target_", _targets(root)
    foreign = tuple(  # sections of user-defined classes, which have their own rules
        key.removesuffix(ours) + "."
        for key, value in values.items()
        if key.endswith(ours) and value not in shipped_targets
    )
    for key, value in values.items():
        if key in defaults and value is not None and not key.startswith(foreign):
            _check(key, value, *zip(*defaults[key], strict=True))


def _targets(root: str) -> set[str]:
    texts = (file.read_text() for _, file in files(config_dir() / f"{root}.yaml"))
    return {target for text in texts for target in re.findall(r"_target_: (\S+)", text)}


def _check(key: str, value: object, defaults: tuple[Any, ...], comments: tuple[str, ...]) -> None:
    kinds = {type(default) for default in defaults if default is not None}
    name, comment = key.rpartition(".")[2], next(filter(None, reversed(comments)), "")
    single = not isinstance(value, list | dict)
    if (kinds and kinds <= {int, float}) or (not kinds and name in NUMBERS and single):
        least, most = _range(comment)
        low = None if name in SIGNED else least
        whole = kinds == {int} and not name.endswith(FRACTIONAL)
        require_number(key, value, integer=whole, low=low, high=most)
    elif kinds == {bool}:
        require(isinstance(value, bool), key, value, "true or false")
    elif kinds == {list}:
        require(isinstance(value, list), key, value, "a list, such as [a,b]")
    elif kinds == {str}:
        choices = [listed(comment) for comment in comments if comment]
        known = dict.fromkeys(chain.from_iterable(choices))
        if all(choices) and {*defaults} <= known.keys():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            require_choice(key, text, known)


def _plain(text: str) -> object:
    """A value of the same type as a YAML text; None if any type is possible."""
    if text in ("null", "???") or "${" in text:
        return None
    if text in ("true", "false"):
        return text == "true"
    if text[0] in "[{":
        return [] if text[0] == "[" else {}
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("\"'")


def _range(comment: str) -> tuple[float, float | None]:
    """Bounds in a comment (`0 … 1`, `1 (fast) … 7.5 (sensitive)`, `at least 1`); default ≥ 0."""
    found = re.search(r"([\d.]+)(?: \(\w+\))? … ([\d.]+)", comment)
    least = re.search(r"at least (\d+)", comment)
    return (float(found[1]), float(found[2])) if found else (float(least[1]) if least else 0, None)


def check_paths(root: str, values: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Reject input paths that do not exist.

    The values of model_dir and init_from are exported models. URLs and `-` are not checked.

    Raises:
        DataError: if a path does not exist or is not of the expected kind.
        ModelError: if a model does not exist or model_dir is not an exported model.
    """
    known = known_keys(root)
    for key in keys:
        value, said = values.get(key), known.get(key, ("", ""))[1]
        for path in value if isinstance(value, list) else [value]:
            text = "" if path is None else str(path)
            if key == "data.prepared_dir" and values.get("data.residues") == "random":
                continue
            if text in ("", "-") or re.match(r"\w+:/", text) or "\0" in text:
                continue
            is_model = key in ("model_dir", "init_from")
            if is_model and is_hub_name(text):
                continue
            place = Path(os.path.expanduser(shipped(text)))
            if not os.path.exists(place) and not glob(str(place), recursive=True):
                error = ModelError if is_model else DataError
                raise error(
                    f"{key}={text}: no such file or folder{nearest_path(text)}; check the path "
                    f"({key.rpartition('.')[2]}: {said})"
                )
            if key == "model_dir":
                _require_export(place)
            if key == "data.prepared_dir" and (place / "data.mdb").exists():
                raise DataError(f"{key}={text}: is a raw store; prepare it with d2plm prepare")
            is_file = os.path.isfile(place)
            if is_file and said.startswith(("folder", "stores")):
                raise DataError(f"{key}={text}: is a file; expected the {said}")
            if is_file and not os.path.getsize(place):
                raise DataError(f"{key}={text}: is empty; give another file")


def _require_export(folder: Path) -> None:
    """Reject a path that is not an exported model; suggests a model inside it."""
    if not (folder / MODEL_CONFIG).exists():
        inside = sorted(one.parent for one in folder.glob(f"**/{PARADIGM_CONFIG}"))
        near = f" (did you mean '{inside[0]}'?)" if inside else ""
        if any(folder.glob("*.distcp")):
            of = f"--config-file {folder.absolute().parents[1]}/config.yaml trainer.resume={folder}"
            near = f", but a checkpoint; export it with d2plm export {of}"
        raise ModelError(f"model_dir={folder}: not a model folder (no {MODEL_CONFIG}){near}")


def listed(comment: str) -> list[str]:
    """Choices at the end of a key's comment, such as `kernel: a | b (on CUDA)`."""
    last = re.split("[:;(] ?", re.sub(r" \([^()|]*\)", "", comment))[-1].removesuffix(")")
    choices = last.split(" | ") if "|" in last else []
    return choices if all(re.fullmatch(r"[\w.-]+", choice) for choice in choices) else []


def known_keys(root: str) -> dict[str, tuple[str, str]]:
    """Key → (value, comment) of a root file and of every choice of its groups."""
    known: dict[str, tuple[str, str]] = {}
    for key, value, comment in _entries(root):
        known[key] = value, comment or known.get(key, ("", ""))[1]
    return known


def _entries(root: str) -> Iterator[tuple[str, str, str]]:
    """(full key, value, comment); a key occurs once per file that contains it."""
    for section, file in files(config_dir() / f"{root}.yaml"):
        for key, value, comment in _lines(file) if section != "experiment" else ():
            yield (f"{section}.{key}" if section else key), value, comment


def groups(root: str) -> dict[str, str]:
    """Group → its choice in a root file."""
    found = {}
    for entry, choice in _defaults(config_dir() / f"{root}.yaml"):
        if choice:
            found[entry] = choice.removeprefix(": ")
        elif entry != "_self_":
            found |= groups(entry)
    return found


def _defaults(file: Path) -> list[tuple[str, str]]:
    """The defaults list of a root file: (group, `: choice`) or (another root file, "")."""
    return re.findall(r"^  - ([\w/]+)(: .*)?$", file.read_text(), re.MULTILINE)


def files(file: Path) -> Iterator[tuple[str, Path]]:
    """(section or "", file) of all files from which a root file can be composed."""
    for entry, choice in _defaults(file):
        if choice:
            yield from ((entry, option) for option in (config_dir() / entry).glob("*.yaml"))
        elif entry != "_self_":
            yield from files(file.with_name(f"{entry}.yaml"))
    yield "", file


def _lines(file: Path) -> Iterator[tuple[str, str, str]]:
    """(dotted key, value, comment) of the lines `key: value  # comment`."""
    inside: list[tuple[int, str]] = []
    for line in file.read_text().splitlines():
        found = re.match(r"( *)([\w.]+):(.*?)(?:  # (.*))?$", line)
        if found is None:
            continue
        indent, name, value, comment = found.groups("")
        inside = [(depth, outer) for depth, outer in inside if depth < len(indent)]
        inside.append((len(indent), name))
        if value.strip() and name not in ("_target_", "defaults"):
            yield ".".join(outer for _, outer in inside), value.strip(), comment
