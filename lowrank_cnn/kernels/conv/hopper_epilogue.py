"""Steps after the matrix product in the Hopper kernels: pool, bias, residual, activation, and storing the result.

Results go through shared memory, from which the tensor memory accelerator copies whole boxes to device memory. A
residual arrives in the same shared memory: each thread reads it from where it then stores its results.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@gluon.jit
def normal_below(x):
    """The normal distribution function to 1e-7 (Abramowitz and Stegun, 7.1.26); it needs few registers."""
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * gl.abs(x))
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    beyond = 0.5 * tail * gl.exp(-0.5 * x * x)
    return gl.where(x > 0, 1.0 - beyond, beyond)


@gluon.jit
def activated(out, ACTIVATION: gl.constexpr, SLOPE: gl.constexpr):
    """The activation of float32 values; `ACTIVATION` is a name of `kernels.activation`, "" for none."""
    if ACTIVATION == "relu":
        out = gl.maximum(out, 0.0)
    elif ACTIVATION == "leaky_relu":
        out = gl.where(out > 0, out, out * SLOPE)
    elif ACTIVATION == "silu":
        out = out / (1.0 + gl.exp(-out))
    elif ACTIVATION == "gelu":
        out = out * normal_below(out)
    elif ACTIVATION == "hardswish":
        out = out * gl.minimum(gl.maximum(out + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    return out


@gluon.jit
def pooled(
    acc, turned, run, cross, out_height, out_width,
    RUN: gl.constexpr, IMAGES: gl.constexpr, CROSS: gl.constexpr, WHOLE: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """The maximum of each 2x2 window of a tile; pixels outside the image never win.

    With `CODES`, the two lowest bits of a value hold its place in the window.
    """
    FILTERS: gl.constexpr = acc.shape[1]
    pixel = gl.arange(0, RUN * IMAGES * CROSS, layout=gl.SliceLayout(1, acc.type.layout))
    ahead, beside = pixel // (IMAGES * CROSS), pixel % CROSS
    if not WHOLE:
        out_run = gl.where(turned > 0, out_width, out_height)
        out_cross = gl.where(turned > 0, out_height, out_width)
        inside = (run + ahead < out_run) & (cross + beside < out_cross)
        acc = gl.where(inside[:, None], acc, -3.0e38)
    if CODES:
        place = gl.where(turned > 0, beside % 2 * 2 + ahead % 2, ahead % 2 * 2 + beside % 2)
        bits = acc.to(gl.int32, bitcast=True) & ~3 | 3 - place[:, None]
        acc = bits.to(gl.float32, bitcast=True)
    quads = acc.reshape([RUN // 2, 2, IMAGES, CROSS // 2, 2, FILTERS])
    return gl.max(gl.max(quads, 4), 1).reshape([RUN // 2 * IMAGES * (CROSS // 2), FILTERS])


@gluon.jit
def biased(out, bias, channel, HAS_BIAS: gl.constexpr, CODES: gl.constexpr):
    """Add the bias to [pixels, filters]; with `CODES` also return each pool's winner, from the two lowest bits."""
    FILTERS: gl.constexpr = out.shape[1]
    bits = out.to(gl.int32, bitcast=True)
    code = 3 - (bits & 3)
    if CODES:  # a zero that kept these bits would compare as greater than zero
        out = (bits & ~3).to(gl.float32, bitcast=True)
    if HAS_BIAS:
        lanes = gl.arange(0, FILTERS, layout=gl.SliceLayout(0, out.type.layout))
        out = out + gl.load(bias + channel + lanes).to(gl.float32)[None, :]
    return out, code


