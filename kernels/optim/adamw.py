"""`FusedAdamW`: unscaling, global norm, clipping, skipping and the step over all parameters in two
launches.

Never synchronizes with the GPU: an overflow skips the update, and its step count, on the device.
Does not depend on sharding; the caller passes the norm over all ranks to `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from kernels import checks, runtime
from kernels.dispatch import Candidate, choose
from kernels.optim import launch, torch_step
from kernels.optim.step_options import ParameterUpdate, StepOptions


class FusedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's rule, options and state, with moments in fp32 for any parameter dtype.

    `clip_norm`: clips the gradients' global norm (as `torch.nn.utils.clip_grad_norm_`) without
    changing the gradients. `stochastic_rounding`: bf16 parameters are rounded up or down at random,
    so that small updates are not lost and no fp32 copy is needed; `seed` seeds the random numbers.
    After a step `grad_norm` (after unscaling, before clipping; None if not computed) and `skipped`
    (1: an overflow) are fp32 tensors of one element on the device. Parameters: fp32, fp16 or bf16,
    on one device.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        clip_norm: float | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        checks.positive("eps", eps)
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, not {value!r}.")
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; it must be at least zero, and finite.")
        checks.integer("seed", seed, None)
        for index, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"betas[{index}] is {beta}; it must be at least 0 and below 1.")
        if clip_norm is not None:
            checks.positive("clip_norm", clip_norm, finite=False)
        self.clip_norm, self.stochastic_rounding, self.seed = clip_norm, stochastic_rounding, seed
        self.grad_norm: torch.Tensor | None = None
        self.skipped: torch.Tensor | None = None
        self._backend = backend
        self._ticket: torch.Tensor | None = None
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        params_all = [p for group in self.param_groups for p in group["params"]]
        for index, param in enumerate(params_all):
            checks.dtype_in(f"parameter {index}", param)
            checks.same_device(first=params_all[0], **{f"parameter {index}": param})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        inv_scale: torch.Tensor | None = None,
        grad_norm: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> Any:
        """One update of every parameter that has a gradient.

        inv_scale: fp32, one element: gradients are multiplied by it first. grad_norm: their norm if
        already known (over all ranks); it is not computed then. found_inf: non-zero skips the
        update. Raises TypeError or ValueError before anything changes.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [
            (group, p) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if not params:
            return loss
        measured = grad_norm is None and (self.clip_norm is not None or inv_scale is not None)
        self._check(params, inv_scale, grad_norm, found_inf, measured)
        work = [self._item(group, p) for group, p in params]
        if grad_norm is not None and inv_scale is not None and found_inf is None:
            found_inf = (~grad_norm.isfinite()).float()
        options = StepOptions(
            inv_scale,
            grad_norm,
            found_inf,
            measured,
            self.clip_norm,
            self.stochastic_rounding,
            self.seed,
        )
        tensors = [t for item in work for t in item.row]
        gaps = next(
            (
                f"a tensor of shape {tuple(t.shape)} is not contiguous"
                for t in tensors
                if not t.is_contiguous()
            ),
            None,
        )
        chosen = choose(
            "adamw",
            {
                "dtype": " ".join(
                    sorted({str(item.param.dtype).removeprefix("torch.") for item in work})
                ),
                "clip": self.clip_norm is not None,
                "scaled": inv_scale is not None,
                "stochastic": self.stochastic_rounding,
            },
            [
                Candidate("own", runtime.why_not(*tensors) or gaps),
                Candidate("torch", torch_step.torch_why_not(work, options)),
                Candidate("reference"),
            ],
            self._backend,
        )
        if chosen.backend == "own":
            self._ticket = launch.get_ticket(work[0].param.device, self._ticket)
            self.grad_norm, self.skipped = launch.step(work, options, self._ticket)
        else:
            step_function = (
                torch_step.step_by_torch
                if chosen.backend == "torch"
                else torch_step.step_by_reference
            )
            self.grad_norm, self.skipped = step_function(work, options)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but moments and counts stay fp32 for any parameter dtype, on the parameter's
        device.
        """
        saved = {k: dict(v) for k, v in state_dict["state"].items()}
        super().load_state_dict(state_dict)
        order = [p for group in self.param_groups for p in group["params"]]
        names = [i for group in state_dict["param_groups"] for i in group["params"]]
        for name, p in zip(names, order, strict=True):
            for key, value in saved.get(name, {}).items():
                self.state[p][key] = value.to(device=p.device, dtype=torch.float32, copy=True)

    def _item(self, group: dict[str, Any], p: torch.Tensor) -> ParameterUpdate:
        """A parameter's launch arguments; for a sharded parameter, of this rank's part."""
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        row = (p.detach(), p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
        return ParameterUpdate(
            tuple(_local(t) for t in row),
            group["lr"],
            group["betas"],
            group["eps"],
            group["weight_decay"],
        )

    def _check(
        self,
        params: list[tuple[dict[str, Any], torch.Tensor]],
        inv_scale: torch.Tensor | None,
        grad_norm: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        measured: bool,
    ) -> None:
        for name, x in (
            ("inv_scale", inv_scale),
            ("grad_norm", grad_norm),
            ("found_inf", found_inf),
        ):
            if x is not None:
                checks.dtype_in(name, x, (torch.float32,))
                checks.same_device(parameters=params[0][1], **{name: x})
                if x.numel() != 1:
                    raise ValueError(
                        f"{name} has shape {tuple(x.shape)}; it must have one element."
                    )
        for group, p in params:
            assert p.grad is not None
            if isinstance(group["lr"], torch.Tensor):
                raise TypeError(
                    "lr is a tensor; FusedAdamW takes numbers: set group['lr'] to a float."
                )
            if p.grad.is_sparse:
                raise TypeError(
                    "a gradient is sparse; FusedAdamW requires dense ones: sparse=False in the "
                    "embedding."
                )
            checks.dtype_in("a gradient", p.grad)
            if measured and hasattr(p, "to_local"):
                raise ValueError(
                    "parameters are sharded, so the local norm is not the global norm: pass "
                    "step(grad_norm=…)."
                )


def _local(t: Any) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor unchanged."""
    part: Any = t.to_local() if hasattr(t, "to_local") else t
    # its collective may still be in progress
    local: torch.Tensor = part.wait() if hasattr(part, "wait") else part
    return local
