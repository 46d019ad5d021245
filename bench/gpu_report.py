"""Results of bench/gpu.sh as Markdown. A stage tells tables ({"title", "columns", "rows"}), aims ({"what", "value", "aim",
"met"}) and notes (lines); how it went is the driver's."""


def cell(value):
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def table(columns, rows):
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cell(v) for v in row) + " |" for row in rows]


def section(stage):
    lines = [f"## {stage['stage']}: {stage['status']}", ""]
    if "seconds" in stage:
        lines += [f"{stage['seconds']:.1f} s of at most {stage['limit_s']:.0f} s.", ""]
    lines += [f"- {note}" for note in stage.get("notes", [])] + ([""] if stage.get("notes") else [])
    for t in stage.get("tables", []):
        lines += [t["title"], ""] + table(t["columns"], t["rows"]) + [""]
    if stage.get("log_tail"):
        lines += ["The end of its log:", "", "```"] + stage["log_tail"] + ["```", ""]
    return lines


def markdown(results):
    m = results["machine"]
    title = "# A GPU's tests and benchmarks" + (" (dry run on the processor: the numbers mean nothing)" if results["dry_run"] else "")
    lines = [title, "", f"{m['date']}, commit {m['commit']}.", ""]
    lines += table(["machine", ""], m["table"]) + [""]
    summary = [[s["stage"], s["status"], f"{s['seconds']:.1f}" if "seconds" in s else ""] for s in results["stages"]]
    lines += table(["stage", "how it went", "seconds"], summary) + [""]
    aims = [[a["what"], a["value"], a["aim"], {True: "yes", False: "no", None: "?"}[a["met"]]]
            for s in results["stages"] for a in s.get("aims", [])]
    if aims:
        lines += table(["aim", "measured", "asked", "met"], aims) + [""]
    for stage in results["stages"]:
        lines += section(stage)
    return "\n".join(lines).rstrip() + "\n"
