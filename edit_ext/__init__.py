"""edit_ext: local-update training for PyTorch as a hook on an ordinary training loop.

    sync = edit_ext.attach(model, optimizer, edit_ext.EDiT(sync_every=128, warmup_steps=1000))

The words used throughout: a replica is one whole copy of the model; a layer is the unit of sync;
the anchor is the last agreed weights; the pseudo-gradient is anchor - parameter; a window is the
local steps between two syncs; a flagged replica is left out of a layer's sync as an outlier.
"""

import torch  # first: the compiled part links against it

if torch.distributed.is_available():
    # Imported after init_process_group, as torch's optimizers do, it keeps the default group alive
    # in default arguments; Gloo's threads then outlive destroy_process_group, and one that drops a
    # tensor while Python shuts down aborts the process.
    import torch.distributed.nn

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"edit_ext's compiled part cannot be imported ({error}); build it for this Python and "
        "torch with: pip install --no-build-isolation ."
    ) from error

from . import ops, optim
from .half_lives import half_life, suggest_periods
from .handle import Handle
from .hook import attach
from .methods import (
    CO2,
    DESLOC,
    AEDiT,
    CO2Star,
    DiLoCo,
    EDiT,
    FedAvgPersistent,
    FedAvgReset,
    LocalAdam,
    LocalSGDM,
    PostLocalSGD,
    StreamingDiLoCo,
    Synchronous,
)

__version__ = "0.1.0"

__all__ = [
    "CO2",
    "DESLOC",
    "_C",
    "AEDiT",
    "CO2Star",
    "DiLoCo",
    "EDiT",
    "FedAvgPersistent",
    "FedAvgReset",
    "Handle",
    "LocalAdam",
    "LocalSGDM",
    "PostLocalSGD",
    "StreamingDiLoCo",
    "Synchronous",
    "attach",
    "half_life",
    "ops",
    "optim",
    "suggest_periods",
]
