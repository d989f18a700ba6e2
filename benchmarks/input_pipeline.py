"""How fast photographs of ILSVRC's size become batches: decoders, ways to frame, and the whole streamed loader.

    python benchmarks/input_pipeline.py --data FOLDER [--train-rate vgg11-gmp=9000] \
        [--out benchmarks/results/input_pipeline.json]

ILSVRC cannot come with this file, so its photographs are made from the small ones of FOLDER (Tiny-ImageNet,
say): 500x375 JPEGs of quality 90, either one small image upscaled (smooth, about 28 kB) or a mosaic of 48 of
them at their own scale (texture to the last pixel, about 90 kB; ILSVRC's mean is about 110 kB). `shrunk` is the
mosaic stored with a shorter side of 256, as Caffe's image databases were. Rates of decoders and ways are per
second of one core's time, so that other work on the machine does not count; the loader's are per second.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lowrank_cnn.data import Augment, Standardize, StreamedLoader, StreamedSplit, open_data
from lowrank_cnn.data.decode import crop_at, decode_image, resize_shorter
from lowrank_cnn.data.framing import Framing, frame_by_pillow, frame_by_torch, framer
from lowrank_cnn.environment import environment
from lowrank_cnn.paper.full_run import idle_share

WIDTH, HEIGHT, TILE, QUALITY = 500, 375, 64, 90
FRAMING = Framing((224, 224), None, 256, 0, True, (0, 0, 0))
DRAWS = [0.3, 0.6, 0.2]

Decoder = Callable[[bytes], Any]


def photographs(folder: Path, n: int) -> dict[str, list[bytes]]:
    """Three kinds of JPEGs made from the images of a set of small ones."""
    from PIL import Image

    images = open_data(folder).test.subset(torch.arange(48 * n))
    small = (Image.fromarray(pixels.permute(1, 2, 0).numpy()) for part in images.pixels() for pixels in part)
    tiles = [next(small) for _ in range(48 * n)]
    mosaics = []
    for number in range(n):
        canvas = Image.new("RGB", (8 * TILE, 6 * TILE))
        for place in range(48):
            canvas.paste(tiles[48 * number + place], (place % 8 * TILE, place // 8 * TILE))
        mosaics.append(canvas.crop((0, 0, WIDTH, HEIGHT)))
    upscaled = [tile.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC) for tile in tiles[:n]]
    return {
        "upscaled": [jpeg(image) for image in upscaled],
        "mosaic": [jpeg(image) for image in mosaics],
        "shrunk": [jpeg(resize_shorter(image, 256)) for image in mosaics],
    }


def jpeg(image: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


def pillow_drafted(data: bytes) -> Any:
    return decode_image(data, channels=3, at_least=256)


def whole_then_crop(data: bytes) -> bytes:
    """Every pixel scaled, the window cropped from them: what framing did before it scaled the window alone."""
    image = resize_shorter(decode_image(data, channels=3, at_least=256), 256)
    top, left = FRAMING.corner(image.height, image.width, DRAWS)
    return crop_at(image, top, left, 224, 224, fill=(0, 0, 0)).tobytes()


def optional_decoders() -> Iterator[tuple[str, Decoder]]:
    """Those of other libraries, where they import."""
    if jpeg_ := found("simplejpeg"):
        yield "simplejpeg", lambda data: jpeg_.decode_jpeg(data, "RGB")
        yield "simplejpeg, fast DCT", lambda data: jpeg_.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)
    if (turbo := found("turbojpeg")) and (reader := attempt(turbo.TurboJPEG)):
        yield "PyTurboJPEG", lambda data: reader.decode(data, pixel_format=turbo.TJPF_RGB)
    if cv2 := found("cv2"):
        cv2.setNumThreads(1)
        yield "OpenCV", lambda data: cv2.imdecode(as_array(data), cv2.IMREAD_COLOR)
    if vision := found("torchvision.io"):
        yield "torchvision", lambda data: vision.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def ways() -> Iterator[tuple[str, Decoder]]:
    """Decode, scale to a shorter side of 256, crop 224, mirror."""
    yield "Pillow, whole image scaled", whole_then_crop
    yield "Pillow, window scaled (ours)", lambda data: frame_by_pillow(data, FRAMING, 3, DRAWS)
    fast = " with simplejpeg" if found("simplejpeg") else ""
    yield f"torch, whole image scaled (ours){fast}", lambda data: frame_by_torch(data, FRAMING, 3, DRAWS)
    if cv2 := found("cv2"):
        yield (
            "OpenCV, not antialiased",
            lambda data: cv2.resize(
                cv2.imdecode(as_array(data), cv2.IMREAD_COLOR), (341, 256), interpolation=cv2.INTER_LINEAR
            )[16:240, 58:282].tobytes(),
        )


def as_array(data: bytes) -> Any:
    import numpy as np

    return np.frombuffer(data, np.uint8)


def found(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):  # a build that does not fit torch's fails as it likes
        return None


def attempt(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (OSError, RuntimeError):  # the C library behind it is missing
        return None


def per_core(work: Decoder, images: list[bytes], repeats: int) -> dict[str, float]:
    """Images per second of this process's time on a core: the median round, the worst and the best."""
    rates = []
    for _ in range(repeats + 1):
        began = time.process_time()
        for data in images:
            work(data)
        rates.append(len(images) / (time.process_time() - began))
    rates = rates[1:]  # the first warms up
    return {"images_per_second": median(rates), "lowest": min(rates), "highest": max(rates)}


