"""The convolutions of `triton.py` for GPUs of compute capability 9: tiles are loaded by tensor descriptors.

They take the same arguments and give the same sums, for channels that 64 divides, and for pictures whose sides are
powers of two and become `stride` times smaller. Tiles and parts are again a rule of the shapes alone: every such GPU
counts as one with as many multiprocessors as that of the measurements, so its model does not change results.

A descriptor has activations as five axes, [batch, height / STRIDE, STRIDE, width / STRIDE, STRIDE * M * C]: pixels that
are STRIDE apart are neighbours. What lies outside of a picture is read as zero and not written, without masks. A tile
is BB pictures, BR rows and BC columns. Products are channels times pixels, so that both factors go from shared memory
to the tensor cores. A factor must not go through registers: such a kernel with eight warps did not repeat its sums.
"""

# mypy: disable-error-code="no-any-return, no-untyped-def, no-untyped-call, misc, untyped-decorator"
from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor
from triton.tools.tensor_descriptor import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    TensorDescriptor,
)

from fnrfl.kernels.triton import add_parts, channels_last, new_activations

MULTIPROCESSORS = 132
TILES = ((128, 128), (128, 64), (64, 64))  # pixels and output channels of a program
LOADING = 64  # what a pixel or a channel of a tile costs, if a number of its product costs one


