"""Where a run is computed. Nothing here decides what is computed, so nothing here enters a stage's key."""

from typing import Literal

from pydantic import BaseModel, NonNegativeInt, PositiveFloat, PositiveInt


class ClusterConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Workers, devices and the parallel strategy."""

    workers: PositiveInt = 1                                   # training processes; each has a GPU or a share of cores
    device: Literal["auto", "cpu", "gpu"] = "auto"             # auto: gpu if the Ray cluster has any
    strategy: Literal["ddp", "zero1", "zero2", "zero3"] = "ddp"
    precision: Literal["auto", "fp32", "bf16"] = "auto"        # auto: bf16 on a GPU, fp32 on a CPU
    cpus_per_worker: PositiveInt | Literal["auto"] = "auto"    # auto: an equal share of the cores; 4 beside a GPU
    max_failures: NonNegativeInt = 3                           # times that training restarts from its checkpoint
    placement_timeout: PositiveFloat = 45.0                    # seconds to wait for missing nodes before giving up
    collective_timeout: PositiveFloat = 1800.0                 # seconds before a hanging collective is an error
