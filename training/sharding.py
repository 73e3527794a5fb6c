"""FSDP2: weights, gradients and optimizer divided among processes, gathered a layer at a time."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cacheformers.modeling.attach import active_memories, find_decoder, unwrap


def shard(model: nn.Module, device: torch.device, processes: int) -> None:
    """Divide a model among all processes, in place. The same on GPUs and on CPUs.

    torch's own call is used, because Accelerate leaves FSDP out on the CPU, where it could not be tested then.
    """
    mesh = init_device_mesh(device.type, (processes,))
    decoder = find_decoder(unwrap(model))
    memories = active_memories(decoder)
    # Higher layers encode with the lowest memory's projection, so that layer must stay gathered until they are done.
    shared = None if not memories else decoder.layers[memories[0].layer]  # type: ignore[attr-defined, index]
    for layer in decoder.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, reshard_after_forward=layer is not shared)
    fully_shard(model, mesh=mesh)
