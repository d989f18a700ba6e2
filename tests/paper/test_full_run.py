import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.paper.experiments import GPUS, Demand, Supply, demand_of, exchange_seconds, full_run, idle_share

ILSVRC = Demand(images=1_281_167, epochs=74, batch=256, params=32_200_040)


def test_one_gpu_with_few_cores_waits_for_its_images():
    run = full_run(ILSVRC, Supply(train_rate=9000, decode_rate=300, cores=10), 1)
    assert run.bound == "decode"
    assert run.decode == pytest.approx(74 * 5004 * 256 / 3000 / 3600)
    assert run.compute == pytest.approx(run.decode / 3)
    assert run.hours == run.decode
    assert run.idle == pytest.approx(2 / 3)
    assert run.exchange == 0


def test_with_enough_cores_it_computes():
    run = full_run(ILSVRC, Supply(train_rate=9000, decode_rate=300, cores=64), 8)
    assert (run.bound, run.idle, run.share) == ("compute", 0.0, 32)
    assert run.hours == pytest.approx(74 * 5004 * 32 / 9000 / 3600)


def test_many_machines_wait_for_the_exchange_of_small_shares():
    run = full_run(ILSVRC, Supply(train_rate=9000, decode_rate=300, cores=64), 64)
    assert run.bound == "exchange"
    assert run.exchange > run.compute
    assert 0 < run.idle < 1


def test_an_exchange_passes_the_gradients_twice():
    assert exchange_seconds(10**9, 1) == 0
    assert exchange_seconds(10**9, 8) == pytest.approx(2 * 7 / 8 * 4e9 / 300e9)
    assert exchange_seconds(10**9, 16) > exchange_seconds(10**9, 8)


@given(st.sampled_from([1, 2, 4, 8, 16, 64]), st.floats(10, 1e5), st.floats(1, 1e4), st.integers(1, 128))
def test_the_slowest_part_is_the_time(gpus: int, train: float, decode: float, cores: int):
    run = full_run(ILSVRC, Supply(train, decode, cores), gpus)
    assert run.hours == max(run.compute, run.decode, run.exchange)
    assert getattr(run, run.bound) == run.hours
    assert 0 <= run.idle < 1


def test_a_demand_is_that_of_the_papers_recipe():
    found = demand_of("ilsvrc", "vgg11-gmp")
    assert (found.images, found.epochs, found.batch) == (round(0.98 * 1_281_167), 90, 256)
    assert found.params == ILSVRC.params
    assert demand_of("ilsvrc", "googlenet").batch == 32
    places = demand_of("places", "vgg11-gmp")
    assert found.params - places.params == (1000 - 205) * 4097
    assert all(full_run(places, Supply(9000, 300, 64), gpus).hours > 0 for gpus in GPUS)
    with pytest.raises(LowRankError, match="'cifar10' is not a full run"):
        demand_of("cifar10", "nin")


def test_what_cannot_be_is_refused():
    with pytest.raises(LowRankError, match="batch of 256 does not divide over 3 GPUs"):
        full_run(ILSVRC, Supply(1, 1, 1), 3)
    with pytest.raises(LowRankError, match="rates are above zero"):
        idle_share(supply=0, demand=5)
    assert idle_share(supply=25, demand=100) == 0.75
    assert idle_share(supply=200, demand=100) == 0
