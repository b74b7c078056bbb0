"""All methods. Each says in `recipe` what it comes down to; the engine does the rest."""

from __future__ import annotations

from .methods_clocks import (
    DESLOC,
    FedAvgPersistent,
    FedAvgReset,
    LocalAdam,
    LocalSGDM,
)
from .methods_edit import AEDiT, EDiT
from .methods_outer import CO2, CO2Star, DiLoCo, PostLocalSGD, StreamingDiLoCo, Synchronous

METHODS = (
    EDiT,
    AEDiT,
    Synchronous,
    PostLocalSGD,
    DiLoCo,
    StreamingDiLoCo,
    CO2,
    CO2Star,
    LocalAdam,
    DESLOC,
    FedAvgPersistent,
    FedAvgReset,
    LocalSGDM,
)
"""What `attach` takes."""
