"""From a config to the things a run is made of; whatever cannot go together is refused here."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from fnrfl.config import registry
from fnrfl.algorithms.fnr import FNR, num_peers, num_refined
from fnrfl.runs.blame import of_model
from fnrfl.config import RunConfig
from fnrfl.config.schema import PublicOptions
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.isolation import until_left
from fnrfl.core.net import Net, whole
from fnrfl.core.options import values_of
from fnrfl.data import augment, scenarios
from fnrfl.data.batches import Pool, check_fits
from fnrfl.data.datasets import Dataset, Facts, load
from fnrfl.data.partitions import Partition, draw
from fnrfl.data.reading import Expected
from fnrfl.data.splits import PublicTo, Splits, carve
from fnrfl.engines import gpu
from fnrfl.engines.base import InProcess, num_chosen
from fnrfl.engines.batched import ROWS, Batched
from fnrfl.engines.loop import Loop
from fnrfl.core.errors import CompatibilityError
from fnrfl.runs.limits import check_sizes
from fnrfl.models.build import build as build_model
from fnrfl.core.rng import generator, seeded

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.float32, "float64": torch.float64}
SMALL = 1_000_000  # parameters times batch of a dense net up to which clients step together
WORTH_RECORDING = 300  # steps of a client in a run
WORTH_CAPTURING = 100  # steps of groups of clients in a run, on a GPU
CHUNK_BYTES = 4 << 30  # what the models of clients trained together may take, eight copies each


@dataclass(frozen=True)
class Built:
    """Everything a run needs, and the config with nothing left to choose."""

    config: RunConfig
    dataset: Dataset
    partition: Partition
    splits: Splits
    algorithm: Algorithm
    net: Net
    pool: Pool
    engine: InProcess
    notices: tuple[str, ...]

    @property
    def facts(self) -> Facts:
        """What a run remembers of its data."""
        return self.dataset.facts(tokens=not self.net.input_dtype.is_floating_point)

    def noise(self, client: int, x: Tensor, stream: torch.Generator) -> Tensor:
        """A client's feature noise over a batch."""
        return feature_noise(self.partition, client, x, stream)


def build(config: RunConfig, scratch: Path | None = None) -> Built:
    """Load, draw, split, wrap and check; `scratch` is a folder for what does not fit in memory."""
    dataset = load(config.dataset)
    algorithm = build_algorithm(config)
    public = _public(config.public.source, dataset)
    partition, splits = _data(config, dataset, public, algorithm)
    net = build_net(config, dataset.input_shape, dataset.num_classes, algorithm, integers=dataset.integers)
    augment.resolve(config.client.augment, dataset.input_shape)  # refuses to crop what is no image
    _check(config, algorithm, net, splits, partition, dataset)
    _check_values(config, net, splits)
    asked, config = config.engine.name, _choose(config, net)
    if config.engine.name == "gpu":
        precision = config.engine.precision
        until_left(gpu.settings(deterministic=config.engine.deterministic, tf32=precision == "tf32"))
        net = net.copy(gpu.devices()[0], torch.bfloat16 if precision == "bf16" else net.dtype)
    noise = partition.noise
    pool = Pool(
        {
            "private": (splits.private.x, splits.private.y),
            "public": (splits.public.x, splits.public.y),
            "ranking": (splits.ranking.x, splits.ranking.y),
            "distill": (splits.distill.x, splits.distill.y),
            "validation": (splits.validation.x, splits.validation.y),
        },
        splits.clients,
        dataset.num_classes,
        dtype=net.input_dtype,
        noise=None if noise is None else lambda client, x, stream: feature_noise(partition, client, x, stream),
        redraw=noise is None or noise.redraw,
        seed=config.seed,
        device=net.device,
    )
    at_once = config.engine.clients_at_once
    on_gpu = config.engine.name == "gpu"
    threads = min(int(config.engine.threads), max(int(at_once), os.cpu_count() or 1))  # each holds a net
    engine = ENGINES[config.engine.name](
        net,
        pool,
        config.client,
        seed=config.seed,
        client_state=algorithm.client_state(net),
        clients_at_once=int(at_once),
        **_on_gpus(config) if on_gpu else {"threads": threads},
        trace=_trace(config, net, splits),
        stragglers=config.client.stragglers,
        dropout=config.client.dropout,
        nonfinite=config.client.nonfinite,
        rounds=config.rounds,
        participation=cohort_size(config) / config.clients,
        folder=scratch if int(at_once) < cohort_size(config) and not on_gpu else None,
        home=torch.device("cpu") if on_gpu and int(at_once) < config.clients else None,
    )
    unused = (*dataset.notices, *(public.notices if isinstance(public, Dataset) else ()))
    notices = (*unused, *_notices(config, splits, asked))
    return Built(config, dataset, partition, splits, algorithm, net, pool, engine, notices)


