"""The command `lowrank`, of whose processes the second may be told to die at an iteration: DIES_AT COMMAND..."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import torch

from lowrank_cnn.cli import main
from lowrank_cnn.train.failure import StopRequest
from lowrank_cnn.train.loop import Trainer

dies_at = int(sys.argv.pop(1))
look_around = Trainer._look_around


def die(self: Trainer, stop: StopRequest) -> None:
    if self.iteration == dies_at and self.fabric.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    self.how = replace(self.how, checkpoint_every=0.0)
    look_around(self, stop)


Trainer._look_around = die
torch.set_num_threads(1)
main()