@triton.jit
def _place(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BB: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """The first picture, row and column of a tile."""
    down: tl.constexpr = (ROWS + BR - 1) // BR
    across: tl.constexpr = (COLUMNS + BC - 1) // BC
    return tile // (down * across) * BB, tile // across % down * BR, tile % across * BC


@triton.jit
def _moved(
    x, picture, row, column, tap, channel, MC, SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The tile of x that a tap sees, [BP, BK]."""
    top, left = tap // SIDE + PAD * (STRIDE - 1), tap % SIDE + PAD * (STRIDE - 1)  # PAD * STRIDE more: not below zero
    at = [picture, row + top // STRIDE - PAD, top % STRIDE, column + left // STRIDE - PAD, left % STRIDE * MC + channel]
    return tl.reshape(x.load(at), (BP, BK))


@triton.jit(do_not_specialize=["M"])
def _convolve(
    x, w, y, M, C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, BB: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """As in `triton.py`; w is [M * N, taps * C] and y is [batch, ROWS, 1, COLUMNS, M * N]."""
    m, n = tl.program_id(1), (tl.program_id(0) % (N // BN)) * BN
    picture, row, column = _place(tl.program_id(0) // (N // BN), ROWS, COLUMNS, BB, BR, BC)
    BP: tl.constexpr = BB * BR * BC
    acc = tl.zeros((BN, BP), dtype=tl.float32)
    for step in range(SIDE * SIDE * (C // BK)):
        tap, c = step // (C // BK), (step % (C // BK)) * BK
        a = _moved(x, picture, row, column, tap, m * C + c, M * C, SIDE, STRIDE, PAD, BP, BK)
        acc = tl.dot(w.load([m * N + n, tap * C + c]), a.T, acc)
    y.store([picture, row, 0, column, m * N + n], tl.reshape(acc.to(y.dtype).T, (BB, BR, 1, BC, BN)))


@triton.jit(do_not_specialize=["M"])
def _convolve_back(
    dy, w, dx, M, C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, BB: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """As in `triton.py`; w is [M * C, taps * N] and dx is [batch, ROWS, STRIDE, COLUMNS, STRIDE * M * N]."""
    m, n = tl.program_id(1), (tl.program_id(0) % (N // BN)) * BN
    phase_row, phase_column = tl.program_id(2) // STRIDE, tl.program_id(2) % STRIDE
    first_row, first_column = (phase_row + PAD) % STRIDE, (phase_column + PAD) % STRIDE
    tap_rows, tap_columns = tl.cdiv(SIDE - first_row, STRIDE), tl.cdiv(SIDE - first_column, STRIDE)
    picture, row, column = _place(tl.program_id(0) // (N // BN), ROWS, COLUMNS, BB, BR, BC)
    BP: tl.constexpr = BB * BR * BC
    acc = tl.zeros((BN, BP), dtype=tl.float32)
    for step in range(tap_rows * tap_columns * (C // BK)):
        tap, c = step // (C // BK), (step % (C // BK)) * BK
        tap_row, tap_column = tap // tap_columns, tap % tap_columns
        top, left = row + (phase_row + PAD) // STRIDE - tap_row, column + (phase_column + PAD) // STRIDE - tap_column
        a = tl.reshape(dy.load([picture, top, 0, left, m * C + c]), (BP, BK))
        number = (first_row + STRIDE * tap_row) * SIDE + first_column + STRIDE * tap_column
        acc = tl.dot(w.load([m * C + c, number * N + n]).T, a.T, acc)
    out = tl.reshape(acc.to(dx.dtype).T, (BB, BR, 1, BC, BN))
    dx.store([picture, row, phase_row, column, (phase_column * M + m) * N + n], out)


@triton.jit(do_not_specialize=["M", "TILES"])
def _weigh(
    x, dy, dw, M, TILES, C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BB: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """As in `triton.py`; dy is [pixels, M * N], since the pixels of a tile follow each other in it."""
    m, part = tl.program_id(1), tl.program_id(2)
    blocks: tl.constexpr = SIDE * SIDE * (C // BK)
    n, block = (tl.program_id(0) // blocks) * BN, tl.program_id(0) % blocks
    tap, c = block // (C // BK), block % (C // BK) * BK
    BP: tl.constexpr = BB * BR * BC
    acc = tl.zeros((BN, BK), dtype=tl.float32)
    for tile in range(part * TILES, (part + 1) * TILES):
        picture, row, column = _place(tile, ROWS, COLUMNS, BB, BR, BC)
        a = _moved(x, picture, row, column, tap, m * C + c, M * C, SIDE, STRIDE, PAD, BP, BK)
        acc = tl.dot(dy.load([tile * BP, m * N + n]).T, a, acc)
    to = dw + ((part * M + m) * N + n + tl.arange(0, BN))[:, None] * (SIDE * SIDE * C)
    tl.store(to + (tap * C + c + tl.arange(0, BK))[None, :], acc.to(dw.dtype.element_ty))


def convolve(x: Tensor, w: Tensor, stride: int, pad: int) -> Tensor:
    """Outputs of all clients, [batch, clients * out, rows, columns]."""
    (clients, out, into, side, _), (batch, _, height, width) = w.shape, x.shape
    rows, columns = height // stride, width // stride
    y = new_activations(x, batch, clients * out, rows, columns)
    pixels, block, summed, stages = _tile((batch, rows, columns), into, out, clients)
    box = _box(pixels, rows, columns)
    _convolve[_tiles(batch, rows, columns, box) * (out // block), clients](
        _activations(_aligned(x), stride, box, summed), _matrix(_aligned(w), clients * out, block, summed),
        _activations(y.movedim(1, -1), 1, box, block), clients, into, out, rows, columns, side, stride, pad, *box,
        summed, block, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return y


def convolve_back(dy: Tensor, w: Tensor, stride: int, pad: int, height: int, width: int) -> Tensor:
    """The gradient of the inputs, [batch, clients * in, height, width]."""
    (clients, out, into, side, _), (batch, _, rows, columns) = w.shape, dy.shape
    dx = new_activations(dy, batch, clients * into, height, width)
    pixels, block, summed, stages = _tile((batch, rows, columns), out, into, clients * stride**2)
    box = _box(pixels, rows, columns)
    _convolve_back[_tiles(batch, rows, columns, box) * (into // block), clients, stride**2](
        _activations(_aligned(dy), 1, box, summed), _matrix(_aligned(w), clients * out, summed, block),
        _activations(dx.movedim(1, -1), stride, box, block), clients, out, into, rows, columns, side, stride, pad, *box,
        summed, block, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return dx


def weigh(x: Tensor, dy: Tensor, side: int, clients: int, stride: int, pad: int) -> Tensor:
    """The gradient of the weights, [clients, out, in, side, side]."""
    batch, _, rows, columns = dy.shape
    into, out = x.shape[1] // clients, dy.shape[1] // clients
    pixels, block, stages, parts = _split((batch, rows, columns), into, out, side, clients)
    box = _box(pixels, rows, columns)
    dw = x.new_empty(parts, clients, out, side, side, into, dtype=torch.float32 if parts > 1 else x.dtype)
    _weigh[side**2 * (into // block) * (out // block), clients, parts](
        _activations(_aligned(x), stride, box, block), _matrix(_aligned(dy), batch * rows * columns, pixels, block), dw,
        clients, triton.cdiv(_tiles(batch, rows, columns, box), parts), into, out, rows, columns, side, stride, pad,
        *box, block, block, num_warps=8 if block == 128 else 4, num_stages=stages,
    )  # fmt: skip
    return add_parts(dw, x.dtype)


def _tile(pictures: tuple[int, int, int], summed: int, channels: int, copies: int) -> tuple[int, int, int, int]:
    """Pixels and channels of a program's tile, channels summed at a time, stages of loads.

    The tile is the cheapest by its rounds on the GPU, its product and its loads. A program that has a multiprocessor to
    itself loads further ahead.
    """

    def rounds(pixels: int, block: int) -> int:
        programs = _tiles(*pictures, _box(pixels, *pictures[1:])) * (channels // block) * copies
        return triton.cdiv(programs, MULTIPROCESSORS)

    def cost(tile: tuple[int, int]) -> int:
        pixels, block = tile
        return rounds(*tile) * (pixels * block + LOADING * (pixels + block))

    pixels, block = min((tile for tile in TILES if channels % tile[1] == 0), key=cost)
    if pixels == 64:
        return pixels, block, 128 if summed % 128 == 0 else 64, 4
    return pixels, block, 64, 6 if block == 64 and rounds(pixels, block) == 1 else 3


def _split(pictures: tuple[int, int, int], into: int, out: int, side: int, clients: int) -> tuple[int, int, int, int]:
    """Of the gradient of weights: pixels added at a time, channels of a block, stages of loads, parts of the sum."""
    wide = side > 1 and into % 128 == 0 and out % 128 == 0
    block = 128 if wide else 64
    programs = side**2 * (into // block) * (out // block) * clients

    def parts_of(pixels: int, at_once: int) -> tuple[int, int]:
        """Parts so that so many programs are on a multiprocessor, and how many tiles there are for each."""
        tiles = _tiles(*pictures, _box(pixels, *pictures[1:]))
        parts = max(1, min(MULTIPROCESSORS * at_once // programs, tiles // 4))
        return parts, tiles // parts

    if wide:
        parts, tiles = parts_of(64, 1)
        alone = triton.cdiv(programs * parts, MULTIPROCESSORS) in (1, 3) and tiles > 32
        return 64, block, 6 if alone else 3, parts  # with three stages two programs share a multiprocessor
    fills = MULTIPROCESSORS // programs * programs >= 0.9 * MULTIPROCESSORS
    return (128, block, 4, parts_of(128, 1)[0]) if fills else (64, block, 4, parts_of(64, 3)[0])


def _box(pixels: int, rows: int, columns: int) -> tuple[int, int, int]:
    """Pictures, rows and columns of a tile: pixels that follow each other in memory."""
    across = min(columns, pixels)
    down = min(rows, pixels // across)
    return pixels // (across * down), down, across


def _tiles(batch: int, rows: int, columns: int, box: tuple[int, int, int]) -> int:
    return triton.cdiv(batch, box[0]) * (rows // box[1]) * (columns // box[2])


def _aligned(t: Tensor) -> Tensor:
    """The same tensor with its channels last, at an address that a descriptor can have."""
    t = channels_last(t)
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _activations(t: Tensor, stride: int, box: tuple[int, int, int], channels: int) -> TensorDescriptor:
    """A descriptor of [batch, height, width, channels of all clients]."""
    batch, height, width, wide = t.shape
    line = width * wide
    shape = [batch, height // stride, stride, width // stride, stride * wide]
    strides = [height * line, stride * line, line, stride * wide, 1]
    return TensorDescriptor(t, shape, strides, [box[0], box[1], 1, box[2], channels])


def _matrix(t: Tensor, length: int, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of [length, everything else]."""
    return TensorDescriptor.from_tensor(t.view(length, -1), [rows, columns])
