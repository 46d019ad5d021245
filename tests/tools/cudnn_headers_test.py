#!/usr/bin/env python3
"""Tries out tools/cudnn_headers.sh without a network: pip finds wheels in a folder, or none."""
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest
import zipfile

TOOLS = pathlib.Path(__file__).resolve().parent.parent.parent / "tools"
WHEELS = {  # what the script asks for: tags of its wheel, where headers lie in it, the header
    "nvidia-cudnn-frontend": ("cp312-cp312-manylinux_2_28_x86_64", "include/", "cudnn_frontend.h"),
    "nvidia-cudnn-cu13": ("py3-none-manylinux_2_27_x86_64", "nvidia/cudnn/include/", "cudnn.h"),
}


class Headers(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        (self.root / "wheels").mkdir()
        shutil.copytree(TOOLS, self.root / "tools")
        self.script = self.root / "tools" / "cudnn_headers.sh"
        self.include = self.root / "build" / "cudnn" / "include"

    def make_wheels(self):
        """Wheels with the names and versions that the script wants, and their checksums in its copy here."""
        text = self.script.read_text()
        for package, (tags, folder, header) in WHEELS.items():
            version, checksum = re.search(rf"{package}==(\S+) (\w+)", text).groups()
            name = f"{package.replace('-', '_')}-{version}"
            wheel = self.root / "wheels" / f"{name}-{tags}.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(f"{folder}{header}", f"// {header}\n")
                archive.writestr(f"{folder}more/part.h", "// part\n")
                archive.writestr("nvidia/cudnn/lib/libcudnn.so.9", "a library")
                archive.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
                archive.writestr(f"{name}.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tags}\n")
                archive.writestr(f"{name}.dist-info/RECORD", "")
            text = text.replace(checksum, hashlib.sha256(wheel.read_bytes()).hexdigest())
        self.good = text

    def fetch(self):
        """With a compiler that finds no header."""
        environment = dict(os.environ, CXX="false", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(self.root / "wheels"))
        done = subprocess.run([self.script, self.root / "build"], capture_output=True, text=True, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stderr

    def test_headers_alone_are_taken(self):
        self.make_wheels()
        self.script.write_text(self.good)
        self.assertIn("headers of nvidia-cudnn-frontend==", self.fetch())
        files = sorted(str(f.relative_to(self.include)) for f in self.include.rglob("*") if f.is_file())
        self.assertEqual(files, ["cudnn.h", "cudnn_frontend.h", "more/part.h"])
        self.assertEqual(self.fetch(), "")  # once

    def test_without_a_network_the_build_goes_on(self):
        self.assertIn("attention by cuDNN is not built: cudnn_frontend.h is not installed", self.fetch())
        self.assertFalse(self.include.exists())

    def test_another_content_is_refused(self):
        self.make_wheels()
        self.assertIn("attention by cuDNN is not built", self.fetch())
        self.assertFalse(self.include.exists())


if __name__ == "__main__":
    unittest.main()
