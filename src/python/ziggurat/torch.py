"""PyTorch over the tiers: optimizers whose state lies in a store, in host memory and on NVMe, and models that do.

    import ziggurat.torch as zt
    optimizer = zt.AdamW(model.parameters(), lr=3e-4, drives={"/mnt/nvme0": "64GiB"}, host_bytes="4GiB")

    off = zt.offload(model, drives={"/mnt/nvme0": "64GiB"}, host_bytes="4GiB")
    optimizer = zt.AdamW(model.parameters(), lr=3e-4, store=off.store)

Each optimizer is a torch.optim.Optimizer with the options of torch's own: schedulers, GradScaler, gradient clipping,
accumulation and closures work as they do there. help(AdamW) and help(offload) have the rest.
"""
from ._activations import offload_activations
from ._errors import UsageError
from ._offload import Offloaded, OffloadStatistics, empty_parameters, offload
from ._offload_tensors import Stored, lent
from ._optimizer import StoredOptimizer

__all__ = ["AdamW", "Adam", "Lion", "SGD", "offload", "Offloaded", "OffloadStatistics", "empty_parameters", "Stored", "lent",
           "offload_activations", "TrainerCallback", "trainer_optimizer"]  # fmt: skip

_COMMON = """

    store              the Store for the state; None: one of its own, with
    host_bytes         of host memory (bytes or "4GiB"; None: nine tenths of what is free) and
    drives             {directory: size} on NVMe, where what does not fit goes
    state              "fp32"; "split": bf16 parameters are one half of their fp32 master, the other is kept; "bf16":
                       so, and moments in bf16; "int8": so, and moments in 8 bits. Parameters in fp32 are their own
                       masters
    overlap            "step": parameters are new when step() returns; "forward": step() returns at once, and
                       attach(model) has each module wait for its own parameters; "backward": parameters are updated
                       while the backward pass runs. All give the same bits. "backward" cannot clip or skip steps
    max_grad_norm      clips the norm of all gradients in step(), without a pass of its own; or clip by torch
    accumulation_steps with overlap="backward": how many backward passes make one step
    segment_bytes      of state that move as one
    state_dict_limit   bytes above which state_dict() names a checkpoint of save() instead; None: no limit
    seed               of stochastic rounding, for "bf16" and "int8"

    Parameters: on the CPU in fp32, bf16 or fp16, updated in place. Those on a GPU pass through pinned host memory, a
    segment at a time, beside the GPU's work. If others write a parameter (weights loaded late), its master is taken
    from it anew, and the logger "ziggurat.torch" tells so.
    """


class AdamW(StoredOptimizer):
    __doc__ = "AdamW with decoupled weight decay; the options of torch.optim.AdamW, and:" + _COMMON

    _decoupled = True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, *, store=None,
                 host_bytes=None, drives=(), state="fp32", overlap="step", max_grad_norm=None, accumulation_steps=1,
                 segment_bytes=8 << 20, state_dict_limit=None, seed=0):  # fmt: skip
        for name, value, fits in (("lr", lr, lr >= 0), ("betas", betas, all(0 <= b < 1 for b in betas)),
                                  ("eps", eps, eps > 0), ("weight_decay", weight_decay, weight_decay >= 0)):  # fmt: skip
            if not fits:
                raise UsageError(f"is {value}", name, "lr and weight_decay are 0 or more, betas in [0, 1), eps above 0")
        # The keys of torch.optim's groups, so that its optimizers load them.
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=False, foreach=None,
                        maximize=False, capturable=False, differentiable=False, fused=None,
                        decoupled_weight_decay=self._decoupled)  # fmt: skip
        super().__init__(params, defaults, store=store, host_bytes=host_bytes, drives=drives, state=state,
                         overlap=overlap, max_grad_norm=max_grad_norm, accumulation_steps=accumulation_steps,
                         segment_bytes=segment_bytes, state_dict_limit=state_dict_limit, seed=seed)  # fmt: skip

    def _set_rule(self, rule, group):
        rule.beta1, rule.beta2 = (float(b) for b in group["betas"])
        rule.eps, rule.decoupled = float(group["eps"]), self._decoupled


class Adam(AdamW):
    __doc__ = "Adam, whose weight decay is added to the gradient; the options of torch.optim.Adam, and:" + _COMMON

    _decoupled = False

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, **options):
        super().__init__(params, lr, betas, eps, weight_decay, **options)


class Lion(StoredOptimizer):
    __doc__ = "Lion: the sign of an interpolated momentum. Its state is one moment, and:" + _COMMON

    _kind, _names = "lion", ("exp_avg",)

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0, *, store=None, host_bytes=None, drives=(),
                 state="fp32", overlap="step", max_grad_norm=None, accumulation_steps=1, segment_bytes=8 << 20,
                 state_dict_limit=None, seed=0):  # fmt: skip
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), store=store,
                         host_bytes=host_bytes, drives=drives, state=state, overlap=overlap,
                         max_grad_norm=max_grad_norm, accumulation_steps=accumulation_steps,
                         segment_bytes=segment_bytes, state_dict_limit=state_dict_limit, seed=seed)  # fmt: skip

    def _set_rule(self, rule, group):
        rule.beta1, rule.beta2 = (float(b) for b in group["betas"])


class SGD(StoredOptimizer):
    __doc__ = "SGD as torch.optim.SGD; all groups have momentum, or none has; and:" + _COMMON

    _kind, _names = "sgd", ("momentum_buffer",)

    def __init__(self, params, lr=1e-3, momentum=0, dampening=0, weight_decay=0, nesterov=False, *, store=None,
                 host_bytes=None, drives=(), state="fp32", overlap="step", max_grad_norm=None, accumulation_steps=1,
                 segment_bytes=8 << 20, state_dict_limit=None, seed=0):  # fmt: skip
        self._with_moment = momentum > 0
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
                        maximize=False, foreach=None, differentiable=False, fused=None)  # fmt: skip
        super().__init__(params, defaults, store=store, host_bytes=host_bytes, drives=drives, state=state,
                         overlap=overlap, max_grad_norm=max_grad_norm, accumulation_steps=accumulation_steps,
                         segment_bytes=segment_bytes, state_dict_limit=state_dict_limit, seed=seed)  # fmt: skip

    def _moment_names(self, group):
        return self._names if self._with_moment else ()

    def _group_names(self, p):
        return self._moment_names(None)

    def _set_rule(self, rule, group):
        if (group["momentum"] > 0) != self._with_moment:
            raise UsageError(f"is {group['momentum']} in a group", "momentum", "above 0 in all groups, or in none")
        rule.momentum, rule.dampening = float(group["momentum"]), float(group["dampening"])
        rule.nesterov = bool(group["nesterov"])


def __getattr__(name):
    # Needs transformers, which nothing else here does.
    if name in ("TrainerCallback", "trainer_optimizer"):
        from . import _trainer

        return getattr(_trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