ENGINES: dict[str, Callable[..., InProcess]] = {"loop": Loop, "batched": Batched, "gpu": gpu.Gpu}


def _on_gpus(config: RunConfig) -> dict[str, object]:
    """What the GPU's engine is told beside what all are told."""
    found, asked = gpu.devices(), int(config.engine.threads)
    if len(found) < asked:
        raise CompatibilityError(
            f"engine.threads = {asked} asks for as many GPUs, and there are {len(found)}. Set it to {len(found)}."
        )
    return {"devices": found[:asked], "tf32": config.engine.precision == "tf32"}


def cohort_size(config: RunConfig) -> int:
    """How many clients are active in a round."""
    return max(1, round(config.participation * config.clients))


def cohort(config: RunConfig, t: int) -> Tensor:
    """The clients of round t, ascending."""
    order = torch.randperm(config.clients, generator=generator(config.seed, t, "cohort"))
    return order[: cohort_size(config)].sort().values


def feature_noise(partition: Partition, client: int, x: Tensor, stream: torch.Generator) -> Tensor:
    """x + (eps * M(x)) * sigma_i + mean."""
    noise = partition.noise
    assert noise is not None
    mask = None
    if noise.kind == "mask":
        mask = torch.from_numpy(scenarios.mask(client, len(partition.positions), tuple(x.shape[1:]))).to(x)
    return augment.add_noise(x, float(partition.levels[client]), noise.mean, mask, generator=stream)


def build_algorithm(config: RunConfig) -> Algorithm:
    """The method that a config names, with FNR around it if that is on."""
    inner = registry.load(config.algorithm.name)(**config.algorithm.options)
    if config.fnr is None:
        return inner
    return FNR(
        inner=inner,
        **values_of(config.fnr),
        shuffle=config.protocol != "paper",
        norm_pass_train_mode=config.leaks.norm_pass_train_mode,
    )


def _public_to(algorithm: Algorithm) -> PublicTo:
    """Who trains on public data, as the method says or the one that it goes around."""
    within = [getattr(algorithm, name, None) for name in ("inner", "method")]
    inside: list[PublicTo] = [_public_to(one) for one in within if isinstance(one, Algorithm)]
    said: PublicTo = getattr(algorithm, "public_to", inside[0] if inside else "nobody")
    return said


def _data(
    config: RunConfig, dataset: Dataset, elsewhere: Dataset | Literal["test"] | None, algorithm: Algorithm
) -> tuple[Partition, Splits]:
    """Set public and validation data aside, then partition the rest among the clients.

    `elsewhere` is public data that is not set aside. A method that has public data handed out says so in `public_to`;
    the carving and the draw are the same for all.
    """
    public, labels = config.public, dataset.train.y.numpy()
    distill = public.distill if public.distill != "auto" else 0.2 if "distill" in algorithm.needs else 0.0
    carved = carve(
        labels,
        public=public.size if public.source == "train" else 0,
        ranking=public.ranking,
        distill=distill,
        validation=config.validation.size,
        seed=config.seed,
        num_classes=dataset.num_classes,
    )
    scenario = scenarios.parse(config.scenario)
    partition = draw(scenario, labels[carved.rest], config.clients, config.seed, num_classes=dataset.num_classes)
    splits = Splits.build(
        dataset,
        carved,
        partition.positions,
        public=elsewhere,
        leak_public_is_test=config.leaks.public_is_test,
        public_to=_public_to(algorithm),
    )
    return partition, splits


def _public(source: str, dataset: Dataset) -> Dataset | Literal["test"] | None:
    """Public data that is not carved out of the training set; a table's columns are matched by name."""
    if source == "train":
        return None
    return "test" if source == "test" else load(source, expected=Expected(dataset.columns))


