"""Which descriptors a model gives, as one short string."""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from sscd_vec.encoder.config import EncoderConfig


def fingerprint(config: EncoderConfig, state: Mapping[str, Tensor], precision: str) -> str:
    """Identify the descriptors a model gives, in 32 hex digits.

    It changes with weights, architecture, preprocessing and precision, and with nothing else: not
    with the file they came from, the type they are stored in, their order, counters of training
    batches, or a head that trunk features leave out.

    Args:
        config: What the model is.
        state: Its tensors, named as ``SSCDModel.state_dict()`` names them.
        precision: What it computes in, such as ``float32``.
    """
    described = config.to_dict()
    trunk_only = config.features == "trunk"
    if trunk_only:
        del described["dim"], described["head"]
    digest = hashlib.sha256(json.dumps([1, described, precision], sort_keys=True).encode())
    for name in sorted(state):
        if name.endswith("num_batches_tracked") or (trunk_only and name.startswith("head.")):
            continue
        # Adding zero makes -0 and 0 one, as they are to every layer.
        values = state[name].detach().to("cpu", torch.float32).contiguous() + 0.0
        digest.update(json.dumps([name, list(values.shape)]).encode())
        digest.update(values.numpy().data)
    return digest.hexdigest()[:32]
