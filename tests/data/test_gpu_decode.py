from __future__ import annotations

import io
import multiprocessing
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Augment, StreamedLoader, StreamedSplit, open_data, streamed
from lowrank_cnn.data.decode import ScaledCrop, plain_jpeg_size
from lowrank_cnn.data.streamed import decode_windows, find_decoder

Batches = list[tuple[Tensor, Tensor]]
KINDS: list[dict[str, Any]] = [
    {},
    {"format": "PNG"},
    {},
    {"mode": "L"},
    {"subsampling": "4:2:2"},
    {"mode": "CMYK"},
    {"subsampling": "4:4:4"},
    {"progressive": True},
]
BAD = (3, 12, 29)


def picture(seed: int, size: tuple[int, int], mode: str = "RGB", format: str = "JPEG", **options: Any) -> bytes:
    """Soft edges, as photographs have."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize(size[::-1], Image.Resampling.BICUBIC).convert(mode)
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def broken(seed: int) -> bytes:
    """A header like any other, but no decoder can make sense of the rest."""
    data = picture(seed, (16, 16))
    at = data.index(b"\xff\xc4") + 5
    return data[:at] + b"\xff" * 16 + data[at + 16 :]


class StandIn:
    """What nvJPEG does, by Pillow: one JPEG that it refuses fails the call."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.refused: set[bytes] = set()

    def __call__(self, jpegs: list[Tensor]) -> list[Tensor]:
        self.calls.append(len(jpegs))
        return [self._decode(bytes(jpeg.numpy())) for jpeg in jpegs]

    def _decode(self, data: bytes) -> Tensor:
        assert plain_jpeg_size(data)
        if data in self.refused:
            raise RuntimeError("not supported")
        try:
            return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))).permute(2, 0, 1)
        except OSError as error:
            raise RuntimeError(error) from error


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    decoder = StandIn()
    monkeypatch.setattr(streamed, "find_decoder", lambda device: decoder)
    return decoder


def right_scale(seed: int) -> tuple[int, int]:
    return [(16, 16), (16, 20), (23, 16)][seed % 3]


def to_be_scaled(seed: int) -> tuple[int, int]:
    return [(24, 31), (18, 18), (16, 20), (29, 17)][seed % 4]


def written(folder: Path, write: Callable, size: Callable[[int], tuple[int, int]], kinds: list[Any]) -> Path:
    def files(first: int, end: int) -> list[tuple[bytes, int]]:
        return [(picture(n, size(n), **kinds[n % len(kinds)]), n % 3) for n in range(first, end)]

    write(folder, "train", [files(0, 16), files(16, 32), files(32, 48)])
    write(folder, "test", [files(100, 121)])
    return folder


@pytest.fixture
def mixed(tmp_path: Path, write_shards) -> Path:
    """48 photographs at the right scale, of every kind."""
    return written(tmp_path, write_shards, right_scale, KINDS)


@pytest.fixture
def damaged(tmp_path: Path, write_shards) -> Path:
    """48 photographs, of which three cannot be decoded, one is cut short and one is junk."""
    rows = [(broken(n) if n in BAD else picture(n, right_scale(n)), n % 3) for n in range(48)]
    rows[20], rows[40] = (rows[20][0][:-40], 0), (b"junk", 0)
    write_shards(tmp_path, "train", [rows[:16], rows[16:32], rows[32:]])
    write_shards(tmp_path, "test", [[rows[0], (b"junk", 0), *rows[1:21]]])
    return tmp_path


def split_of(folder: Path, which: str = "train", **options: Any) -> StreamedSplit:
    split = getattr(open_data(folder, resident_bytes=0, **options), which)
    assert isinstance(split, StreamedSplit)
    return split


def loader(split: StreamedSplit, *, train: bool = True, **options: Any) -> StreamedLoader:
    augment = Augment(resize=16, crop=14, cutout=3)
    chosen = {"batch_size": 8, "preprocess": None, "augment": augment, "seed": 3, "device": "cpu", "train": train}
    return StreamedLoader(split, **(chosen | options))


def on_gpu(split: StreamedSplit, **options: Any) -> StreamedLoader:
    return loader(split, decode="gpu", **options)


