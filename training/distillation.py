"""Self-distillation: the base without its adapter, which sees the whole prompt, teaches the adapted model.

So are attention's substitutes trained elsewhere (AHN, arXiv 2510.07318; Cartridges, arXiv 2506.06266).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor

from cacheformers.common.loss import IGNORED
from cacheformers.training.lanes import Teacher
from cacheformers.training.run import Trained


def distilled(
    model: Trained, losses: Tensor, logits: Tensor, labels: Tensor, teachers: Sequence[Teacher | None], share: float
) -> Tensor:
    """Put the divergence from the teacher in place of a share of the losses, where there is a teacher.

        loss = (1 - share) * cross entropy + share * KL(teacher || model)

    Args:
        model: with an adapter, which is off while it teaches.
        losses: cross entropy, `[rows, time]`.
        logits: `[rows, time, vocabulary]`.
        labels: `[rows, time]`.
        teachers: of each row; None without.

    Returns:
        `[rows, time]`.
    """
    rows = []
    for row, teacher in enumerate(teachers):
        if teacher is None:
            rows.append(losses[row])
            continue
        places = (labels[row] != IGNORED).nonzero()[-len(teacher.places) :, 0]
        wanted = F.log_softmax(taught(model, *(given.to(losses.device) for given in teacher)).float(), -1)
        found = F.log_softmax(logits[row, places].float(), -1)
        divergence = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
        rows.append(losses[row].index_copy(0, places, (1 - share) * losses[row, places] + share * divergence))
    return torch.stack(rows)


@torch.no_grad()
def taught(model: Trained, ids: Tensor, places: Tensor) -> Tensor:
    """Return the base's logits for the ids at `places`, with full attention, `[places, vocabulary]`."""
    assert isinstance(model, PeftModel)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = [module for module in model.modules() if module.training]
    model.eval()  # it teaches without dropout
    with model.disable_adapter():
        logits: Tensor = model(input_ids=ids[None, :-1], use_cache=False, logits_to_keep=places - 1).logits
    for module in training:
        module.training = True
    model.requires_grad_(False)  # PEFT lets everything of an adapter learn again, frozen gates too
    for parameter in trained:
        parameter.requires_grad_(True)
    return logits[0]
