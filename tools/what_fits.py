#!/usr/bin/env python3
"""Makes the table "what fits where" of docs/planning.md: models against machines.

    tools/what_fits.py --program build/ziggurat [--models NAME,...] [--machines NAME,...] [--update]
    tools/what_fits.py --check        the table has the models and machines that this script has

Each cell is a plan (`ziggurat plan MODEL --machine NAME --quick --json`) of the usual run of a model alone: all GPUs
and drives of the machine, nine tenths of its memory, 8 sequences a GPU of 4096 tokens. It says tokens per second and
the part that binds, or "no" where the run does not fit. Models are tests/reference/configs. A plan of a model of a
trillion parameters takes a minute. Other machines: --machines h100-8,b200-8. --update writes it into the document.
"""
import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- what_fits.py begins -->\n", "<!-- what_fits.py ends -->\n"
MODELS = ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "dense-1t"]
MACHINES = ["h200-8"]


def cell(program, model, machine):
    config = ROOT / "tests" / "reference" / "configs" / (model + ".json")
    command = [program, "plan", str(config), "--machine", machine, "--quick", "--json"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}: {run.stderr.strip()}")
    said = json.loads(run.stdout)
    if not said["fits"]:
        return said["parameters"], "no"
    speed = said["tokens_per_second"]
    return said["parameters"], f"{speed:,.0f}, {said['bound_by']}"


def size_of(parameters):
    return f"{parameters / 1e12:.2f}T" if parameters >= 1e12 else f"{parameters / 1e9:.1f}B"


def table(program, models, machines):
    lines = ["| model | parameters | " + " | ".join(machines) + " |", "| --- | --- |" + " --- |" * len(machines)]
    for model in models:
        cells = []
        for machine in machines:
            parameters, text = cell(program, model, machine)
            cells.append(text)
            print(f"{model} {machine}: {text}", file=sys.stderr, flush=True)
        lines.append(f"| {model} | {size_of(parameters)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def parts_of(page):
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        sys.exit(f"{PAGE}: expected one line {BEGIN.strip()} and one {END.strip()}")
    before, rest = page.split(BEGIN)
    inside, after = rest.split(END)
    return before, inside, after


def check(page):
    rows = [[c.strip() for c in line.strip("|\n").split("|")] for line in parts_of(page)[1].splitlines()]
    if rows[0] != ["model", "parameters", *MACHINES]:
        sys.exit(f"{PAGE}: the table has other machines than tools/what_fits.py: run it with --update")
    if [r[0] for r in rows[2:]] != MODELS:
        sys.exit(f"{PAGE}: the table has other rows than tools/what_fits.py: run it with --update")
    if any(len(r) != 2 + len(MACHINES) or not all(r) for r in rows[2:]):
        sys.exit(f"{PAGE}: a row of the table has other cells than machines: run tools/what_fits.py --update")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "build" / "ziggurat"))
    parser.add_argument("--models", default=",".join(MODELS), help="names in tests/reference/configs")
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--update", action="store_true", help="write the table into docs/planning.md")
    parser.add_argument("--check", action="store_true", help="look at the document and make no plan")
    args = parser.parse_args()
    if args.check:
        return check(PAGE.read_text())
    made = table(args.program, args.models.split(","), args.machines.split(","))
    if not args.update:
        return print(made, end="")
    before, _, after = parts_of(PAGE.read_text())
    PAGE.write_text(before + BEGIN + made + END + after)


if __name__ == "__main__":
    main()