def build_net(
    config: RunConfig,
    input_shape: tuple[int, ...],
    num_classes: int,
    algorithm: Algorithm | None = None,
    *,
    integers: bool = False,
) -> Net:
    """The freshly initialised model that a config's method trains, for data of this shape.

    Data of `integers` is handed to it as it is if it takes that, such as tokens to an Embedding; else as its own type.
    """
    algorithm = algorithm or build_algorithm(config)
    dtype = DTYPES[config.engine.precision]
    named = None if config.model.features == "auto" else config.model.features
    with seeded(config.seed, "init"), of_model(config, f"cannot be called with examples of shape {list(input_shape)}"):
        # Two examples: a few models need more than one to compute their shapes.
        module = build_model(config.model.name, input_shape, num_classes)
        example = torch.zeros(2, *input_shape, dtype=torch.int64)
        tokens = integers and _takes(copy.deepcopy(module).to(dtype), example)
        first = example if tokens else example.float()
        module = algorithm.adapt(whole(module, first), first).to(dtype)
        example = example if tokens else example.to(dtype)
        try:
            net = Net(module, example, features=named, channels_last=config.engine.accelerate)
        except RuntimeError as error:
            if tokens or not _takes(module, example.to(torch.int64)):
                raise
            raise CompatibilityError(
                f'model = "{config.model.name}" takes whole numbers (tokens), and dataset = "{config.dataset}" has '
                "fractions. Store the examples as int64, in an .npz or from a function; a .csv always holds fractions."
            ) from error
    if net.num_logits < num_classes:
        raise CompatibilityError(
            f'model = "{config.model.name}" has {net.num_logits} outputs and dataset = "{config.dataset}" has '
            f"{num_classes} classes. Give the model at least as many outputs."
        )
    return net


@torch.no_grad()
def _takes(module: nn.Module, example: Tensor) -> bool:
    """Whether a model can be asked about such examples."""
    try:
        module.eval()(example)
    except Exception:  # a user's model may raise anything
        return False
    return True


def _check_values(config: RunConfig, net: Net, splits: Splits) -> None:
    """Numbers in the data that the model cannot take."""
    parts = {f'dataset = "{config.dataset}"': [splits.train, splits.test]}
    if config.public.source not in ("train", "test"):
        parts[f'public.source = "{config.public.source}"'] = [splits.public, splits.ranking, splits.distill]
    for what, held in parts.items():
        for part in held:
            check_fits(part.x, net.input_dtype, what)
            check_tokens(net, part.x, what)


@torch.no_grad()
def check_tokens(net: Net, x: Tensor, what: str) -> None:
    """Refuse whole numbers that a model has no place for: it is asked about the least and the largest of each input."""
    if net.input_dtype.is_floating_point or not len(x):
        return
    try:
        net.look(*net.flatten(), torch.stack([x.amin(0), x.amax(0)]).to(net.device))
    except (IndexError, RuntimeError) as error:
        raise CompatibilityError(
            f"{what} holds whole numbers from {int(x.min())} to {int(x.max())}, and the model cannot take all of them "
            f"({type(error).__name__}: {error}). Correct the data, or give its Embedding as many rows as there are "
            "tokens."
        ) from error


def _check(
    config: RunConfig, algorithm: Algorithm, net: Net, splits: Splits, partition: Partition, dataset: Dataset
) -> None:
    """What a method needs against what there is."""
    name = f"fnr around {config.algorithm.name}" if config.fnr is not None else config.algorithm.name
    if "features" in algorithm.needs and not net.has_features:
        raise CompatibilityError(
            f'{name} needs features and model = "{config.model.name}" calls no Linear layer to take them from. Name '
            "the layer whose output they are with model.features."
        )
    if "head" in algorithm.needs and not net.has_head:
        raise CompatibilityError(
            f'{name} needs a last Linear that reads the features, and model = "{config.model.name}" has none. Choose '
            "another model, or set model.features = auto."
        )
    if "batchnorm" in algorithm.needs and not net.batchnorm:
        raise CompatibilityError(
            f'{name} works on BatchNorm layers, and model = "{config.model.name}" has none. Choose a model with '
            'BatchNorm, such as "cnn(norm=batch)", or algorithm = fedavg.'
        )
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
    if "linear-optimiser" in algorithm.needs and config.client.optimizer != "sgd":
        raise CompatibilityError(
            f"{name} needs local steps that are linear in the gradients, and client.optimizer = "
            f'"{config.client.optimizer}" is not. Set client.optimizer = "sgd".'
        )
    if partition.noise is not None and not net.input_dtype.is_floating_point:
        raise CompatibilityError(
            f'scenario = "{config.scenario}" adds noise to features, and model = "{config.model.name}" takes whole '
            "numbers as they are (tokens), which noise would turn into others. Choose a scenario without feature noise."
        )
    _check_targets(config)
    check_sizes(config, net, splits)
    if partition.noise is not None and partition.noise.kind == "mask":
        scenarios.mask(0, config.clients, dataset.input_shape)  # refuses examples that are no images
    if splits.public_to == "everybody" and partition.noise is not None and not partition.noise.redraw:
        raise CompatibilityError(
            f'{name} gives the same public examples to every client, and under scenario = "{config.scenario}" an '
            "example keeps the noise of one. Leave out redraw=false."
        )
    smallest = int(partition.sizes.argmin())
    if not partition.sizes[smallest]:
        raise CompatibilityError(
            f'Under scenario = "{config.scenario}" client {smallest} has no examples. Set a minimum, another seed or '
            "fewer clients."
        )
    held, smallest = min((len(mine), client) for client, mine in enumerate(splits.clients))
    if config.client.last_batch == "drop" and held < config.client.batch:
        raise CompatibilityError(
            f"Client {smallest} has {held} examples, less than one batch of {config.client.batch}"
            ', so with client.last_batch = "drop" it would never train. Use "run-on", or a smaller client.batch.'
        )