def on_the_gpu(images: list[bytes], repeats: int) -> dict[str, float] | None:
    """torchvision's decoder on the GPU, sixty-four at a time, where there is one."""
    vision = found("torchvision.io")
    if not (vision and torch.cuda.is_available()):
        return None
    encoded = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (images * 64)[:64]]
    rates = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        vision.decode_jpeg(encoded, device="cuda")
        torch.cuda.synchronize()
        rates.append(64 / (time.perf_counter() - began))
    rates = rates[1:]
    return {"images_per_second": median(rates), "lowest": min(rates), "highest": max(rates)}


def shards(images: list[bytes], n: int, folder: Path) -> StreamedSplit:
    """n images, the given ones over and over, as shards of a streamed set."""
    pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({"image": kind, "label": pa.int64()})
    for number in range(4):
        rows = [{"image": {"bytes": images[i % len(images)], "path": None}, "label": i % 2} for i in range(n // 4)]
        table = pa.Table.from_pylist(rows, schema)
        pq.write_table(table, folder / f"train-{number:05d}-of-00004.parquet", row_group_size=100)
    pq.write_table(table.slice(0, 2), folder / "test-00000-of-00001.parquet")
    split = open_data(folder, resident_bytes=0).train
    assert isinstance(split, StreamedSplit)
    return split


def loader_rate(split: StreamedSplit, workers: int, batch: int) -> float:
    """Images per second of an epoch as training sees it: read, decoded, framed, on the device, standardised."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = StreamedLoader(
        split,
        batch_size=batch,
        preprocess=Standardize(torch.full((3,), 120.0), torch.full((3,), 60.0)),
        augment=Augment(resize=256, crop=224),
        seed=0,
        device=device,
        train=True,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        workers=workers,
    )
    batches = loader.epoch(0)
    next(batches)  # until then the workers start and the first batch is made
    began = time.perf_counter()
    images = sum(len(labels) for _, labels in batches)
    if device == "cuda":
        torch.cuda.synchronize()
    return images / (time.perf_counter() - began)


def measure_loader(images: list[bytes], arguments: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        split = shards(images, arguments.images, Path(folder))
        rates = {}
        for workers in arguments.workers:
            rates[str(workers)] = loader_rate(split, workers, arguments.batch)
            print(f"loader, {workers} workers: {rates[str(workers)]:,.0f} images/s", flush=True)
    return rates


def shown(title: str, name: str, row: dict[str, float]) -> dict[str, float]:
    print(f"{title}, {name}: {row['images_per_second']:,.0f} images/s", flush=True)
    return row


def parse() -> argparse.Namespace:
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--photographs", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", type=int, default=4096, help="of an epoch of the loader")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, nargs="*", default=sorted({0, 1, cores // 2, cores}))
    parser.add_argument("--train-rate", action="append", default=[], help="network=images per second of a GPU")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/input_pipeline.json"))
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    made = photographs(arguments.data, arguments.photographs)
    decoders = [("Pillow", lambda data: decode_image(data, channels=3)), ("Pillow, draft 256", pillow_drafted)]
    decoders += optional_decoders()
    rows: dict[str, Any] = {}
    for kind, images in made.items():
        rows[kind] = {
            "bytes": sum(map(len, images)) / len(images),
            "decode": {n: shown(kind, n, per_core(d, images, arguments.repeats)) for n, d in decoders},
            "frame": {n: shown(kind, n, per_core(w, images, arguments.repeats)) for n, w in ways()},
            "gpu_decode": on_the_gpu(images, arguments.repeats),
            "loader": measure_loader(images, arguments),
        }
    fed = max(rows["mosaic"]["loader"].values(), default=0.0)
    demands = {name: float(rate) for name, _, rate in (text.partition("=") for text in arguments.train_rate)}
    record = {
        "kind": "input-pipeline",
        "setting": {
            "size": [WIDTH, HEIGHT],
            "quality": QUALITY,
            "batch": arguments.batch,
            "way": framer().__name__,
        },
        "rows": rows,
        "idle": {name: idle_share(supply=fed, demand=demand) for name, demand in demands.items()},
        "train_rates": demands,
        "environment": environment(),
    }
    print({name: f"{share:.0%} idle" for name, share in record["idle"].items()})
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
