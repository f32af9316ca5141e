"""How a loss becomes an optimizer step: plain PyTorch, or Accelerate with DDP or DeepSpeed's ZeRO."""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cluster.config import ClusterConfig
from cluster.world import World

CHECKPOINT = "engine.safetensors"
"""Every parameter whole in float32, with Adam's two moments: it fits any number of workers and any strategy."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Engine(Protocol):
    """A module prepared for training."""

    model: nn.Module                                           # call this to train
    module: nn.Module                                          # the same weights without the wrapper, to evaluate
    device: torch.device

    def step(self, loss: Tensor, learning_rate: float) -> float:
        """Backward, clip, update; every rank calls it.

        Returns:
            The norm of the unclipped mean gradient; where that is not finite, nothing was updated.
        """
        ...

    def weights(self) -> dict[str, Tensor]:
        """A copy of all weights in float32 on the CPU, whole on every rank; every rank calls it."""
        ...

    def save(self, folder: Path) -> None:
        """Rank 0 writes ``CHECKPOINT``, weights and optimizer state; every rank calls it."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from ``save`` of any engine and any number of ranks; every rank calls it."""
        ...


class PlainEngine:
    """One process without any framework: the yardstick for the others."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, clipping: float) -> None:
        self.device = torch.device("cpu")
        self.model = self.module = module.to(self.device)
        self.optimizer = optimizer
        self.clipping = clipping
        self._writes = True

    def step(self, loss: Tensor, learning_rate: float) -> float:
        """One AdamW step."""
        set_learning_rate(self.optimizer, learning_rate)
        self._backward(loss)
        norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), self.clipping))
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def weights(self) -> dict[str, Tensor]:
        """The state dict."""
        return _copied(self.module)

    def save(self, folder: Path) -> None:
        """What this process holds is the whole."""
        if self._writes:
            whole: dict[str, Tensor] = {}
            for name, value in self.module.named_parameters():
                state = self.optimizer.state[value]
                whole |= {name: value.detach()} | {f"{name}:{moment}": state[moment] for moment in MOMENTS if state}
            _write(folder, whole, _updates_made(self.optimizer.state.values()))

    def load(self, folder: Path) -> None:
        """Copy every tensor into its place."""
        with safe_open(folder / CHECKPOINT, "pt") as whole, torch.no_grad():
            updates = _updates(whole)
            for name, value in self.module.named_parameters():
                value.copy_(whole.get_tensor(name))
                if updates:
                    state = {moment: whole.get_tensor(f"{name}:{moment}").to(value) for moment in MOMENTS}
                    self.optimizer.state[value] = {"step": torch.tensor(float(updates)), **state}


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
        self._world = world
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
        """Gather each parameter and its moments from the ranks that share them."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        whole: dict[str, Tensor] = {}
        updates = _updates_made(self._states())
        for name, parameter in self.module.named_parameters():
            values = {name: safe_get_full_fp32_param(parameter)}
            for moment in MOMENTS if updates else ():
                values[f"{name}:{moment}"] = safe_get_full_optimizer_state(parameter, moment)
            if self._world.rank == 0:                          # the others would only hold memory
                whole |= {key: value.to("cpu", copy=True).reshape(_shape(parameter)) for key, value in values.items()}
        if self._world.rank == 0:
            _write(folder, whole, updates)

    def load(self, folder: Path) -> None:
        """Every rank takes its parts: of the master weights, of the moments, and of the weights that it computes with.

        DeepSpeed makes an optimizer's state at its first step; here it is made before.
        """
        with safe_open(folder / CHECKPOINT, "pt") as whole, torch.no_grad():
            updates = _updates(whole)
            if updates:
                self._make_states(updates)
            for name, parameter in self.module.named_parameters():
                self._set(parameter, whole.get_tensor(name))
                for moment in MOMENTS if updates else ():
                    self._set(parameter, whole.get_tensor(f"{name}:{moment}"), moment)

    def _make_states(self, updates: int) -> None:
        """Have moments, and where there are master weights of single parameters, these know of them."""
        for flat, state in zip(self._flat_parameters(), self._states(), strict=True):
            for moment in MOMENTS:
                state.setdefault(moment, torch.zeros_like(flat))
            state["step"] = torch.tensor(float(updates))
        if self.stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()

    @property
    def _zero(self) -> Any:
        """DeepSpeed's optimizer, which shards the one that it was given."""
        return self.model.optimizer

    def _flat_parameters(self) -> list[Tensor]:
        """This rank's master weights as the sharded optimizer sees them."""
        flat: list[Tensor] = (
            self._zero.fp32_partitioned_groups_flat if self.stage == 3 else self._zero.single_partition_of_fp32_groups
        )
        return flat

    def _states(self) -> Iterator[dict[str, Any]]:
        """Of the sharded optimizer."""
        return (self._zero.optimizer.state[flat] for flat in self._flat_parameters())

    def _set(self, parameter: nn.Parameter, value: Tensor, moment: str | None = None) -> None:
        """Give this rank its part of a weight or moment."""
        import deepspeed
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        value = value.to(self.device)
        if self.stage < 3:
            if moment is not None:
                safe_set_full_optimizer_state(parameter, value, moment)
                return
            safe_set_full_fp32_param(parameter, value)
            parameter.copy_(value)
            return
        rows = parameter.ds_tensor.numel()                     # type: ignore[attr-defined]
        padded = F.pad(value.flatten(), (0, rows * self._world.size - value.numel()))
        part = padded[self._world.rank * rows :][:rows]
        if moment is not None:
            safe_set_local_optimizer_state(parameter, part, moment)
            return
        safe_set_local_fp32_param(parameter, part)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(value)


def _shape(parameter: nn.Parameter) -> torch.Size:
    """A parameter's own shape; ZeRO-3 leaves it empty between steps."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _write(folder: Path, whole: dict[str, Tensor], updates: int) -> None:
    tensors = {name: value.to("cpu").contiguous() for name, value in whole.items()}
    save_file(tensors, folder / CHECKPOINT, {"updates": str(updates)})


def _updates_made(states: Iterable[dict[str, Any]]) -> int:
    """By an optimizer with these states, which are empty before its first."""
    return next((int(state["step"]) for state in states if state), 0)


def _updates(checkpoint: Any) -> int:
    """How often the optimizer had changed the weights."""
    return int(checkpoint.metadata()["updates"])


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