def assert_same(one: Batches, two: Batches, levels: float = 0.0) -> None:
    assert len(one) == len(two)
    for (a, x), (b, y) in zip(one, two, strict=True):
        assert torch.equal(x, y)
        assert a.is_contiguous(memory_format=torch.channels_last) == b.is_contiguous(
            memory_format=torch.channels_last
        )
        assert (a - b).abs().max() * 255 <= levels + 0.01 * bool(levels)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_device_cuts_out_what_the_workers_would(mixed: Path, stand_in: StandIn, workers: int) -> None:
    for epoch in range(2):
        expected = list(loader(split_of(mixed)).epoch(epoch))
        assert_same(expected, list(on_gpu(split_of(mixed), workers=workers).epoch(epoch)))
    assert stand_in.calls == [calls for calls in stand_in.calls if 0 < calls <= 8]
    assert len(stand_in.calls) == 12  # one for every batch
    assert sum(stand_in.calls) == 2 * 24  # every second is no plain colour JPEG
    tested = list(loader(split_of(mixed, "test"), train=False).epoch(0))
    assert_same(tested, list(on_gpu(split_of(mixed, "test"), train=False, workers=workers).epoch(0)))


def test_scaled_images_are_those_of_the_cpu_to_one_level(
    tmp_path: Path, write_shards, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path, write_shards, to_be_scaled, KINDS)
    expected = list(loader(split_of(folder)).epoch(0))
    made = list(on_gpu(split_of(folder)).epoch(0))
    assert_same(expected, made, levels=1)
    assert_same(made, list(on_gpu(split_of(folder), workers=2).epoch(0)))
    apart = torch.cat([(a - b).flatten() * 255 for (a, _), (b, _) in zip(expected, made, strict=True)])
    assert (apart.abs() > 0.5).float().mean() < 0.1
    assert abs(apart.mean()) < 0.02
    monkeypatch.setattr(streamed, "DECODED_AT_ONCE", 1000)
    monkeypatch.setattr(streamed, "SCALED_AT_ONCE", 1000)
    assert_same(made, list(on_gpu(split_of(folder)).epoch(0)))
    assert max(stand_in.calls[12:]) < max(stand_in.calls[:12])


@pytest.mark.parametrize(("start", "workers"), [(1, 0), (5, 2), (6, 0)])
def test_resuming_and_two_ranks_make_the_batches_of_one(
    mixed, stand_in: StandIn, start: int, workers: int
) -> None:
    whole = list(on_gpu(split_of(mixed)).epoch(4))
    assert_same(whole[start:], list(on_gpu(split_of(mixed), workers=workers).epoch(4, start)))
    parts = [list(on_gpu(split_of(mixed), rank=rank, world=2).epoch(4)) for rank in range(2)]
    together = [(torch.cat([a, b]), torch.cat([x, y])) for (a, x), (b, y) in zip(*parts, strict=True)]
    assert_same(
        whole, [(images.contiguous(memory_format=torch.channels_last), labels) for images, labels in together]
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("train", [True, False])
def test_bad_images_are_counted_and_replaced_alike(
    damaged: Path, stand_in: StandIn, train: bool, workers: int
) -> None:
    splits = [split_of(damaged, "train" if train else "test") for _ in range(2)]
    expected = list(loader(splits[0], train=train).epoch(0))
    assert_same(expected, list(on_gpu(splits[1], train=train, workers=workers).epoch(0)))
    assert splits[0].problems.found == splits[1].problems.found
    assert splits[1].problems.counts == {"undecodable image": 5 if train else 4}


def test_what_nvjpeg_refuses_is_decoded_by_the_cpu(mixed: Path, stand_in: StandIn) -> None:
    split = split_of(mixed)
    plain = [data for row in split.rows.tolist() if plain_jpeg_size(data := split.store.read(row))]
    for refused in (plain[:1], plain[3:9], plain):
        stand_in.refused = set(refused)
        assert_same(list(loader(split_of(mixed)).epoch(0)), list(on_gpu(split).epoch(0)))
    assert not split.problems
    jpeg = torch.frombuffer(bytearray(plain[0]), dtype=torch.uint8)
    other = ScaledCrop((16, 17), (16, 17), (0, 0), False)  # what the header said is not what came
    assert decode_windows([(jpeg, other)], (14, 14), StandIn()) == [None]


def test_a_stream_of_broken_images_ends_with_a_sentence(tmp_path: Path, write_shards, stand_in: StandIn) -> None:
    for split in ("train", "test"):
        write_shards(tmp_path, split, [[(picture(n, (16, 16)), 0) for n in range(16)]])
    splits = [split_of(tmp_path), split_of(tmp_path, bad="refuse"), split_of(tmp_path)]
    write_shards(tmp_path, "train", [[(broken(n), 0) for n in range(16)]])  # a disk may fail later
    for split in splits:
        split.store._held.clear()
    with pytest.raises(LowRankError, match="too many images are bad: 16 undecodable"):
        list(on_gpu(splits[0]).epoch(0))
    with pytest.raises(LowRankError, match=r"undecodable images? \(train-0000"):
        list(on_gpu(splits[1]).epoch(0))
    assert list(on_gpu(splits[2], train=False).epoch(0)) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_closing_early_leaves_no_thread_and_no_process(mixed: Path, stand_in: StandIn, workers: int) -> None:
    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]

    batches = on_gpu(split_of(mixed), workers=workers).epoch(0)
    next(batches)
    assert len(ours()) == 1
    assert len(multiprocessing.active_children()) == workers
    del batches
    assert ours() == []
    assert not multiprocessing.active_children()


