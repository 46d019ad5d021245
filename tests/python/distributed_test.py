"""FSDP2's DTensors, torch.distributed.checkpoint and DataLoader's workers beside a live optimizer. Needs torch."""
import os
import signal
import sys

from support import InFolder, SlowWorker, need, same_bits

need("torch")

import torch  # noqa: E402

if not torch.distributed.is_available():
    print("skipped: this torch has no torch.distributed")
    sys.exit(77)

from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402

import ziggurat as zg  # noqa: E402
import ziggurat.torch as zt  # noqa: E402


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Linear(33, 7))


def train(model, optimizer, first, last, clip=False):
    for step in range(first, last):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def fsdp_rank(rank, ranks, folder, overlap, nvme):
    """A rank of FSDP2 on CPUs; rank 0 leaves the whole weights."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,))
    model = make_model()
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    drive = os.path.join(folder, f"drive-{rank}")
    os.makedirs(drive)
    place = {"drives": {drive: "4MiB"}, "host_bytes": "64KiB"} if nvme else {"host_bytes": "4MiB"}
    optimizer = zt.AdamW(model.parameters(), lr=1e-2, segment_bytes=4096, overlap=overlap, **place)
    if overlap == "forward":
        optimizer.attach(model)
        # The first layer's forward gathers the other's weights too, whose updates come after the first one's.
        model[0].set_modules_to_forward_prefetch([model[2]])
        optimizer._worker = SlowWorker(0.1)
    train(model, optimizer, 0, 4)
    optimizer.flush()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=os.path.join(folder, "dcp"))
    whole = [p.full_tensor() for p in model.parameters()]
    moments = [s["exp_avg"].full_tensor() for s in optimizer.state_dict()["state"].values()]
    if rank == 0:
        torch.save({"weights": whole, "moments": moments}, os.path.join(folder, "whole.pt"))
    train(model, optimizer, 4, 6)
    optimizer.flush()  # what was got above are the parameters themselves, which DCP writes in place
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=os.path.join(folder, "dcp"))
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    again = [p.full_tensor() for p in model.parameters()]
    assert same_bits(whole, again), "a loaded checkpoint has other weights"
    torch.distributed.barrier()
    optimizer.close()
    torch.distributed.destroy_process_group()


class Fsdp(InFolder):
    def test_dtensors_on_two_ranks_are_one_rank(self):
        model = make_model()
        optimizer = zt.AdamW(model.parameters(), lr=1e-2, host_bytes="4MiB")
        train(model, optimizer, 0, 4)
        moments = [s["exp_avg"] for s in optimizer.state_dict()["state"].values()]
        for overlap, nvme in (("step", False), ("step", True), ("forward", True), ("backward", False)):
            folder = os.path.join(self.folder, overlap + str(nvme))
            os.makedirs(folder)
            torch.multiprocessing.spawn(fsdp_rank, (2, folder, overlap, nvme), nprocs=2)
            found = torch.load(os.path.join(folder, "whole.pt"))
            self.assertTrue(same_bits(model.parameters(), found["weights"]))
            self.assertTrue(same_bits(moments, found["moments"]))
        optimizer.close()


class Checkpoints(InFolder):
    def test_get_and_set_state_dict(self):
        model = make_model()
        optimizer = zt.AdamW(model.parameters(), lr=1e-2, host_bytes="4MiB")
        train(model, optimizer, 0, 3)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"m": model_state, "o": optimizer_state}, checkpoint_id=self.folder, no_dist=True)
        other_model = make_model()
        other = zt.AdamW(other_model.parameters(), lr=1e-2, host_bytes="4MiB")
        model_state, optimizer_state = get_state_dict(other_model, other)  # a step with gradients of zero
        dcp.load({"m": model_state, "o": optimizer_state}, checkpoint_id=self.folder, no_dist=True)
        set_state_dict(other_model, other, model_state_dict=model_state, optim_state_dict=optimizer_state)
        train(model, optimizer, 3, 6)
        train(other_model, other, 3, 6)
        self.assertTrue(same_bits(model.parameters(), other_model.parameters()))


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.full((4,), float(i))


class Workers(InFolder):
    def test_data_loaders_of_every_start_method(self):
        model = torch.nn.Linear(4, 1)
        optimizer = zt.AdamW(model.parameters(), host_bytes="64KiB", drives={self.folder: "4MiB"}, segment_bytes=4096)
        for method in ("fork", "spawn", "forkserver"):
            loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=method)
            seen = 0
            for batch in loader:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen += len(batch)
            self.assertEqual(seen, 16)
        self.assertEqual(int(optimizer.state[model.weight]["step"]), 12)
        optimizer.close()

    def test_an_optimizer_in_a_forked_child_is_refused(self):
        for overlap in ("step", "forward", "backward"):
            with self.subTest(overlap):
                self.refused_in_a_child(overlap)

    def refused_in_a_child(self, overlap):
        model = torch.nn.Linear(4, 1)
        optimizer = zt.AdamW(model.parameters(), host_bytes="4MiB", overlap=overlap)

        def work():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

        work()
        optimizer.flush()
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)  # ends a child that waits
            try:
                work()
                optimizer.flush()
            except zg.ForkError:
                os._exit(0)
            finally:
                os._exit(1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)
        work()
        optimizer.close()


if __name__ == "__main__":
    import unittest

    unittest.main()
