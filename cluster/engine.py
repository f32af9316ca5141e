"""How a loss becomes an optimizer step: plain PyTorch, or Accelerate with DDP or DeepSpeed's ZeRO."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cluster.config import ClusterConfig
from cluster.world import World


class Engine(Protocol):
    """A module prepared for training."""

    model: nn.Module                                           # call this to train
    module: nn.Module                                          # the same weights without the wrapper, to evaluate
    device: torch.device

    def step(self, loss: Tensor, learning_rate: float) -> float:
        """Backward, clip, update; every rank calls it. Returns the norm of the unclipped mean gradient."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """A copy of all weights in float32 on the CPU, whole on every rank; every rank calls it."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state; every rank calls it."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from ``save``; every rank calls it."""
        ...


class PlainEngine:
    """One process without any framework: the yardstick for the others."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, clipping: float) -> None:
        self.device = torch.device("cpu")
        self.model = self.module = module.to(self.device)
        self.optimizer = optimizer
        self.clipping = clipping

    def step(self, loss: Tensor, learning_rate: float) -> float:
        """One AdamW step."""
        set_learning_rate(self.optimizer, learning_rate)
        self._backward(loss)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def weights(self) -> dict[str, Tensor]:
        """The state dict."""
        return _copied(self.module)

    def save(self, folder: Path) -> None:
        """``folder/engine.pt``."""
        torch.save({"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / "engine.pt")

    def load(self, folder: Path) -> None:
        """From ``folder/engine.pt``."""
        state = torch.load(folder / "engine.pt", map_location="cpu", weights_only=True)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class DDPEngine(PlainEngine):
    """DistributedDataParallel, prepared by Accelerate; bf16 is autocast with float32 weights."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        clipping: float,
        world: World,
        on_gpu: bool,
        bf16: bool,
    ) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        self._accelerator = Accelerator(
            cpu=not on_gpu,
            mixed_precision="bf16" if bf16 else "no",
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )
        super().__init__(module, optimizer, clipping)
        self.device = self._accelerator.device
        self.model, self.optimizer = self._accelerator.prepare(module, optimizer)
        self._writes = world.rank == 0
        if world.size > 1 and not isinstance(self.model, nn.parallel.DistributedDataParallel):
            raise RuntimeError(f"Accelerate prepared a {type(self.model).__name__} where DDP was asked for")

    def _backward(self, loss: Tensor) -> None:
        """Leave the gradient averaged over ranks."""
        self._accelerator.backward(loss)

    def save(self, folder: Path) -> None:
        """As one process does, by rank 0: every rank holds the same."""
        if self._writes:
            super().save(folder)


class DeepSpeedEngine:
    """A DeepSpeed engine of ZeRO stage 1, 2 or 3, prepared by Accelerate."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        clipping: float,
        world: World,
        on_gpu: bool,
        bf16: bool,
        stage: int,
        micro_batch_size: int,
    ) -> None:
        os.environ["DS_ACCELERATOR"] = "cuda" if on_gpu else "cpu"
        import deepspeed
        from accelerate import Accelerator, DeepSpeedPlugin

        # On a CPU, DeepSpeed would compile an all-reduce of its own: a minute or more, a compiler to be there, and
        # after a kill at that time a lock file on which every later start waits for ever. Gloo serves as well.
        if not on_gpu:
            deepspeed.ops.__compatible_ops__ = {}

        plugin = DeepSpeedPlugin(
            hf_ds_config={
                "train_micro_batch_size_per_gpu": micro_batch_size,
                "train_batch_size": micro_batch_size * world.size,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": clipping,
                "bf16": {"enabled": bf16},
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 2**31,
            }
        )
        self._accelerator = Accelerator(deepspeed_plugin=plugin)    # with cpu=True it would silently fall back to DDP
        self.device = self._accelerator.device
        self.model, self.optimizer = self._accelerator.prepare(module, optimizer)
        self.module = self.model.module
        self.stage = stage
        if not isinstance(self.model, deepspeed.DeepSpeedEngine):
            raise RuntimeError(f"Accelerate prepared a {type(self.model).__name__}, no DeepSpeed engine")

    def step(self, loss: Tensor, learning_rate: float) -> float:
        """One step; under DeepSpeed Accelerate's backward also clips, updates and zeroes."""
        set_learning_rate(self.optimizer, learning_rate)
        self._accelerator.backward(loss)
        norm = self.model.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def weights(self) -> dict[str, Tensor]:
        """The state dict; under ZeRO-3 gathered from all ranks."""
        import deepspeed

        parameters = list(self.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters) if self.stage == 3 else nullcontext():
            return _copied(self.module)

    def save(self, folder: Path) -> None:
        """DeepSpeed's checkpoint, each rank its shard."""
        self.model.save_checkpoint(str(folder), tag="engine", save_latest=False)

    def load(self, folder: Path) -> None:
        """From DeepSpeed's checkpoint of the same number of workers."""
        loaded, _ = self.model.load_checkpoint(str(folder), tag="engine")
        if loaded is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.to("cpu", torch.float32, copy=True) for name, value in module.state_dict().items()}


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """The schedule is a function of the step alone, so there is no scheduler state to lose."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def build_engine(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    clipping: float,
    config: ClusterConfig,
    world: World,
    micro_batch_size: int,
) -> Engine:
    """The engine that ``config.strategy`` names.

    Args:
        module: what computes the loss.
        optimizer: over ``module``'s parameters.
        clipping: greatest norm of the gradient.
        config: strategy and precision.
        world: the ranks that train together.
        micro_batch_size: sentences a rank sees at each step.
    """
    on_gpu = config.device == "gpu" or (config.device == "auto" and torch.cuda.is_available())
    bf16 = config.precision == "bf16" or (config.precision == "auto" and on_gpu and torch.cuda.is_bf16_supported())
    if config.strategy == "ddp":
        return DDPEngine(module, optimizer, clipping, world, on_gpu, bf16)
    stage = int(config.strategy[-1])
    return DeepSpeedEngine(module, optimizer, clipping, world, on_gpu, bf16, stage, micro_batch_size)
