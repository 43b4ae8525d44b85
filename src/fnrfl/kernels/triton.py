"""Convolutions of many clients at once, each with weights of its own: kernels for GPUs, written in Triton.

A library's grouped convolutions are found by stopwatch, and those that repeat to the bit can be thirty times as slow as
the others. These are chosen by a rule of the shapes alone, add in a fixed order, and need no search.

Activations are [batch, clients * channels, height, width] with channels last in memory; weights are [clients, out, in,
side, side] with `in` last in memory. A program computes a tile of one client: pixels times channels, or of weights.
In kernels, sizes of layers are compiled in; M is the number of clients, and BP, BK, BN are a tile's pixels, summed
channels and output channels. FLAT: taps and summed channels are one axis, since channels alone do not fill its blocks.
Output channels that are too many in a block read the channels of the first ones again, and are not stored.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

PROGRAMS = 256  # keep a large GPU busy: tiles are halved, and sums are split, until there are so many
TILE = 64  # pixels that the gradient of weights adds up at a time
NARROWEST = 16  # channels of a block: a matrix product of the hardware has no shorter side
MANY_PARTS = 32  # to add more of them one after the other takes longer than torch, which needs two kernels
FLAT_BLOCK = 32  # taps and channels that are summed at a time where they are one axis (FLAT)


@triton.jit
def _is_inside(row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    return (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)


@triton.jit
def _wrapped(n, N: tl.constexpr, BN: tl.constexpr):
    if N % BN == 0:
        return n
    else:
        return n % N


@triton.jit
def _store(to, acc, real, n, N: tl.constexpr, BN: tl.constexpr):
    if N % BN == 0:
        tl.store(to, acc.to(to.dtype.element_ty), mask=real[:, None])
    else:
        tl.store(to, acc.to(to.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M", "PIXELS"])
def _convolve(
    x, w, y, M, PIXELS, C: tl.constexpr, N: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, FLAT: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y[pixel, n] = sum over taps and c of x[the pixel moved by the tap, c] * w[n, tap, c].

    x is [batch, HEIGHT, WIDTH, M, C] and y is [batch, ROWS, COLUMNS, M, N].
    """
    m = tl.program_id(1)
    n = (tl.program_id(0) % tl.cdiv(N, BN)) * BN + tl.arange(0, BN)
    pixel = (tl.program_id(0) // tl.cdiv(N, BN)) * BP + tl.arange(0, BP)
    real, k = pixel < PIXELS, tl.arange(0, BK)
    top, left = (pixel // COLUMNS % ROWS) * STRIDE - PAD, (pixel % COLUMNS) * STRIDE - PAD
    corner = ((pixel // (ROWS * COLUMNS) * HEIGHT + top) * WIDTH + left) * (M * C) + m * C
    acc = tl.zeros((BP, BN), dtype=tl.float32)
    for step in range(tl.cdiv(SIDE * SIDE * C, BK)):
        at = step * BK + k
        weights = w + (m * N + _wrapped(n, N, BN))[None, :] * (SIDE * SIDE * C) + at[:, None]
        if FLAT:
            tap, some = at // C, at < SIDE * SIDE * C
            place = corner[:, None] + ((tap // SIDE * WIDTH + tap % SIDE) * (M * C) + at % C)[None, :]
            inside = _is_inside(top[:, None] + tap // SIDE, left[:, None] + tap % SIDE, HEIGHT, WIDTH) & some[None, :]
            a = tl.load(x + place, mask=inside & real[:, None], other=0.0)
            b = tl.load(weights, mask=some[:, None], other=0.0)
        else:
            tap = step // (C // BK)
            place = corner + (tap // SIDE * WIDTH + tap % SIDE) * (M * C) + (step % (C // BK)) * BK
            inside = _is_inside(top + tap // SIDE, left + tap % SIDE, HEIGHT, WIDTH) & real
            a = tl.load(x + place[:, None] + k[None, :], mask=inside[:, None], other=0.0)
            b = tl.load(weights)
        acc = tl.dot(a, b, acc)
    _store(y + pixel[:, None] * (M * N) + (m * N + n)[None, :], acc, real, n, N, BN)


@triton.jit(do_not_specialize=["M", "PIXELS"])
def _convolve_back(
    dy, w, dx, M, PIXELS, C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    FLAT: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dx[pixel, n] = sum over taps and c of dy[the pixel moved back by the tap, c] * w[c, tap, n].

    dy is [batch, ROWS, COLUMNS, M, C] and dx is [batch, HEIGHT, WIDTH, M, N]. A program has the pixels of one phase,
    that is row % STRIDE and column % STRIDE: the same taps reach them, every STRIDE-th one from a first one on.
    """
    m = tl.program_id(1)
    phase_row, phase_column = tl.program_id(2) // STRIDE, tl.program_id(2) % STRIDE
    first_row, first_column = (phase_row + PAD) % STRIDE, (phase_column + PAD) % STRIDE
    tap_rows, tap_columns = tl.cdiv(SIDE - first_row, STRIDE), tl.cdiv(SIDE - first_column, STRIDE)
    n = (tl.program_id(0) % tl.cdiv(N, BN)) * BN + tl.arange(0, BN)
    pixel = (tl.program_id(0) // tl.cdiv(N, BN)) * BP + tl.arange(0, BP)
    real, k = pixel < PIXELS, tl.arange(0, BK)
    rows: tl.constexpr = HEIGHT // STRIDE
    columns: tl.constexpr = WIDTH // STRIDE
    picture, row, column = pixel // (rows * columns), pixel // columns % rows, pixel % columns
    top, left = row + (phase_row + PAD) // STRIDE, column + (phase_column + PAD) // STRIDE
    corner = ((picture * ROWS + top) * COLUMNS + left) * (M * C) + m * C
    acc = tl.zeros((BP, BN), dtype=tl.float32)
    for step in range(tl.cdiv(tap_rows * tap_columns * C, BK)):
        if FLAT:
            tap, c, some = (step * BK + k) // C, (step * BK + k) % C, step * BK + k < tap_rows * tap_columns * C
            tap_row, tap_column = tap // tap_columns, tap % tap_columns
            place = corner[:, None] + (c - (tap_row * COLUMNS + tap_column) * (M * C))[None, :]
            inside = _is_inside(top[:, None] - tap_row, left[:, None] - tap_column, ROWS, COLUMNS) & some[None, :]
            a = tl.load(dy + place, mask=inside & real[:, None], other=0.0)
        else:
            tap, c = step // (C // BK), (step % (C // BK)) * BK + k
            tap_row, tap_column = tap // tap_columns, tap % tap_columns
            place = corner - (tap_row * COLUMNS + tap_column) * (M * C)
            inside = _is_inside(top - tap_row, left - tap_column, ROWS, COLUMNS) & real
            a = tl.load(dy + place[:, None] + c[None, :], mask=inside[:, None], other=0.0)
        number = (first_row + STRIDE * tap_row) * SIDE + first_column + STRIDE * tap_column
        weights = w + ((m * C + c) * (SIDE * SIDE * N) + number * N)[:, None] + _wrapped(n, N, BN)[None, :]
        b = tl.load(weights, mask=some[:, None], other=0.0) if FLAT else tl.load(weights)
        acc = tl.dot(a, b, acc)
    out = (picture * HEIGHT + row * STRIDE + phase_row) * WIDTH + column * STRIDE + phase_column
    _store(dx + out[:, None] * (M * N) + (m * N + n)[None, :], acc, real, n, N, BN)


@triton.jit(do_not_specialize=["M", "PIXELS", "TILES"])
def _weigh(
    x, dy, dw, M, PIXELS, TILES, C: tl.constexpr, N: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    FLAT: tl.constexpr, WHOLE: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dw[part, n, tap, c] = sum over the pixels of a part, TILES tiles of BP, of dy[pixel, n] * x[moved by the tap, c].

    WHOLE: all tiles of all parts are full.
    """
    m, part = tl.program_id(1), tl.program_id(2)
    blocks: tl.constexpr = (SIDE * SIDE * C + BK - 1) // BK
    n = (tl.program_id(0) // blocks) * BN + tl.arange(0, BN)
    block, k = tl.program_id(0) % blocks, tl.arange(0, BK)
    at = block * BK + k
    acc = tl.zeros((BN, BK), dtype=tl.float32)
    for tile in range(part * TILES, (part + 1) * TILES):
        pixel = tile * BP + tl.arange(0, BP)
        top, left = (pixel // COLUMNS % ROWS) * STRIDE - PAD, (pixel % COLUMNS) * STRIDE - PAD
        if STRIDE == 1 and ROWS == HEIGHT and COLUMNS == WIDTH:
            corner = pixel - PAD * WIDTH - PAD
        else:
            corner = (pixel // (ROWS * COLUMNS) * HEIGHT + top) * WIDTH + left
        if FLAT:
            tap = at // C
            place = (corner[:, None] + (tap // SIDE * WIDTH + tap % SIDE)[None, :]) * (M * C) + (m * C + at % C)[
                None, :
            ]
            inside = _is_inside(top[:, None] + tap // SIDE, left[:, None] + tap % SIDE, HEIGHT, WIDTH)
            inside = inside & (at < SIDE * SIDE * C)[None, :]
        else:
            tap = block // (C // BK)
            first = (corner + tap // SIDE * WIDTH + tap % SIDE) * (M * C) + m * C + (block % (C // BK)) * BK
            place = first[:, None] + k[None, :]
            inside = _is_inside(top + tap // SIDE, left + tap % SIDE, HEIGHT, WIDTH)[:, None]
        gradient = dy + pixel[None, :] * (M * N) + (m * N + _wrapped(n, N, BN))[:, None]
        if WHOLE:
            g, a = tl.load(gradient), tl.load(x + place, mask=inside, other=0.0)
        else:
            g = tl.load(gradient, mask=(pixel < PIXELS)[None, :], other=0.0)
            a = tl.load(x + place, mask=inside & (pixel < PIXELS)[:, None], other=0.0)
        acc = tl.dot(g, a, acc)
    to = dw + ((part * M + m) * N + n)[:, None] * (SIDE * SIDE * C) + at[None, :]
    tl.store(to, acc.to(dw.dtype.element_ty), mask=(n < N)[:, None] & (at < SIDE * SIDE * C)[None, :])


@triton.jit(do_not_specialize=["NUMBERS", "PARTS"])
def _add_parts(dw, total, NUMBERS, PARTS, BLOCK: tl.constexpr):
    """total[number] = sum over parts, in their order, of dw[part, number]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(PARTS):
        acc += tl.load(dw + part * NUMBERS + at, mask=at < NUMBERS, other=0.0)
    tl.store(total + at, acc.to(total.dtype.element_ty), mask=at < NUMBERS)


def convolve(x: Tensor, w: Tensor, stride: int, pad: int) -> Tensor:
    """Outputs of all clients, [batch, clients * out, rows, columns]."""
    (clients, out, into, side, _), (batch, _, height, width) = w.shape, x.shape
    rows, columns = ((size + 2 * pad - side) // stride + 1 for size in (height, width))
    y = new_activations(x, batch, clients * out, rows, columns)
    pixels, (flat, summed) = batch * rows * columns, _summed(into, 64)
    tile, block = _tile(pixels, out, clients)
    _convolve[triton.cdiv(pixels, tile) * triton.cdiv(out, block), clients](
        channels_last(x), channels_last(w), y, clients, pixels, into, out, height, width, rows, columns, side, stride,
        pad, flat, tile, summed, block, num_warps=_warps(tile * block), num_stages=3,
    )  # fmt: skip
    return y


def convolve_back(dy: Tensor, w: Tensor, stride: int, pad: int, height: int, width: int) -> Tensor:
    """The gradient of the inputs, [batch, clients * in, height, width]; `stride` divides both sizes."""
    (clients, out, into, side, _), (batch, _, rows, columns) = w.shape, dy.shape
    dx = new_activations(dy, batch, clients * into, height, width)
    pixels, (flat, summed) = batch * height * width // stride**2, _summed(out, 64)
    tile, block = _tile(pixels, into, clients * stride**2)
    _convolve_back[triton.cdiv(pixels, tile) * triton.cdiv(into, block), clients, stride**2](
        channels_last(dy), channels_last(w), dx, clients, pixels, out, into, rows, columns, height, width, side,
        stride, pad, flat, tile, summed, block, num_warps=_warps(tile * block), num_stages=3,
    )  # fmt: skip
    return dx


def weigh(x: Tensor, dy: Tensor, side: int, clients: int, stride: int, pad: int) -> Tensor:
    """The gradient of the weights, [clients, out, in, side, side]."""
    (batch, _, height, width), (_, _, rows, columns) = x.shape, dy.shape
    into, out, pixels = x.shape[1] // clients, dy.shape[1] // clients, batch * rows * columns
    (flat, block_k), block_n = _summed(into, 128), _block(out, 128)
    programs = triton.cdiv(side * side * into, block_k) * triton.cdiv(out, block_n)
    tiles = triton.cdiv(pixels, TILE)
    parts = max(1, min(triton.next_power_of_2(triton.cdiv(PROGRAMS, programs * clients)), tiles // 8))
    tiles = triton.cdiv(tiles, parts)
    dw = x.new_empty(parts, clients, out, side, side, into, dtype=torch.float32 if parts > 1 else x.dtype)
    _weigh[programs, clients, parts](
        channels_last(x), channels_last(dy), dw, clients, pixels, tiles, into, out, height, width, rows, columns,
        side, stride, pad, flat, parts * tiles * TILE == pixels, TILE, block_k, block_n,
        num_warps=_warps(block_n * block_k), num_stages=4 if block_n * block_k <= 64 * 64 else 3,
    )  # fmt: skip
    return add_parts(dw, x.dtype)


def add_parts(dw: Tensor, dtype: torch.dtype) -> Tensor:
    """[clients, out, in, side, side] from [parts, clients, out, side, side, in]."""
    if len(dw) == 1:
        return dw[0].movedim(-1, 2)
    if len(dw) > MANY_PARTS:
        return dw.sum(0).to(dtype).movedim(-1, 2)
    total = dw.new_empty(dw.shape[1:], dtype=dtype)
    _add_parts[(triton.cdiv(total.numel(), 512),)](dw, total, total.numel(), len(dw), 512, num_warps=4)
    return total.movedim(-1, 2)


def new_activations(like: Tensor, *shape: int) -> Tensor:
    """Empty activations with their channels last in memory."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def channels_last(t: Tensor) -> Tensor:
    """The same tensor with its channels last, in memory and as an axis."""
    return t.movedim(-3, -1).contiguous()


def _block(channels: int, most: int) -> int:
    """Output channels of a block: a power of two that divides them or, where that is too narrow, holds many of them."""
    divisor = channels & -channels
    return min(most, divisor if divisor >= NARROWEST else max(NARROWEST, triton.next_power_of_2(channels)))


def _summed(channels: int, most: int) -> tuple[bool, int]:
    """Whether taps and summed channels are one axis (FLAT), and how much of it is a block."""
    divisor = channels & -channels
    return (True, FLAT_BLOCK) if divisor < NARROWEST else (False, min(most, divisor))


def _tile(pixels: int, channels: int, copies: int) -> tuple[int, int]:
    """Pixels and channels of a program's tile."""
    tile, block = 128, _block(channels, 128)
    for smaller in ((64, block), (64, _block(channels, 64))):
        if triton.cdiv(pixels, tile) * triton.cdiv(channels, block) * copies < PROGRAMS:
            tile, block = smaller
    return tile, block


def _warps(numbers: int) -> int:
    """Warps for a tile of so many numbers."""
    return 8 if numbers > 128 * 64 else 4