def _num_answers(config: RunConfig) -> int:
    """How many clients of a cohort answer in a round: the replies of the others are lost."""
    asked = cohort_size(config)
    return asked - num_chosen(asked, config.client.dropout)


def _check_targets(config: RunConfig) -> None:
    """A refined client needs another one to take targets from; in some rounds it may have none, but not in all."""
    if config.fnr is None or config.fnr.when == "local" or not config.fnr.weight:
        return
    share, target, answer = config.fnr.share, config.fnr.target, _num_answers(config)
    refined = num_refined(answer, share)
    if refined and not num_peers(answer, refined, target):
        who = "the clients that are not refined" if target == "others" else "all other clients"
        raise CompatibilityError(
            f"fnr.share = {share} refines {refined} of the {answer} that answer in a round, and fnr.target = {target} "
            f"takes targets from {who}: there are none. Set a smaller fnr.share, "
            + ("fnr.target = all, " if target == "others" and answer > 1 else "more clients, ")
            + "or fnr.weight = 0, which refines without targets."
        )


def _choose(config: RunConfig, net: Net) -> RunConfig:
    """What `auto` stands for: a fixed rule of model, machine and cohort, never a stopwatch, so that runs repeat."""
    engine, cohort = config.engine, cohort_size(config)
    name = engine.name
    if name == "auto":  # stepping together pays where a step is so small that its overhead dominates
        small = not net.convolutional and net.size * config.client.batch <= SMALL
        name = "batched" if small and cohort > 1 else "gpu" if torch.cuda.is_available() and not small else "loop"
    if name == "gpu":
        found = len(gpu.devices())
    elif engine.precision in ("tf32", "bf16"):
        raise CompatibilityError(
            f'engine.precision = "{engine.precision}" needs a GPU, and engine.name = "{name}" runs on the CPU. Set '
            'engine.precision = "float32" or "float64".'
        )
    threads = engine.threads
    if threads == "auto":
        threads = max(1, min(cohort, found if name == "gpu" else os.cpu_count() or 1))
    at_once = engine.clients_at_once
    if at_once == "auto" and name == "gpu":
        at_once = gpu.clients_at_once(net.size, net.dtype.itemsize, cohort)
    elif at_once == "auto":
        at_once = max(int(threads), min(cohort, CHUNK_BYTES // (8 * 4 * net.size)))
    return config.replace(
        {"engine": {"name": name, "threads": int(threads), "clients_at_once": min(cohort, int(at_once))}}
    )


def _trace(config: RunConfig, net: Net, splits: Splits) -> bool:
    """Whether steps are recorded: recording one takes as long as some hundred steps, and large steps gain nothing."""
    steps = config.rounds * -(-config.client.epochs * max(map(len, splits.clients)) // config.client.batch)
    if config.engine.name == "gpu":
        pays = steps * -(-cohort_size(config) // ROWS) >= WORTH_CAPTURING
    else:
        pays = not net.convolutional and steps >= WORTH_RECORDING
    return config.engine.accelerate and pays


def _notices(config: RunConfig, splits: Splits, asked: str) -> tuple[str, ...]:
    """What a user should know once, before the first round; `asked` is the engine that was asked for."""
    said = []
    if asked == "auto" and config.engine.name == "loop" and not torch.cuda.is_available():
        said.append("engine = auto found no GPU and runs on the CPU.")
    size = config.public.size
    if config.public.source != "train" and size != PublicOptions.size:
        said.append(
            f'public.size = {size} is not used: all of public.source = "{config.public.source}" is public. '
            'It says how much is set aside with public.source = "train".'
        )
    cohort = _num_answers(config)
    if config.fnr is not None and not num_refined(cohort, config.fnr.share):
        whom = "a cohort of" if cohort == cohort_size(config) else "those that answer,"
        said.append(f"fnr.share = {config.fnr.share} of {whom} {cohort} is nobody: no client will be refined.")
    if config.fnr is not None and splits.public_to != "nobody":
        said.append(f"with {config.algorithm.name}, FNR ranks and refines on examples that clients have trained on.")
    return tuple(said)
