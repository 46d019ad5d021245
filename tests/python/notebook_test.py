"""The notebook of tools/examples: its cells run one after the other, as Jupyter runs them. Needs matplotlib."""
import ast
import json
import os
import pathlib

from support import InFolder, need

need("numpy", "matplotlib", "ziggurat._train")

import matplotlib  # noqa: E402

matplotlib.use("Agg")

from ziggurat import UsageError  # noqa: E402

NOTEBOOK = pathlib.Path(__file__).resolve().parents[2] / "tools/examples/run_log.ipynb"


def run_cell(source, names):
    """Runs a cell, and returns the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


class Notebook(InFolder):
    def test_every_cell_runs(self):
        os.environ["ZG_NOTEBOOK_FOLDER"] = self.folder
        cells = json.loads(NOTEBOOK.read_text())["cells"]
        names, shown = {}, []
        for cell in cells:
            if cell["cell_type"] == "code":
                self.assertEqual(cell["outputs"], [], "a notebook in the tree has no outputs")
                shown.append(run_cell("".join(cell["source"]), names))
        tables = [s._repr_html_() for s in shown if hasattr(s, "_repr_html_")]
        self.assertGreaterEqual(len(tables), 4)
        log, figure = names["log"], names["figure"]
        self.assertEqual(len(log), 20)
        panels = [axis.get_ylabel() for axis in figure.axes]
        self.assertEqual(panels, ["loss", "tokens_per_s", "MB per step", "ms waited", "ms"])
        self.assertGreater(os.path.getsize(os.path.join(self.folder, "run.png")), 10_000)
        one = figure.axes[0]
        one.clear()
        self.assertIs(log.plot("loss", axes=one), figure)
        with self.assertRaisesRegex(UsageError, "axes"):
            log.plot("loss", "lr", axes=one)
        losses = figure.axes[0].lines[0].get_ydata().tolist()
        self.assertEqual(losses, log["loss"])
        times = {line.get_label(): line.get_ydata().tolist() for line in figure.axes[4].lines}
        self.assertEqual(times, {"step_ms": log["step_ms"], "bound_ms": log["bound_ms"]})
        self.assertEqual(len(list(pathlib.Path(self.folder, "run").glob("events.out.tfevents.*"))), 1)


if __name__ == "__main__":
    import unittest

    unittest.main()
