"""`pretrain` under FSDP2 in gloo processes: accelerate shards on GPUs alone, and is told that these have some."""

import sys

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from training.pretrain import pretrain

prepare = PartialState._prepare_backend


def _prepare_backend(self, *args, **kwargs):
    return prepare(self, *args, **kwargs)[0], DistributedType.MULTI_GPU


def set_device(self):
    self.device = torch.device("cpu")


PartialState._prepare_backend, PartialState.set_device = _prepare_backend, set_device  # type: ignore[method-assign]
torch.distributed.init_process_group("gloo")
pretrain(sys.argv[1:])
