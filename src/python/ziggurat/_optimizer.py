"""What the optimizers of ziggurat.torch have in common: steps, their overlap, state, checkpoints, life."""
import concurrent.futures
import contextlib
import logging
import math
import os
import warnings
import weakref

import torch
from torch.optim.optimizer import Optimizer

from . import _core, _offload_tensors, _optimizer_files, _staging
from ._errors import ForkError, NumericError, UsageError
from ._measure import probe
from ._optimizer_offload import TYPES, OffloadedUpdates, interrupts_later, is_stored, lent
from ._store import Store, bytes_of

_log = logging.getLogger("ziggurat.torch")


def _local(t):
    """The tensor's part on this rank, for a DTensor; else the tensor."""
    return t.to_local() if hasattr(t, "to_local") else t


def _spread_as(values, p):
    """This rank's part of a tensor as a DTensor that is spread over the ranks as p is; p may be a plain tensor."""
    if not hasattr(p, "to_local"):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(values, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


def _split(those):
    """(p, group) pairs of parameters on the CPU, and of the others by device."""
    near, far = [], {}
    for p, group in those:
        device = _local(p).device
        (near if device.type == "cpu" else far.setdefault(device, [])).append((p, group))
    return near, far


class _Held:
    """What `state[p]` holds in place of tensors: the number of the parameter in the store. Others leave it alone."""

    def __init__(self, index, nbytes):
        self.index, self.nbytes = index, nbytes

    def __repr__(self):
        return f"<state in the store, {self.nbytes} bytes>"


class StoredOptimizer(OffloadedUpdates, Optimizer):
    """What the optimizers have in common. `_kind`, `_moments`: of the C++ library; `_names`: of torch's moments."""

    _kind, _names = "adam", ("exp_avg", "exp_avg_sq")
    # GradScaler sets grad_scale and found_inf, calls step() always, and deletes them.
    _step_supports_amp_scaling = True

    def __init__(self, params, defaults, *, store, host_bytes, drives, state, overlap, max_grad_norm,
                 accumulation_steps, segment_bytes, state_dict_limit, seed):  # fmt: skip
        if overlap not in ("step", "forward", "backward"):
            raise UsageError(f'"{overlap}" is none', "overlap", '"step", "forward" or "backward"')
        if overlap == "backward" and max_grad_norm is not None:
            raise UsageError("needs all gradients before the first update", "max_grad_norm",
                             'take overlap="forward" or "step", or no clipping')  # fmt: skip
        if accumulation_steps < 1:
            raise UsageError(f"is {accumulation_steps}", "accumulation_steps", "1 or more")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UsageError(f"is {max_grad_norm}", "max_grad_norm", "a number above 0, or None")
        self._own_store = store is None
        if not self._own_store and (host_bytes is not None or drives):
            raise UsageError("is given beside store, whose budgets hold", "drives" if drives else "host_bytes",
                             "give a Store, or host_bytes and drives for one of the optimizer's own")  # fmt: skip
        if self._own_store and host_bytes is None:
            if drives:
                raise UsageError("is not given", "host_bytes", "say how much host memory the state may take")
            host_bytes = probe().available_memory * 9 // 10  # a limit: memory is taken when it is used
        self._store = Store(host_bytes=host_bytes, drives=drives) if self._own_store else store
        self._segment_bytes, self._format, self._seed = bytes_of(segment_bytes, "segment_bytes"), state, seed
        self._overlap, self._max_grad_norm, self._accumulation = overlap, max_grad_norm, accumulation_steps
        self._limit = None if state_dict_limit is None else bytes_of(state_dict_limit, "state_dict_limit")
        self._core = _core.Optimizer(self._store._core, self._kind, state, len(self._moment_names(defaults)),
                                     self._segment_bytes, seed)  # fmt: skip
        self._numbers, self._keys, self._versions, self._hooks = {}, {}, {}, {}
        self._saved = None  # the manifest of a checkpoint that has what the state is now
        self._jobs, self._backwards, self._norm, self._process = {}, {}, None, os.getpid()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "ziggurat-optimizer")  # no thread before its first job
        self._staged = {}  # by device
        self._attached = False  # to a model, whose modules wait for what they read
        super().__init__(params, defaults)

    def _moment_names(self, group):
        return self._names

    # ---- parameters ----

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for key in ("amsgrad", "maximize"):
            if group.get(key):
                raise UsageError("is not offered", key, "leave it False")
        names = group.get("param_names")
        for i, p in enumerate(group["params"]):
            local = _local(p)
            if local.dtype not in TYPES:
                raise UsageError(f"is in {local.dtype}", f"parameter {i} of group {len(self.param_groups) - 1}",
                                 "float32, bfloat16 or float16")  # fmt: skip
            if p in self._numbers:
                raise UsageError("is named twice", f"parameter {i} of group {len(self.param_groups) - 1}",
                                 "name each once; those that modules share are updated once")  # fmt: skip
            number = len(self._numbers)
            key = self._keys[p] = names[i] if names else f"param.{number}"
            self._numbers[p] = self._core.add(self._unused_name(key), key, local.numel(), TYPES[local.dtype])
            if is_stored(p):
                _offload_tensors.watch_gradient(p)  # before the hook below, which finds the gradient in the store then
            if self._overlap == "backward" and p.requires_grad:
                # Not by a reference to the optimizer: a parameter's hooks are out of the garbage collector's sight.
                update = weakref.WeakMethod(self._after_backward)
                self._hooks[p] = p.register_post_accumulate_grad_hook(lambda p: (call := update()) and call(p))

    def _unused_name(self, key):
        name, again = f"optimizer.{key}", 0
        taken = self._store.__dict__.setdefault("_optimizer_names", set())
        while name in taken:
            again += 1
            name = f"optimizer.{again}.{key}"
        taken.add(name)
        return name

    def _ready(self, p):
        """The state of p, made where p has none yet; knows what others have written to p."""
        state = self.state[p]
        if "step" not in state:
            state.update(self._begin_state(p, 0)[0])
        elif self._versions.get(p) != p._version:
            self._known_weights(p)
        return state

    @staticmethod
    def _host_copy(t):
        """The tensor itself where the kernels can write it, else a copy in host memory, for which a GPU is awaited."""
        t = t.detach()
        return (t if t.device.type == "cpu" else t.cpu()).contiguous()

    # ---- steps ----

    def _rule(self, group, step, factor):
        rule = _core.Rule()
        rule.lr, rule.weight_decay = float(group["lr"]), float(group["weight_decay"])
        rule.step, rule.grad_scale = step, factor
        self._set_rule(rule, group)
        return rule

    def _dense_gradient(self, p):
        if p.grad.is_sparse:
            raise UsageError("is sparse", f"gradient of parameter {self._numbers[p]}", "dense gradients are offered")
        return _local(p.grad)

    def _item(self, p, group, factor):
        """What the library needs for one parameter on the CPU, and what must be kept until it is done."""
        grad = self._host_copy(self._dense_gradient(p))
        if grad.dtype not in TYPES:
            grad = grad.float()
        rule = self._rule(group, int(self._ready(p)["step"]) + 1, factor)
        weights = self._host_copy(_local(p))
        item = (self._numbers[p], weights.data_ptr(), grad.data_ptr(), TYPES[grad.dtype], rule, -1)
        return item, (weights, grad)

    def _item_of_device(self, staged, p, group, factor):
        """The same for one on a GPU."""
        grad, local = self._dense_gradient(p), _local(p)
        rule = self._rule(group, int(self._ready(p)["step"]) + 1, factor)
        master_elsewhere = local.dtype == torch.float16 or (local.dtype == torch.bfloat16 and self._format == "fp32")
        return staged.item(self._numbers[p], local, grad, rule, not master_elsewhere)

    def _written(self, p, weights=None):
        """p has new values: in `weights`, or where that is None or p's own memory, in place."""
        local = _local(p).detach()
        if weights is not None and (local.data_ptr() != weights.data_ptr() or local.device != weights.device):
            local.copy_(weights)
        torch.autograd.graph.increment_version(p)
        self._versions[p] = p._version

    @torch.no_grad()
    def step(self, closure=None):
        """One step of all parameters that have a gradient; returns the closure's loss.

        With overlap="step" the parameters are new when it returns. Ctrl-C does not cut an update in two. Raises IoError
        after a failed transfer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._warn_of_forwards_that_did_not_wait()
        self.flush()
        self._saved = None
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self._overlap == "backward":
            if scale is not None or found_inf is not None:
                raise UsageError("has updated the parameters before GradScaler could look", 'overlap="backward"',
                                 'take "forward" or "step" with a GradScaler')  # fmt: skip
            self._backwards.clear()
            return loss
        factor = 1.0 if scale is None else 1.0 / float(scale)
        if found_inf is not None and float(found_inf) > 0:
            return loss  # not a byte changes
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self._max_grad_norm is not None:
            self._norm = self._gradient_norm([p for p, _ in trained]) * factor
            if not math.isfinite(self._norm):
                raise NumericError(f"is {self._norm}", "norm of the gradients",
                                   "nothing was changed; lower the learning rate, or warm up longer")  # fmt: skip
            factor *= min(1.0, self._max_grad_norm / (self._norm + 1e-6))
        with interrupts_later() if any(is_stored(p) for p, _ in trained) else contextlib.nullcontext():
            if self._overlap == "step":
                self._step_at_once(trained, factor)
            else:
                self._begin(trained, factor)
        return loss

    def _warn_of_forwards_that_did_not_wait(self):
        if self._overlap == "forward" and self._jobs and not self._attached:
            warnings.warn('overlap="forward" without attach(model) or flush() before the forward pass: it may have '
                          "read parameters that were being updated; call optimizer.attach(model) once", stacklevel=5)  # fmt: skip

    def _step_at_once(self, trained, factor):
        near, far = _split([(p, group) for p, group in trained if not is_stored(p)])
        work = [(p, *self._item(p, group, factor)) for p, group in near]
        if work:
            self._core.update([item for _, item, _ in work], True)
        for p, _, (weights, _) in work:
            self.state[p]["step"] += 1
            self._written(p, weights)
        for device, those in far.items():
            self._begin_on(device, those, factor, record=not near)
        self._update_stored(trained, factor, record=not near and not far)
        try:
            self.flush()
        except KeyboardInterrupt:
            self.flush()  # the step is made as a whole first
            raise

    def _begin(self, those, factor):
        """Hands updates to the worker thread: one by one on the CPU, together on a GPU."""
        self._check_process()
        for p, group in those:
            if is_stored(p):
                self._begin_stored(p, group, factor)
        near, far = _split([(p, group) for p, group in those if not is_stored(p)])
        for p, group in near:
            item, kept = self._item(p, group, factor)
            self._jobs[p] = (self._worker.submit(self._core.update, [item], False), kept)
        for device, there in far.items():
            self._begin_on(device, there, factor, record=False)

    def _begin_on(self, device, those, factor, record):
        if device not in self._staged:
            self._staged[device] = _staging.Updates(self._core, device, TYPES)
        staged = self._staged[device]
        items = [self._item_of_device(staged, p, group, factor) for p, group in those]
        job = self._worker.submit(staged.run, items, staged.ready(), record)
        for (p, _), item in zip(those, items):
            self._jobs[p] = (job, item)

    def _finish(self, p):
        if p not in self._jobs:
            return
        if is_stored(p):
            return self._finish_stored(p)
        job, kept = self._jobs[p]
        concurrent.futures.wait([job])  # Ctrl-C here leaves the job to the next call
        del self._jobs[p]
        done = job.result()
        self.state[p]["step"] += 1
        if done is None:
            self._written(p, kept[0])
        else:
            self._staged[_local(p).device].await_on_current_stream(done)
            self._written(p)

    @torch.no_grad()
    def _after_backward(self, p):
        self._backwards[p] = self._backwards.get(p, 0) + 1
        if self._backwards[p] % self._accumulation == 0:
            self._finish(p)
            group = next(g for g in self.param_groups if any(p is q for q in g["params"]))
            self._begin([(p, group)], 1.0)

    def flush(self):
        """Waits until all updates that were begun are done. Everything that reads the state calls it by itself."""
        self._check_process()
        for p in list(self._jobs):
            self._finish(p)

    def _check_process(self):
        if os.getpid() != self._process:  # the worker's thread is the parent's
            raise ForkError("was made before this process was forked, and can be used in the parent alone",
                            "this optimizer",
                            "make it in the child, or start processes by spawn instead of fork")  # fmt: skip

    def attach(self, model):
        """For overlap="forward": each module's forward waits for the updates of its own parameters alone.

        Without it call flush() before each forward: the next step() waits for all updates, but the forward does not.
        Reading or writing parameters outside of a forward pass needs flush() before; model.state_dict() and
        load_state_dict() do that, and so does each forward in evaluation.
        """
        # Modules whose parameters others read without a call of their forward.
        uncalled = (torch.nn.ParameterList, torch.nn.ParameterDict,
                    torch.nn.modules.linear.NonDynamicallyQuantizableLinear)  # fmt: skip

        # FSDP2 gathers the parameters of a module before its forward, and of others with it.
        together = any(hasattr(p, "to_local") for p in self._numbers)

        def before(module, _inputs):
            if together or not module.training:
                return self.flush()
            for m in (module, *(c for c in module.children() if isinstance(c, uncalled))):
                for p in m.parameters(recurse=False):
                    self._finish(p)

        self._attached = True
        hooks = [m.register_forward_pre_hook(before, prepend=True) for m in model.modules()]
        hooks += [m.register_state_dict_pre_hook(lambda *_: self.flush()) for m in model.modules()]
        # What is loaded must not be overwritten by an update that began before.
        hooks += [m.register_load_state_dict_pre_hook(lambda *_: self.flush()) for m in model.modules()]
        return hooks

    def zero_grad(self, set_to_none=True):
        """As torch's; gradients that updates still read are left to them first."""
        if not set_to_none:
            self.flush()
        super().zero_grad(set_to_none)

    def _gradient_norm(self, params):
        squares, far = [], {}
        for p in params:
            if hasattr(p.grad, "to_local"):
                raise UsageError("cannot be computed for parameters that are spread over ranks", "max_grad_norm",
                                 "clip by torch.nn.utils.clip_grad_norm_")  # fmt: skip
            if p.grad.device.type == "cpu":
                with lent(p.grad):
                    g = self._host_copy(p.grad)
                    squares.append(self._core.gradient_square(g.data_ptr(), g.numel(), TYPES[g.dtype]))
                    del g
            else:  # on the GPU, which has them at hand
                far.setdefault(p.grad.device, []).append(torch.linalg.vector_norm(p.grad, dtype=torch.float64))
        total = 0.0
        for square in squares:  # one after the other: sum() would compensate from Python 3.12 on
            total += square
        norm = math.sqrt(total)
        return math.hypot(norm, *(torch.linalg.vector_norm(torch.stack(norms)).item() for norms in far.values()))

    @property
    def grad_norm(self):
        """The norm of all gradients in the last step, before clipping; None without max_grad_norm."""
        return self._norm

    # ---- state ----

    def _numbered(self):
        return [p for group in self.param_groups for p in group["params"]]

    def state_bytes(self):
        """Bytes that the state takes in the store."""
        return sum(self._core.bytes(n) for n in self._numbers.values())

    def above_limit(self):
        """Whether the state of parameters that have had a step is larger than state_dict_limit."""
        begun = (n for p, n in self._numbers.items() if "step" in self.state.get(p, {}))
        return self._limit is not None and sum(self._core.bytes(n) for n in begun) > self._limit

    @torch.no_grad()
    def state_dict(self):
        """As torch.optim's own, in fp32, with "master" for parameters that are not in fp32.

        torch.optim's optimizer of the same name loads it, and this one loads what that one saves. All of it is in
        memory. Above state_dict_limit bytes it names the checkpoint that save() has written since the last step
        instead; where there is none, it raises RuntimeError.
        """
        self.flush()
        above = self.above_limit()
        if above and self._saved is None:
            raise RuntimeError(f"the state has {self.state_bytes()} bytes, more than state_dict_limit ({self._limit}): "
                               "call save(directory) first, and state_dict() refers to what it has written")  # fmt: skip
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        params = self._numbered()
        index = {p: i for i, p in enumerate(params)}
        groups = []
        for group in self.param_groups:
            groups.append({k: v for k, v in group.items() if k != "params"})
            groups[-1]["params"] = [index[p] for p in group["params"]]
        out = {"state": {}, "param_groups": groups}
        if above:
            out["ziggurat"] = {"format": 1, "manifest": self._saved}
        else:
            out["state"] = {i: self._read(p) for i, p in enumerate(params) if "step" in self.state.get(p, {})}
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, out)
            out = out if changed is None else changed
        return out

    def _read(self, p):
        number, local = self._numbers[p], _local(p)
        with lent(p):
            return self._read_state(p, number, local)

    def _read_state(self, p, number, local):
        weights = self._known_weights(p)
        state = {"step": self.state[p]["step"].clone()}
        parts = [(name, str(i)) for i, name in enumerate(self._group_names(p))]
        if local.dtype != torch.float32:
            parts.append(("master", "master"))
        for name, part in parts:
            values = torch.empty(local.shape, dtype=torch.float32)
            self._core.read(number, part, weights.data_ptr(), values.data_ptr())
            state[name] = _spread_as(values, p)
        if self._format == "int8" and parts:
            state["codes"] = torch.empty(self._core.bytes(number), dtype=torch.uint8)
            self._core.copy_blocks(number, True, state["codes"].data_ptr())
        return state

    def _known_weights(self, p):
        """The weights in host memory; their masters know what others have written to them."""
        weights = self._host_copy(_local(p))
        if self._versions.get(p) != p._version:
            _log.info("%s was written by others since its last step: its master is taken from it", self._keys[p])
            self._core.weights_changed(self._numbers[p], weights.data_ptr())
            self._versions[p] = p._version
        return weights

    def _group_names(self, p):
        return self._names

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Takes the state of state_dict(), of this class or of torch.optim's optimizer of the same name.

        Moments keep all their bits, whatever type and device the parameters have. Where it names a checkpoint that is
        loaded, with the weights in it.
        """
        self.flush()
        self._saved = None
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved, params = state_dict["param_groups"], self._numbered()
        found, here = [[len(g["params"]) for g in groups] for groups in (saved, self.param_groups)]
        if found != here:
            raise UsageError(f"has groups of {found} parameters", "state_dict", f"this optimizer's have {here}")
        ids = [i for g in saved for i in g["params"]]
        for group, old in zip(self.param_groups, saved):
            group.update({k: v for k, v in old.items() if k != "params"})
            for key in ("amsgrad", "maximize"):
                if group.get(key):
                    raise UsageError("is not offered", key, "the saved state was made with it")
        reference = state_dict.get("ziggurat")
        if reference is not None:
            self.load(reference["manifest"])
        for p, i in zip(params, ids) if reference is None else ():
            if i in state_dict["state"]:
                self._write(p, state_dict["state"][i])
            elif "step" in self.state.get(p, {}):
                del self.state[p]
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _write(self, p, saved):
        with lent(p, mode="write"):
            self._write_state(p, saved)
        self._versions[p] = p._version

    def _write_state(self, p, saved):
        number, local = self._numbers[p], _local(p)
        # torch's SGD does not count; of dampening only the first step knows.
        step = saved.get("step", 1 if saved.get("momentum_buffer") is not None else 0)
        self.state[p], weights = self._begin_state(p, step)
        for part, name in enumerate(self._group_names(p)):
            self._write_part(p, str(part), saved, name, weights)
        if "master" in saved and local.dtype != torch.float32:
            self._write_part(p, "master", saved, "master", weights)
            self._written(p, weights)
        if "codes" in saved and self._format == "int8":
            codes = saved["codes"].contiguous()
            if codes.numel() != self._core.bytes(number):
                raise UsageError(f"has {codes.numel()} bytes", f"codes of parameter {number}",
                                 "they fit optimizers of the same segment_bytes")  # fmt: skip
            self._core.copy_blocks(number, False, codes.data_ptr())

    def _begin_state(self, p, step):
        """State of p as before its first step, but of this number of steps; and its weights in host memory."""
        number, weights = self._numbers[p], self._host_copy(_local(p))
        self._core.reset(number, weights.data_ptr())
        return {"step": torch.tensor(float(step)), "held": _Held(number, self._core.bytes(number))}, weights

    def _write_part(self, p, part, saved, name, weights):
        values = saved.get(name)
        if values is None:
            return
        values = _local(values).detach().to("cpu", torch.float32).contiguous()
        if values.numel() != weights.numel():
            raise UsageError(f"has {values.numel()} elements", f"{name} of parameter {self._numbers[p]}",
                             f"expected {weights.numel()}")  # fmt: skip
        self._core.write(self._numbers[p], part, weights.data_ptr(), values.data_ptr())

    @torch.no_grad()
    def save(self, directory):
        """Writes weights and state as a new checkpoint in `directory`; returns the path of its manifest.

        One segment is in memory at a time. It has its name only when all of it is on the drive, and hashes of all that
        is in it: `ziggurat checkpoint show` and `verify` read it. Raises IoError or OSError.
        """
        self._saved = _optimizer_files.save(self, directory)
        return self._saved

    @torch.no_grad()
    def load(self, path):
        """Takes weights, state and groups of a checkpoint of save(): its manifest, its directory, or the one above.

        All hashes are compared first. Raises UsageError where it is damaged or of another model.
        """
        self._saved = None
        _optimizer_files.load(self, path)

    # ---- life ----

    @property
    def store(self):
        """The store that holds the state; its statistics() tell what moved."""
        return self._store

    def close(self):
        """Ends the optimizer: its own store with it, or its tensors in the store that it was given."""
        self.flush()
        for hook in self._hooks.values():
            hook.remove()
        self._worker.shutdown()
        if self._own_store:
            self._store.close()
        else:
            for number in self._numbers.values():
                self._core.remove(number)

    def __getstate__(self):
        raise TypeError("an optimizer whose state lies in a store cannot be pickled; save its state_dict()")

    def __deepcopy__(self, memo):
        raise TypeError("an optimizer whose state lies in a store cannot be copied; load its state_dict() into another")
