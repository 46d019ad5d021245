#!/usr/bin/env python3
"""What the loops with matrix products of CUDA kernels are made of, as a Markdown table.

  cuobjdump -sass attention_forward.o >sass.txt
  tools/ptxas_mix.py sass.txt...          cuobjdump's text, one or more

A row is a loop that has matrix instructions and no loop with them inside, of one execution by a warp. Shares are
predictions: the time of the matrix instructions over that of the busiest part of a quarter of a multiprocessor, if
all four quarters run the loop at once. Rates are those that NVIDIA documents ("Throughput of Native Arithmetic
Instructions" in the CUDA C++ Programming Guide):

  matrix        HMMA.16816.F32, 2048 multiplications: 8 clocks on sm_80. On sm_90 it would be 4 at wgmma's rate, of
                which mma.sync is taken to reach 0.63 (after arXiv 2402.13499): 6.35 clocks
  shared        128 bytes a clock for the four quarters: 16 clocks for LDSM of four matrices, 4 for a load or a store
                of at most 128 bytes by a warp
  exponentials  MUFU, 16 lanes a clock for the four quarters: 8 clocks
  issue         every instruction takes one clock, also those of branches that are not taken

Nothing is predicted of latencies, of barriers, and of what is between the loops.
"""
import re
import subprocess
import sys

MATRIX_CLOCKS = {"80": 8.0, "90": 6.35}
CLASSES = {"matrix": "HMMA", "LDSM": "LDSM", "LDS": r"LDS\b", "STS": "STS", "MUFU": "MUFU", "SHFL": "SHFL",
           "spilled": "(LDL|STL)"}


def kernels_of(text):
    """(architecture, mangled name, [(address, instruction)]) of each kernel."""
    found, architecture = [], "?"
    for line in text.splitlines():
        if match := re.search(r"arch = sm_(\d+)", line):
            architecture = match.group(1)
        elif match := re.search(r"Function : (\S+)", line):
            found.append((architecture, match.group(1), []))
        elif found and (match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?(.*?);", line)):
            found[-1][2].append((int(match.group(1), 16), match.group(2)))
    return found


def count(instructions, pattern):
    return sum(bool(re.match(pattern, text)) for text in instructions)


def loops_of(code):
    """The instructions of each innermost loop with matrix products."""
    spans = []
    for address, text in code:
        match = re.match(r"BRA\b.*?0x([0-9a-f]+)", text)
        if match and int(match.group(1), 16) < address:
            spans.append((int(match.group(1), 16), address))
    bodies = {span: [text for address, text in code if span[0] <= address <= span[1]] for span in spans}
    found = sorted({span for span in spans if count(bodies[span], CLASSES["matrix"])})
    return [bodies[a] for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)]


def row(architecture, name, body):
    n = {key: count(body, pattern) for key, pattern in CLASSES.items()}
    clocks = {"matrix": MATRIX_CLOCKS.get(architecture, 0) * n["matrix"],
              "shared": 16 * n["LDSM"] + 4 * (n["LDS"] + n["STS"]), "exponentials": 8 * n["MUFU"], "issue": len(body)}
    busiest = max(clocks, key=clocks.get)
    share = f"{clocks['matrix'] / clocks[busiest]:.2f}, {busiest}" if clocks["matrix"] else ""
    ratio = n["matrix"] / n["LDSM"] if n["LDSM"] else 0
    cells = [f"sm_{architecture}", f"`{name}`", len(body), *n.values(), f"{ratio:.2f}", clocks["shared"], share]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return
    columns = ["GPU", "kernel", "instructions", *CLASSES, "matrix per LDSM", "clocks of shared memory",
               "share, and what bounds it"]
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for file in sys.argv[1:]:
        with open(file) as opened:
            kernels = kernels_of(opened.read())
        mangled = "\n".join(kernel[1] for kernel in kernels)
        names = subprocess.run(["c++filt", "-p"], input=mangled, capture_output=True, text=True, check=True)
        for (architecture, _, code), name in zip(kernels, names.stdout.splitlines()):
            short = re.sub(r"\(anonymous namespace\)::|zg::cuda::|zg::", "", name).replace("void ", "", 1)
            for body in loops_of(code):
                print(row(architecture, short, body))


if __name__ == "__main__":
    main()