def test_an_error_of_the_device_is_the_run_s(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(jpegs: list[Tensor]) -> list[Tensor]:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(streamed, "find_decoder", lambda device: full)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        next(on_gpu(split_of(mixed)).epoch(0))


@pytest.mark.parametrize("augment", [Augment(crop=14, pad=2), Augment(crop=14)])
def test_what_no_gpu_would_decode_is_refused(mixed: Path, stand_in: StandIn, augment: Augment) -> None:
    split = split_of(mixed, image_size=16, channels=None if augment.pad else 1)
    with pytest.raises(LowRankError, match="photographs in colour that are not padded"):
        on_gpu(split, augment=augment)
    assert on_gpu(split_of(mixed, image_size=16), augment=augment, train=False)


def test_without_a_gpu_or_torchvision_a_sentence_says_so(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LowRankError, match="needs a CUDA device, and this run is on cpu"):
        on_gpu(split_of(mixed))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(LowRankError, match="needs torchvision"):
        find_decoder(torch.device("cuda", 0))

    def decode_jpeg(jpegs: list[Tensor], **_: Any) -> list[Tensor]:
        raise RuntimeError("compiled without nvJPEG\nmore")

    vision = SimpleNamespace(decode_jpeg=decode_jpeg, ImageReadMode=SimpleNamespace(RGB=3))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(io=vision))
    monkeypatch.setitem(sys.modules, "torchvision.io", vision)
    with pytest.raises(LowRankError, match=r"this torchvision: compiled without nvJPEG$"):
        find_decoder(torch.device("cuda"))


needs_nvjpeg = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_nvjpeg
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_nvjpeg_decodes_to_almost_the_pixels_of_pillow(subsampling: str) -> None:
    pytest.importorskip("torchvision")
    data = [picture(seed, (375, 500), quality=90, subsampling=subsampling) for seed in range(4)]
    jpegs = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in data]
    for one, found in zip(data, find_decoder(torch.device("cuda"))(jpegs), strict=True):
        expected = torch.from_numpy(np.array(Image.open(io.BytesIO(one)))).permute(2, 0, 1)
        assert found.shape == expected.shape
        assert (found.cpu().float() - expected.float()).abs().mean() <= 2


@needs_nvjpeg
@pytest.mark.parametrize("workers", [0, 2])
def test_a_gpu_makes_almost_the_batches_of_the_cpu(tmp_path: Path, write_shards, workers: int) -> None:
    pytest.importorskip("torchvision")
    sizes = [(375, 500), (256, 341), (300, 300), (500, 375)]
    folder = written(
        tmp_path, write_shards, lambda seed: sizes[seed % 4], [{"quality": 90, **kind} for kind in KINDS]
    )
    options: dict[str, Any] = {"augment": Augment(resize=256, crop=224), "device": "cuda", "workers": workers}
    splits = [split_of(folder) for _ in range(2)]
    one, two = list(loader(splits[0], **options).epoch(0)), list(on_gpu(splits[1], **options).epoch(0))
    assert len(one) == len(two) == 6
    for (a, x), (b, y) in zip(one, two, strict=True):
        assert torch.equal(x, y)
        assert (a - b).abs().mean() * 255 <= 2
    assert not splits[1].problems


@needs_nvjpeg
def test_nvjpeg_leaves_no_broken_image_uncounted(damaged: Path) -> None:
    pytest.importorskip("torchvision")
    splits = [split_of(damaged) for _ in range(2)]
    expected, made = (
        list(make(split, device="cuda").epoch(0)) for make, split in zip((loader, on_gpu), splits, strict=True)
    )
    assert splits[0].problems.found == splits[1].problems.found
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(expected, made, strict=True))
