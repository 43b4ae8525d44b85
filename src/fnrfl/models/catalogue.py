"""From the model's name in a config to the module: `resnet18(head=1000)`, `mlp(hidden=128)`, `my_pkg.nets:make_net`."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from pydantic import TypeAdapter, ValidationError
from torch import nn

from fnrfl import usercode
from fnrfl.core.errors import ConfigError
from fnrfl.core.options import read_call
from fnrfl.core.words import did_you_mean
from fnrfl.models.networks import VGG11, cnn, logistic, mlp, resnet18, resnet50, simple_cnn

Factory = Callable[..., nn.Module]

MODELS: dict[str, Factory] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "vgg11": VGG11,
    "simple-cnn": simple_cnn,
    "cnn": cnn,
    "logistic": logistic,
    "mlp": mlp,
}

# What a model is told about the data; the other parameters of its factory are options, written in the spec.
DATA_ARGUMENTS = ("input_shape", "num_classes")


def build_model(spec: str, input_shape: tuple[int, ...], num_classes: int, factory: Factory | None = None) -> nn.Module:
    """The freshly initialised model that `spec` names, for inputs of `input_shape` without the batch axis.

    A `factory` that was given makes it instead; `spec` is then what sentences call it.

    A model of your own, `"module:function"`, is imported from the current directory or the installed packages
    and called with those of `input_shape` and `num_classes` that it accepts, plus any options in the spec.
    Weights are drawn from torch's global stream: call this inside `rng.seeded(seed, "init")`.
    """
    data: dict[str, object] = dict(zip(DATA_ARGUMENTS, (input_shape, num_classes), strict=True))
    if factory is not None:
        return _build_own(spec, factory, data, {})
    name, options = _parse_spec(spec)
    if ":" in name:
        made = usercode.fetch(f"Model {name!r}", usercode.target("model.name", name))
        if isinstance(made, nn.Module) or not callable(made):
            raise ConfigError(
                f"Model {name!r} is an object of type {type(made).__name__}. Name a function that returns the "
                "nn.Module, or its class, so that every run starts from its own weights."
            )
        return _build_own(spec, made, data, options)
    if name not in MODELS:
        raise ConfigError(
            f"Model {name!r} is unknown.{did_you_mean(name, MODELS)} "
            f'The models are {", ".join(MODELS)}; one of your own is "module:function".'
        )
    _check_options(spec, MODELS[name], options)
    return MODELS[name](**data, **options)


def _parse_spec(spec: str) -> tuple[str, dict[str, object]]:
    try:
        return read_call(spec)
    except ValueError as error:
        raise ConfigError(
            f"Model {spec!r} cannot be read. Write a name, and options by name and once each in parentheses, "
            'such as "resnet18", "resnet18(head=1000)" or "my_pkg.nets:make_net".'
        ) from error


def _check_options(spec: str, factory: Factory, options: dict[str, object]) -> None:
    """Hold options against the names, types and ranges that the factory's signature declares."""
    declared = {name: p.annotation for name, p in inspect.signature(factory, eval_str=True).parameters.items()}
    offered = [name for name in declared if name not in DATA_ARGUMENTS]
    for option, value in options.items():
        if option not in offered:
            takes = f"It takes {', '.join(offered)}" if offered else "It takes none"
            raise ConfigError(f"Model {spec!r} has no option {option!r}.{did_you_mean(option, offered)} {takes}.")
        try:
            TypeAdapter(declared[option]).validate_python(value, strict=True)
        except ValidationError as error:
            rule = error.errors()[0]["msg"].removeprefix("Input ")
            raise ConfigError(f"Model {spec!r} has {option} = {value!r}; it {rule}.") from error


def _build_own(spec: str, factory: Factory, data: dict[str, object], options: dict[str, object]) -> nn.Module:
    """Call somebody else's factory with what it accepts of `data`, and say in a sentence what went wrong."""
    given = f"it is given {' and '.join(DATA_ARGUMENTS)} by name where it has such parameters"
    with usercode.errors_in_words(
        f"Model {spec!r} could not be built", f"{given}; any other needs a default, or a value."
    ):
        parameters = inspect.signature(factory).parameters.values()
        accepts = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            accepts.update(data)
        model = factory(**{name: value for name, value in data.items() if name in accepts} | options)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"Model {spec!r} returned an object of type {type(model).__name__}; it must return a torch.nn.Module."
        )
    return model
