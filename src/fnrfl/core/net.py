"""An nn.Module as a pure function of flat parameters and named buffers."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fnrfl.core import masks
from fnrfl.core.errors import CompatibilityError, gpu_out_of_memory, out_of_memory
from fnrfl.core.fingerprint import fingerprint
from fnrfl.core.modules import (
    InputScale,
    ProjectionHead,
    batchnorm_names,
    has_tied_weights,
    last_linear,
    mask_shapes,
    named_layer,
    refuse_random,
    whole,
)
from fnrfl.core.trees import Tree, prefixed
from fnrfl.core.values import Flat, Out, Shapes, State
from fnrfl.core.words import INPUT_SCALE
from fnrfl.kernels.layers import leaving_padding_out, share_kernels


class Net:
    """A classifier as a function: `apply(params, buffers, x)` gives features and logits.

    The features are the output of the layer named by `features` (or by the module's own `feature_layer`), else the
    input of the projection head, else the input of the Linear that is called last. A module without any has no
    features. The module is used by one thread at a time; `copy` makes another.

    With `channels_last`, the flat vector holds 4-d weights as [out, height, width, in], the order in which CPUs and
    GPUs convolve fastest; names, values and everything that leaves the net stay as they are.
    """

    plain: Net | None  # the same with a module's own layers, for one model at a time; None: these are they
    input_scale: InputScale | None  # what scales the inputs in front of the module; see `dataset.scale`
    compute: torch.dtype | None  # if given: the type of all arithmetic but BatchNorm's, on copies of the parameters

    def __init__(
        self,
        module: nn.Module,
        example: Tensor,
        *,
        features: str | None = None,
        own_random: bool = False,
        channels_last: bool = False,
        autocast: bool = False,
    ) -> None:
        """`own_random` leaves random layers as they are, drawing from torch's global stream: for a user's own loop.

        `autocast` has operators bring types together where layers compute in another: for modules that make tensors.
        """
        self.module = whole(module, example)
        self.input_shape, self.input_dtype = tuple(example.shape[1:]), example.dtype
        self.drop_shapes: Shapes = {}
        self._masks: dict[frozenset[str], Tensor] = {}
        if not own_random:
            masks.put_in(module)
        trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not trainable:
            raise CompatibilityError("The model has no trainable parameters. Give it some, or set requires_grad.")
        self.shapes = {n: p.shape for n, p in trainable}
        self.sizes = [p.numel() for _, p in trainable]
        self.size = sum(self.sizes)
        self.convolutional = any(len(shape) == 4 for shape in self.shapes.values())
        self.channels_last = channels_last and self.convolutional
        self.dtype, self.device, self.compute = trainable[0][1].dtype, trainable[0][1].device, None
        self.plain, self.input_scale = None, None
        self.classifier = last_linear(module, example)
        self.projection_head = next((n for n, m in module.named_modules() if isinstance(m, ProjectionHead)), None)
        self.feature_layer = named_layer(module, features or getattr(module, "feature_layer", None))
        self.batchnorm = batchnorm_names(module)
        if not own_random:
            self.drop_shapes = mask_shapes(module, example)
            refuse_random(module, example, self.drop_shapes)
        self._buffers = [n for n, _ in module.named_buffers() if n not in self.drop_shapes]
        self._ties_weights = has_tied_weights(module)
        self._mixes_types = self._finds_mixed_types(autocast)
        out = self._first_answer(example)
        self.num_features, self.num_logits = out.features.shape[1], out.logits.shape[1]

    @torch.no_grad()
    def _first_answer(self, example: Tensor) -> Out:
        """What the net says to an example; a module that asks for `view`s as torch's usual order has them gets it."""
        try:
            return self.eval_forward(*self.flatten(), self.laid_out(example))
        except RuntimeError as error:
            if not self.channels_last or out_of_memory(error):
                raise
        self.channels_last = False
        return self.eval_forward(*self.flatten(), example)

    def _finds_mixed_types(self, asked: bool) -> bool:
        """Whether a parameter is not trained, or a floating buffer is not BatchNorm's; or what was asked for."""
        buffers = {name: buffer for name, buffer in self.module.named_buffers() if name in self._buffers}
        known = self.batchnorm | self.shapes.keys()
        every = dict(self.module.named_parameters()) | buffers
        return asked or any(tensor.is_floating_point() for name, tensor in every.items() if name not in known)

    @property
    def has_head(self) -> bool:
        """Whether logits are one Linear of the features."""
        plain = self.classifier is not None and self.feature_layer is None and self.projection_head is None
        return plain and f"{self.classifier}.weight" in self.shapes

    @property
    def head_slice(self) -> slice:
        """Where the head's parameters are in the flat vector."""
        places = [i for i, name in enumerate(self.shapes) if name.rpartition(".")[0] == self.classifier]
        first = sum(self.sizes[: places[0]])
        return slice(first, first + sum(self.sizes[i] for i in places))

    def head(self, head: Flat, features: Tensor) -> Tensor:
        """Logits of features; `head` is `params[net.head_slice]`."""
        shape = self.shapes[f"{self.classifier}.weight"]
        weight, bias = head[: shape[0] * shape[1]].view(shape), head[shape[0] * shape[1] :]
        return nn.functional.linear(features, weight, bias if len(bias) else None)

    def mask(self, names: Set[str]) -> Tensor:
        """Which entries of the flat vector belong to some parameters, [P]."""
        key = frozenset(names)
        if key not in self._masks:  # kept: a recorded step refers to it
            ones = [torch.full((n,), name in names) for name, n in zip(self.shapes, self.sizes, strict=True)]
            self._masks[key] = torch.cat(ones).to(self.device)
        return self._masks[key]

    def zeros(self) -> Flat:
        """A flat vector of zeros."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    @property
    def has_features(self) -> bool:
        """Whether there is a layer to take features from."""
        return bool(self.feature_layer or self.projection_head or self.classifier)

    def copy(self, device: torch.device | None = None, *, compute: torch.dtype | None = None) -> Net:
        """The same net around a module of its own, on a device if one is given: two threads must never share one."""
        other = copy.copy(self)
        other.module, other._masks = copy.deepcopy(self.module).to(device or self.device), {}
        other.input_scale = self.input_scale and copy.deepcopy(self.input_scale).to(device or self.device)
        other.device, other.compute = next(other.module.parameters()).device, compute or self.compute
        other.plain = None if self.plain is None else self.plain.copy(device, compute=compute)
        return other

    def with_shared_kernels(self) -> Net:
        """The same net, whose layers let the clients of a `vmap` share kernels; `eval_forward` is of one model."""
        other = self.copy()
        other.plain = other.plain or self.copy()
        share_kernels(other.module, channels_last=self.channels_last)
        return other

    def with_input_scale(self, scale: InputScale) -> Net:
        """The same net, which scales its inputs first. A method does not notice: nothing of it is trained or sent."""
        if INPUT_SCALE in dict(self.module.named_children()):
            raise CompatibilityError(
                f'The model has a layer called {INPUT_SCALE}, and dataset.scale = "standard" and dataset.missing = '
                '"mean" add one of this name. Rename the layer, or set other values.'
            )
        other = self.copy()
        other.input_scale = scale.to(self.device)
        other.plain = None if other.plain is None else other.plain.with_input_scale(scale)
        return other

    @property
    def scale(self) -> Tree:
        """What inputs are scaled by: a mean and a std, and what missing ones are filled in with; or nothing."""
        return {} if self.input_scale is None else dict(self.input_scale.named_buffers())

    def scaling_by(self, scale: Tree) -> Net:
        """The same net around the same module, scaling inputs by these tensors; itself if there are none."""
        if not scale:
            return self
        other = copy.copy(self)
        other.input_scale = InputScale(**scale)
        return other

    def fingerprint(self) -> Hashable:
        """What the net computes, as a value: nets with equal ones and the same `scale` do the same with tensors."""
        scale = tuple((name, tensor.shape) for name, tensor in self.scale.items())  # a step is handed the numbers
        types = self.dtype, self.compute, self._mixes_types
        return fingerprint(self.module), *types, self.channels_last, self.feature_layer, scale

    def flatten(self) -> tuple[Flat, Tree]:
        """The module's present parameters as one vector, and its buffers."""
        parameters = dict(self.module.named_parameters())
        buffers = dict(self.module.named_buffers())
        return self._flat(parameters), {n: buffers[n].detach().clone() for n in self._buffers}

    def unflatten(self, flat: Flat) -> Tree:
        """Named views of a flat vector."""
        parts = flat.split(self.sizes)
        return {n: self._view(part, shape) for (n, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def named(self, params: Flat, buffers: Tree) -> Tree:
        """A whole model by name: parameters, buffers, and what scales its inputs."""
        return self.unflatten(params) | buffers | prefixed(INPUT_SCALE, self.scale)

    def pack(self, named: Tree) -> tuple[Flat, Tree]:
        """The inverse of naming: parameters and buffers by name as a flat vector and buffers."""
        buffers = dict(self.module.named_buffers())
        wanted = {k: tuple(v) for k, v in self.shapes.items()} | {n: tuple(buffers[n].shape) for n in self._buffers}
        for name, shape in wanted.items():
            found = tuple(named[name].shape) if name in named else None
            if found != shape:
                raise CompatibilityError(
                    f"The weights have {'no ' + name if found is None else f'{name} of shape {list(found)}'}, and the "
                    f"model needs it with shape {list(shape)}. They belong to another model; put the file back as it "
                    "was, or the model's code."
                )
        return self._flat(named), {n: named[n] for n in self._buffers}

    def _flat(self, named: Mapping[str, Tensor]) -> Flat:
        last = lambda v: v.permute(0, 2, 3, 1) if self.channels_last and v.ndim == 4 else v  # noqa: E731
        return torch.cat([last(named[n].detach()).reshape(-1) for n in self.shapes])

    def _view(self, part: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not (self.channels_last and len(shape) == 4):
            return part.view(shape)
        out, into, height, width = shape
        return part.view(out, height, width, into).permute(0, 3, 1, 2)

    def laid_out(self, x: Tensor) -> Tensor:
        """A batch in the memory order that the weights have."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.ndim == 4 else x

    def export(self, params: Flat, buffers: Tree) -> nn.Module:
        """An ordinary module with these weights; if inputs are scaled, its first layer does that."""
        module = copy.deepcopy(self.module)
        masks.take_out(module)
        module.load_state_dict(self.unflatten(params) | buffers, strict=False)
        if self.input_scale is not None:
            module = nn.Sequential(OrderedDict({INPUT_SCALE: copy.deepcopy(self.input_scale), "model": module}))
        return module.cpu().eval()

    def apply(
        self,
        params: Flat,
        buffers: Tree,
        x: Tensor,
        *,
        mode: Literal["updating", "batch", "frozen"],
        masks: Tree | None = None,
        real: Tensor | None = None,
    ) -> tuple[Out, Tree]:
        """One forward pass, and the buffers after it; the caller's buffers stay as they are.

        updating: train mode; batch: train mode, buffers as before; frozen: eval mode. `real` says which rows of x are
        examples and which are padding, for nets that take it.
        """
        train = mode != "frozen"
        if self.module.training != train:
            self.module.train(train)
        new = {k: v.clone() for k, v in buffers.items()}  # BatchNorm writes in place
        used = new | {k: masks[k] for k in self.drop_shapes} if train and masks else new
        weights = self.unflatten(params)
        x = x if self.input_scale is None else self.input_scale(x)
        if self.compute is not None:
            x = x.to(self.compute) if x.is_floating_point() and not self._mixes_types else x
            # Copies even where the type stays: they begin at round addresses, and those of many clients are one block.
            type_of = lambda name: self.dtype if name in self.batchnorm else self.compute  # noqa: E731
            weights = {k: v.to(type_of(k), copy=True) for k, v in weights.items()}
        with self._captured() as seen, self._mixed(), leaving_padding_out(self.module, real):
            logits = functional_call(self.module, {**weights, **used}, (x,), tie_weights=self._ties_weights)
        logits = logits.to(self.dtype)
        features = seen["features"].flatten(1).to(self.dtype) if "features" in seen else logits[:, :0]
        projection = seen["projection"].to(self.dtype) if "projection" in seen else features
        return Out(features, logits, projection), new if mode == "updating" else buffers

    def eval_forward(self, params: Flat, buffers: Tree, x: Tensor) -> Out:
        """A forward pass in eval mode; what does not fit in memory at once is looked at in halves."""
        try:
            return (self.plain or self).apply(params, buffers, x, mode="frozen")[0]
        except RuntimeError as error:
            if len(x) == 1 or not gpu_out_of_memory(error):
                raise
        # The failed attempt's tensors are gone.
        halves = [self.eval_forward(params, buffers, half) for half in x.chunk(2)]
        return Out(*(torch.cat([getattr(half, f.name) for half in halves]) for f in fields(Out)))

    def _mixed(self) -> AbstractContextManager[object]:
        """Layers that are not trained, and a module's own tensors, keep their type: operators bring types together."""
        if self.compute in (None, self.dtype) or not self._mixes_types:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute, cache_enabled=False)

    @contextmanager
    def _captured(self) -> Iterator[Tree]:
        """Collect features and projection during a forward pass. Hooks live no longer than it does."""
        seen: Tree = {}
        hooks, layer = [], self.module.get_submodule
        if self.feature_layer is not None:
            features = layer(self.feature_layer)
            hooks.append(features.register_forward_hook(lambda _, args, out: seen.update(features=out)))
        elif (name := self.projection_head or self.classifier) is not None:
            hooks.append(layer(name).register_forward_pre_hook(lambda _, args: seen.update(features=args[0])))
        if self.projection_head is not None:
            projection = layer(f"{self.projection_head}.project")
            hooks.append(projection.register_forward_hook(lambda _, args, out: seen.update(projection=out)))
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()


@dataclass
class Model:
    """The net of one client during one step: what an objective is handed."""

    net: Net
    start: State  # the model that the client received, or held
    buffers: Tree  # the client's own, renewed by each training forward pass
    masks: Tree
    mode: Literal["updating", "batch", "frozen"]
    real: Tensor | None = None  # which rows of a batch are examples; None: all

    def __call__(self, params: Flat, x: Tensor) -> Out:
        """The training forward pass."""
        out, self.buffers = self.net.apply(params, self.buffers, x, mode=self.mode, masks=self.masks, real=self.real)
        return out

    def frozen(self, other: State, x: Tensor) -> Out:
        """Another model's answer: eval mode, its own buffers, no gradient."""
        return self.net.apply(other.params.detach(), other.buffers, x, mode="frozen", real=self.real)[0]
