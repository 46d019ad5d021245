#!/usr/bin/env python3
"""What `nvcc -Xptxas -v` says of kernels, as a Markdown table:

    tools/ptxas_table.py ARCHITECTURE CUDA_VERSION COMMIT FILE.txt...
"""
import pathlib
import re
import subprocess
import sys


def kernels_of(text):
    """(mangled name, registers, stack, spill stores, spill loads, shared, constant) of each kernel."""
    found, name, stack = [], None, (0, 0, 0)
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            name, stack = match.group(1), (0, 0, 0)
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack = tuple(int(n) for n in match.groups())
        elif name and (match := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            found.append((name, int(match.group(1)), *stack, int(shared.group(1)) if shared else 0))
            name = None
    return found


def demangled(names):
    out = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True).stdout.splitlines()
    return [re.sub(r"\(anonymous namespace\)::|zg::cuda::|zg::kernels::|zg::", "", n).replace("void ", "", 1) for n in out]


def main():
    architecture, version, commit, files = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
    rows = []
    for file in files:
        found = kernels_of(pathlib.Path(file).read_text())
        for name, kernel in zip(demangled([k[0] for k in found]) if found else [], found):
            rows.append((pathlib.Path(file).stem, name, *kernel[1:]))
    rows.sort()
    spilling = [r for r in rows if r[4] or r[5]]
    print(f"# Kernels for sm_{architecture}, as ptxas of CUDA {version} reports them\n")
    print(f"{len(rows)} kernels; {len(spilling)} spill; at most {max((r[2] for r in rows), default=0)} registers.\n")
    print(f"Made by tools/ptxas.sh at commit {commit}. Shared memory is the static part.\n")
    if spilling:
        print("Those that spill: " + ", ".join(f"`{r[1]}`" for r in spilling) + ".\n")
    print("| file | kernel | registers | stack | spill stores | spill loads | shared |\n|---|---|---|---|---|---|---|")
    for file, name, *numbers in rows:
        print(f"| {file} | `{name}` | " + " | ".join(str(n) for n in numbers) + " |")


if __name__ == "__main__":
    main()
