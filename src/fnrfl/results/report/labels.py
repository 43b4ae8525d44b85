"""Short names for lines: the method, what differs between them, and no more."""

from __future__ import annotations

from collections.abc import Sequence

from fnrfl.rundir.configs import Config

# Said in every label if it differs; all other keys only where labels would be the same.
TELLING = ("dataset.name", "scenario", "model.name", "clients", "participation", "rounds")


def varying(configs: Sequence[Config]) -> list[str]:
    """Keys that are not the same in all configs that have them, seed and name aside."""
    keys = dict.fromkeys(key for config in configs for key in config)
    values = {key: {str(config[key]) for config in configs if key in config} for key in keys}
    return [key for key in keys if len(values[key]) > 1 and key not in ("seed", "name")]


def method(config: Config) -> str:
    """A method's name, with FNR if it is on; weight 0 is said, because that is the control and not FNR."""
    return _with_or_without_fnr(config) + (", weight 0" if config.get("fnr.weight") == 0 else "")


def shared_method(configs: Sequence[Config]) -> str | None:
    """The method that all lines have in common, whatever its weight; it may be left out of their names."""
    methods = {_with_or_without_fnr(config) for config in configs}
    return methods.pop() if len(methods) == 1 else None


def _with_or_without_fnr(config: Config) -> str:
    return str(config["algorithm.name"]) + (" + FNR" if config["fnr"] == "on" else "")


def line_labels(configs: Sequence[Config], finished: Sequence[bool]) -> list[str]:
    """Short names that differ: the method, the setting if it varies, and as few other keys as it takes.

    What all lines share is left out, the method too where something else tells them apart.
    """
    differing = varying(configs)
    found = [_label(config, differing, whole) for config, whole in zip(configs, finished, strict=True)]
    for key in differing:
        if key not in TELLING and not key.startswith("leaks."):
            found = _told_apart(found, configs, key)
    shared = f"{_with_or_without_fnr(configs[0])}, "
    if len(set(found)) > 1 and all(label.startswith(shared) for label in found):
        found = [label.removeprefix(shared) for label in found]
    seen: dict[str, int] = {}
    for i, label in enumerate(found):  # the same run twice
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:
            found[i] = f"{label} ({seen[label]})"
    return found


def _label(config: Config, differing: Sequence[str], finished: bool) -> str:
    """The method, and the setting as far as it differs."""
    setting = [_said(config, key) for key in TELLING if key in differing]
    return ", ".join([method(config), *setting, *([] if finished else ["unfinished"])])


def _told_apart(labels: Sequence[str], configs: Sequence[Config], key: str) -> list[str]:
    """Labels that differ more: a key is added to those that are equal, where its values differ among them."""
    values: dict[str, set[str]] = {}
    for label, config in zip(labels, configs, strict=True):
        values.setdefault(label, set()).add(str(config.get(key)))
    return [
        f"{label}, {_said(config, key)}" if len(values[label]) > 1 else label
        for label, config in zip(labels, configs, strict=True)
    ]


def _said(config: Config, key: str) -> str:
    """A key and its value; of a method's own keys the last word, and no key where the value speaks for itself."""
    value = config.get(key, "none")
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if key in ("dataset.name", "scenario", "model.name"):
        return text
    if key in ("clients", "rounds"):
        return f"{text} {key.removesuffix('s') if value == 1 else key}"
    section, _, word = key.rpartition(".")
    return f"{word if section in ('fnr', 'algorithm') else key} {text}"
