"""Lightning with the optimizers, by the lines of docs/python.md; needs lightning."""
import os
import tempfile
import warnings

from support import InFolder, need, same_bits

need("torch", "lightning")

import lightning  # noqa: E402
import torch  # noqa: E402

import ziggurat.torch as zt  # noqa: E402

warnings.filterwarnings("ignore")


class Regression(lightning.LightningModule):
    def __init__(self, options):
        super().__init__()
        torch.manual_seed(0)
        self.options, self.losses = options, []
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, _batch, _number):
        # By the step: a resumed Lightning begins its data anew.
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(self.global_step))
        loss = (self.net(batch)[:, 0] - batch.square().mean(dim=1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return zt.AdamW(self.parameters(), lr=1e-2, **self.options)


class Fits(InFolder):
    def fit(self, steps, checkpoint=None, **options):
        drives = {tempfile.mkdtemp(dir=self.folder): "64MiB"}
        model = Regression({"host_bytes": "64KiB", "drives": drives, "segment_bytes": 8192, **options})
        data = torch.randn(20, 16, generator=torch.Generator().manual_seed(1))
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, gradient_clip_val=1.0, default_root_dir=self.folder,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=checkpoint)
        return model, trainer

    def test_fit_saved_and_resumed(self):
        whole, _ = self.fit(10)
        self.assertEqual(len(whole.losses), 10)
        first, trainer = self.fit(5)
        path = os.path.join(self.folder, "half.ckpt")
        trainer.save_checkpoint(path)
        second, _ = self.fit(10, path)
        self.assertEqual(whole.losses, first.losses + second.losses)
        self.assertTrue(same_bits(whole.parameters(), second.parameters()))


if __name__ == "__main__":
    import unittest

    unittest.main()
