"""Every generator can be put down and picked up again."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lowrank_cnn.train.randomness import generator_states, restore_generators, seed_generators

CPU = torch.device("cpu")


def draw() -> tuple:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


@pytest.mark.parametrize("drawn", [0, 1, 7])
def test_generators_go_on_from_their_states(drawn):
    seed_generators(3)
    for _ in range(drawn):
        draw()
        random.gauss(0, 1)  # leaves a spare value behind, which is part of the state
    states = {name: state.clone() for name, state in generator_states(CPU).items()}
    expected = [draw() for _ in range(3)]
    seed_generators(4)
    restore_generators(states, CPU)
    assert [draw() for _ in range(3)] == expected


def test_processes_draw_from_streams_of_their_own():
    seed_generators(3, rank=0)
    first = draw()
    seed_generators(3, rank=1)
    assert draw() != first
    seed_generators(3)
    assert draw() == first