@gluon.jit
def finished(
    out, bias, channel,
    ACTIVATION: gl.constexpr, SLOPE: gl.constexpr, HAS_BIAS: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """Add the bias and activate; with `CODES` also return each pool's winner, 4 if the ReLU cut it."""
    out, code = biased(out, bias, channel, HAS_BIAS, CODES)
    out = activated(out, ACTIVATION, SLOPE)
    if ACTIVATION == "relu":
        code = gl.where(out > 0, code, 4)
    return out, code


@gluon.jit
def copy_out(targets, staged, turned, place):
    """Copy a box from shared to device memory, once all threads have written it."""
    fence_async_shared()
    gl.thread_barrier()
    if turned > 0:
        tma.async_copy_shared_to_global(targets[1], place, staged)
    else:
        tma.async_copy_shared_to_global(targets[0], place, staged)


@gluon.jit
def send(targets, staged, values, turned, place):
    """Store a box through shared memory, once the box before it has left."""
    tma.store_wait(0)
    gl.thread_barrier()
    staged.store(values.reshape(staged.shape))
    copy_out(targets, staged, turned, place)


@gluon.jit
def fetch_residual(sources, staged, ready, turned, place):
    """Start to fetch a box of the residual to the memory of the results, once the box before it has left."""
    size: gl.constexpr = sources[0].dtype.primitive_bitwidth // 8
    tma.store_wait(0)
    gl.thread_barrier()
    mbarrier.expect(ready, staged.shape[0] * staged.shape[1] * staged.shape[2] * staged.shape[3] * size)
    if turned > 0:
        tma.async_copy_global_to_shared(sources[1], place, ready, staged)
    else:
        tma.async_copy_global_to_shared(sources[0], place, ready, staged)


@gluon.jit
def send_added(
    targets, staged, ready, phase, values, turned, place,
    ACTIVATION: gl.constexpr, SLOPE: gl.constexpr, ADD_LAST: gl.constexpr,
):  # fmt: skip
    """Add the fetched residual before or after the activation; store the box through the same shared memory."""
    mbarrier.wait(ready, phase)
    box = values.reshape(staged.shape)
    if ADD_LAST:
        box = activated(box, ACTIVATION, SLOPE)
    box += staged.load(box.type.layout).to(gl.float32)
    if not ADD_LAST:
        box = activated(box, ACTIVATION, SLOPE)
    gl.thread_barrier()  # every thread has read its part
    staged.store(box.to(targets[0].dtype))
    copy_out(targets, staged, turned, place)


@gluon.jit
def store_parts(
    parts, plane, staged, out, turned, run, image, cross, batch, out_height, out_width,
    RUN: gl.constexpr, IMAGES: gl.constexpr, CROSS: gl.constexpr, WARPS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Count, mean and squared distances of a tile's pixels inside the image, per filter (see `result_statistics`).

    Each of `WARPS` warps along the pixels sums its own pixels; the sums are combined in the results' shared
    memory. Squares are of the values themselves: in tiles this small, rounding to 16 bits loses more than
    cancellation does. Returns the values with zeros outside the image, where nothing is stored.
    """
    PIXELS: gl.constexpr = RUN * IMAGES * CROSS
    FILTERS: gl.constexpr = out.shape[1]
    pixel = gl.arange(0, PIXELS, layout=gl.SliceLayout(1, out.type.layout))
    runs = gl.where(turned > 0, out_width, out_height) - run
    crosses = gl.where(turned > 0, out_height, out_width) - cross
    inside = (pixel // (IMAGES * CROSS) < runs) & (pixel % CROSS < crosses)
    inside = inside & (image + pixel // CROSS % IMAGES < batch)
    values = gl.where(inside[:, None], out, 0.0)
    # Warps take sixteen pixels each in turn: sums over all axes but that of the warps exchange no data.
    own = values.reshape([PIXELS // (16 * WARPS), WARPS, 16, FILTERS])
    sums, squares = gl.sum(gl.sum(own, 2), 0), gl.sum(gl.sum(own * own, 2), 0)
    met = staged._reinterpret(gl.float32, [2, WARPS, FILTERS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    tma.store_wait(0)  # the results before have left
    gl.thread_barrier()
    met.index(0).store(sums)
    met.index(1).store(squares)
    gl.thread_barrier()
    total, squared = gl.sum(met.index(0).load(SUMS), 0), gl.sum(met.index(1).load(SUMS), 0)
    gl.thread_barrier()
    pixels = gl.minimum(runs, RUN) * gl.minimum(crosses, CROSS) * gl.maximum(gl.minimum(batch - image, IMAGES), 0)
    mean = total / gl.maximum(pixels * 1.0, 1.0)
    lanes = gl.arange(0, FILTERS, layout=gl.SliceLayout(0, SUMS))
    gl.store(parts + lanes, total * 0.0 + pixels)
    gl.store(parts + plane + lanes, mean)
    gl.store(parts + 2 * plane + lanes, gl.maximum(squared - total * mean, 0.0))
    return values


@gluon.jit
def halves_of(out):
    """Split [pixels, filters] into the first and the second half of the filters."""
    return out.reshape([out.shape[0], 2, out.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def write(
    ys, cs, staged, staged_codes, out, bias, channel, turned, run, image, cross,
    ACTIVATION: gl.constexpr, SLOPE: gl.constexpr, HAS_BIAS: gl.constexpr, PARTS: gl.constexpr,
    CODES: gl.constexpr,
):  # fmt: skip
    """Add the bias, activate, round, and store through shared memory, in parts so that these need little of it."""
    FILTERS: gl.constexpr = out.shape[1]
    out, code = finished(out, bias, channel, ACTIVATION, SLOPE, HAS_BIAS, CODES)
    if CODES:
        send(cs, staged_codes, code.to(gl.uint8), turned, [run, image, cross, channel])
    out = out.to(ys[0].dtype)
    if PARTS == 2:
        low, high = halves_of(out)
        send(ys, staged, low, turned, [run, image, cross, channel])
        send(ys, staged, high, turned, [run, image, cross, channel + FILTERS // 2])
    else:
        send(ys, staged, out, turned, [run, image, cross, channel])


@gluon.jit
def write_added(
    ys, rs, staged, ready, tiles_done, out, bias, channel, turned, run, image, cross,
    ACTIVATION: gl.constexpr, SLOPE: gl.constexpr, HAS_BIAS: gl.constexpr, PARTS: gl.constexpr,
    ADD_LAST: gl.constexpr,
):  # fmt: skip
    """As `write`, with a residual, whose first part was fetched while the products ran."""
    FILTERS: gl.constexpr = out.shape[1]
    out, _ = biased(out, bias, channel, HAS_BIAS, False)
    place = [run, image, cross, channel]
    if PARTS == 2:
        second = [run, image, cross, channel + FILTERS // 2]
        low, high = halves_of(out)
        send_added(ys, staged, ready, 0, low, turned, place, ACTIVATION, SLOPE, ADD_LAST)
        fetch_residual(rs, staged, ready, turned, second)
        send_added(ys, staged, ready, 1, high, turned, second, ACTIVATION, SLOPE, ADD_LAST)
    else:
        send_added(ys, staged, ready, tiles_done & 1, out, turned, place, ACTIVATION, SLOPE, ADD_LAST)
