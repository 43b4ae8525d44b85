"""Whether a method, a model, the data and the optimiser can go together; what cannot is refused before a run starts."""

from __future__ import annotations

from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.parts.norms import num_peers, num_refined
from fnrfl.config import RunConfig
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.net import Net
from fnrfl.core.training import BALANCED, NONE, read_class_weights
from fnrfl.core.words import counted
from fnrfl.data.partition.value import Partition
from fnrfl.data.partition.views import Splits
from fnrfl.data.scenarios import mask
from fnrfl.runs.cohorts import num_answers
from fnrfl.runs.limits import check_sizes


def check_needs(config: RunConfig, algorithm: Algorithm, net: Net, splits: Splits, partition: Partition) -> None:
    """Refuse a run that lacks something that its method needs, or whose parts contradict each other."""
    _check_model(config, algorithm.needs, net)
    _check_public(config, algorithm, splits)
    _check_optimiser(config, algorithm.needs)
    _check_scale(config, net, splits)
    _check_class_weights(config, partition)
    _check_noise(config, net, splits, partition)
    _check_targets(config)
    check_sizes(config, net, splits)
    _check_clients(config, splits, partition)


def method_in_words(config: RunConfig) -> str:
    """The method's name in a sentence."""
    return f"fnr around {config.algorithm.name}" if config.fnr is not None else config.algorithm.name


def _check_model(config: RunConfig, needs: frozenset[str], net: Net) -> None:
    name = method_in_words(config)
    if "features" in needs and not net.has_features:
        raise CompatibilityError(
            f'{name} needs features and model = "{config.model.name}" calls no Linear layer to take them from. Name '
            "the layer whose output they are with model.features."
        )
    if "head" in needs and not net.has_head:
        raise CompatibilityError(
            f'{name} needs a last Linear that reads the features, and model = "{config.model.name}" has none. Choose '
            "another model, or set model.features = auto."
        )
    if "batchnorm" in needs and not net.batchnorm:
        raise CompatibilityError(
            f'{name} works on BatchNorm layers, and model = "{config.model.name}" has none. Choose a model with '
            'BatchNorm, such as "cnn(norm=batch)", or algorithm = fedavg.'
        )


def _check_public(config: RunConfig, algorithm: Algorithm, splits: Splits) -> None:
    name = method_in_words(config)
    if "distill" in algorithm.needs and not len(splits.distill):
        raise CompatibilityError(
            f"{name} needs public data to distil on and there is none. Set public.size = 0.1 and leave public.distill "
            "at auto, or give public.source."
        )
    if "public-labels" in algorithm.needs and not len(splits.public):
        only_fnr = isinstance(algorithm, FNR) and "public-labels" not in algorithm.inner.needs
        way = "set fnr = off" if only_fnr else "set algorithm = fedavg"
        raise CompatibilityError(
            f"{name} needs labelled public data and there is none. Set public.size = 0.1, give public.source, or {way}."
        )


def _check_optimiser(config: RunConfig, needs: frozenset[str]) -> None:
    if "linear-optimiser" in needs and config.client.optimizer != "sgd":
        raise CompatibilityError(
            f"{method_in_words(config)} needs local steps that are linear in the gradients, and client.optimizer = "
            f'"{config.client.optimizer}" is not. Set client.optimizer = "sgd".'
        )


def _check_scale(config: RunConfig, net: Net, splits: Splits) -> None:
    if config.dataset.missing == "mean" and not splits.train.x.is_floating_point():
        raise CompatibilityError(
            f'dataset.missing = "mean" is about numbers of which some are not known, and dataset = '
            f'"{config.dataset.name}" holds pixels or whole numbers, of which none is missing. Set dataset.missing = '
            '"refuse".'
        )
    if config.dataset.scale != "none" and not net.input_dtype.is_floating_point:
        raise CompatibilityError(
            f'dataset.scale = "{config.dataset.scale}" changes the numbers of the examples, and model = '
            f'"{config.model.name}" takes whole numbers as they are (tokens). Set dataset.scale = "none".'
        )


def _check_class_weights(config: RunConfig, partition: Partition) -> None:
    text, classes = config.client.class_weights, partition.counts.shape[1]
    if text not in (NONE, BALANCED) and len(read_class_weights(text)) != classes:
        raise CompatibilityError(
            f"client.class_weights has {counted(len(read_class_weights(text)), 'number')} and dataset = "
            f'"{config.dataset.name}" has {classes} classes; there must be one for each class. Give as many, in the '
            "order of the classes."
        )


def _check_noise(config: RunConfig, net: Net, splits: Splits, partition: Partition) -> None:
    if partition.noise is None:
        return
    if not net.input_dtype.is_floating_point:
        raise CompatibilityError(
            f'scenario = "{config.scenario}" adds noise to features, and model = "{config.model.name}" takes whole '
            "numbers as they are (tokens), which noise would turn into others. Choose a scenario without feature noise."
        )
    if partition.noise.kind == "mask":
        mask(0, config.clients, tuple(splits.train.x.shape[1:]))  # refuses examples that are no images
    if splits.public_to == "everybody" and not partition.noise.redraw:
        raise CompatibilityError(
            f"{method_in_words(config)} gives the same public examples to every client, and under scenario = "
            f'"{config.scenario}" an example keeps the noise of one. Leave out redraw=false.'
        )


def _check_clients(config: RunConfig, splits: Splits, partition: Partition) -> None:
    """Refuse clients that have no example, or never a whole batch."""
    smallest = int(partition.sizes.argmin())
    if not partition.sizes[smallest]:
        raise CompatibilityError(
            f'Under scenario = "{config.scenario}" client {smallest} has no examples. Set a minimum, another seed or '
            "fewer clients."
        )
    smallest = int(splits.sizes.argmin())
    held = int(splits.sizes[smallest])
    if config.client.last_batch == "drop" and held < config.client.batch:
        raise CompatibilityError(
            f"Client {smallest} has {counted(held, 'example')}, less than one batch of {config.client.batch}"
            ', so with client.last_batch = "drop" it would never train. Use "run-on", or a smaller client.batch.'
        )


def _check_targets(config: RunConfig) -> None:
    """A refined client needs another one to take targets from; in some rounds it may have none, but not in all."""
    if config.fnr is None or config.fnr.when == "local" or not config.fnr.weight:
        return
    share, target, answer = config.fnr.share, config.fnr.target, num_answers(config)
    refined = num_refined(answer, share)
    if refined and not num_peers(answer, refined, target):
        who = "the clients that are not refined" if target == "others" else "all other clients"
        raise CompatibilityError(
            f"fnr.share = {share} refines {refined} of the {answer} that answer in a round, and fnr.target = {target} "
            f"takes targets from {who}: there are none. Set a smaller fnr.share, "
            + ("fnr.target = all, " if target == "others" and answer > 1 else "more clients, ")
            + "or fnr.weight = 0, which refines without targets."
        )
